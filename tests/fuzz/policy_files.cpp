// A file of policies, as -p @FILE.yaml reads it.
#include <cstdint>
#include <fstream>

#include "policies/configured.h"
#include "policies/policy_file.h"
#include "survival.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const OwnFolder folder;
  const std::filesystem::path path = folder / "policies.yaml";
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  survives([&] {
    for (const std::string& policy : policies_of_file(path))
      if (policy.find('/') == std::string::npos && policy.find(".npy") == std::string::npos)
        survives([&] { ConfiguredPolicy::parse(policy).plans(3); });
  });
  return 0;
}
