#include "policies/text/inner_policy.h"

#include "policies/text/configured.h"

namespace kvreplay {

InnerPolicy::InnerPolicy(std::string_view normal) : may_be_none_(false) { text = set(normal, 0); }

std::vector<Source> InnerPolicy::sources() const { return policy ? policy->sources() : std::vector<Source>{}; }

std::string InnerPolicy::set(std::string_view given, std::uint64_t seed) {
  if (may_be_none_ && given == "none") {
    policy = nullptr;
    return "none";
  }
  // Parsed again, so that its given values are those of the normal form.
  std::string normal = ConfiguredPolicy::parse(given, seed).label_with_seeds();
  policy = std::make_shared<const ConfiguredPolicy>(ConfiguredPolicy::parse(normal));
  return normal;
}

}  // namespace kvreplay
