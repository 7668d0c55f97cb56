// XXH3-128 over bytes that arrive in pieces.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace kvreplay {

class Hash {
 public:
  Hash();
  void update(std::span<const std::byte> bytes);
  void update(std::string_view bytes) { update(std::as_bytes(std::span(bytes.data(), bytes.size()))); }
  /// Of everything so far, in the canonical (big-endian) form: 32 lower-case hexadecimal digits.
  std::string digits() const;

 private:
  struct Free {
    void operator()(void* state) const;
  };
  std::unique_ptr<void, Free> state_;
};

std::string hash_of(std::span<const std::byte> bytes);

}  // namespace kvreplay
