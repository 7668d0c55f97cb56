// The backend that a suite runs over: the one that KVREPLAY_TEST_BACKEND names, "cpu" by default; and its levels, which
// are what else decides which kernels run.
#pragma once

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "cpu/simd_level.h"
#include "error.h"

namespace kvreplay {

inline std::string tested_backend_name() {
  const char* name = std::getenv("KVREPLAY_TEST_BACKEND");
  return name != nullptr ? name : "cpu";
}

inline std::unique_ptr<Backend> tested_backend(int threads) { return make_backend(tested_backend_name(), threads); }

/// Heads of so many numbers are beyond it: the device's shared memory.
inline bool refuses_heads_of(int dim) { return tested_backend_name() == "cuda" && dim > 256; }

/// A level for one scope; then again the one before.
class ForcedLevel {
 public:
  explicit ForcedLevel(const std::string& level) {
    if (const char* before = std::getenv(variable())) before_ = before;
    setenv(variable(), level.c_str(), 1);
  }
  ~ForcedLevel() {
    if (before_)
      setenv(variable(), before_->c_str(), 1);
    else
      unsetenv(variable());
    choose_simd_level();
  }
  ForcedLevel(const ForcedLevel&) = delete;
  ForcedLevel& operator=(const ForcedLevel&) = delete;

 private:
  static const char* variable() { return tested_backend_name() == "cuda" ? "KVREPLAY_CUDA" : "KVREPLAY_SIMD"; }

  std::optional<std::string> before_;
};

/// Those that this machine has, best first.
inline std::vector<std::string> tested_levels() {
  std::vector<std::string> levels;
  if (tested_backend_name() == "cpu") {
    for (const SimdLevel& level : simd_levels()) levels.push_back(level.name);
    return levels;
  }
  for (const char* level : {"warp-groups", "warps"}) {
    const ForcedLevel forced(level);
    try {
      tested_backend(1);
      levels.push_back(level);
    } catch (const Error& error) {
      if (error.refusal() != Refusal::capability) throw;
    }
  }
  return levels;
}

}  // namespace kvreplay
