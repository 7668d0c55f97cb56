// A policy that another one is made of.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

class ConfiguredPolicy;

/// The value of a parameter `(POLICY)`, or `none | (POLICY)` where it begins as none: parsed when it is set.
struct InnerPolicy {
  InnerPolicy() = default;
  /// A default, in its normal form.
  explicit InnerPolicy(std::string_view normal);

  explicit operator bool() const { return policy != nullptr; }
  const ConfiguredPolicy* operator->() const { return policy.get(); }
  /// Where it comes from; nowhere, if there is none.
  std::vector<Source> sources() const;

  /// How Parameters::add() sets it: the normal form of a policy as users write it, with every seed. `seed` is the
  /// default of its seed parameters. Throws Error{usage}.
  std::string set(std::string_view given, std::uint64_t seed);

  std::string text = "none";
  std::shared_ptr<const ConfiguredPolicy> policy = nullptr;

 private:
  bool may_be_none_ = true;
};

}  // namespace kvreplay
