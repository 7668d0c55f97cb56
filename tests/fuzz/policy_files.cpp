// A file of policies, as -p @FILE.yaml reads it.
#include "policies/text/configured.h"
#include "policies/text/policy_file.h"
#include "survival.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const OwnFolder folder;
  survives([&] {
    for (const std::string& policy : policies_of_file(folder.with("policies.yaml", {data, size})))
      if (policy.find('/') == std::string::npos && policy.find(".npy") == std::string::npos)
        survives([&] { ConfiguredPolicy::parse(policy).plans(3); });
  });
  return 0;
}
