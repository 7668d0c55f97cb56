// Combinations of policies and budgets that are left out of a run.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "policies/text/configured.h"

namespace kvreplay {

/// "[POLICY:]KEY=VALUE,..." or a POLICY alone: the cells that have all of these values, however they are written and
/// whether anybody gave them or not. KEY is a parameter, or `budget`. Without POLICY it is about any policy that has
/// such parameters.
class Exclusion {
 public:
  /// Throws Error{usage} for what is not of this form.
  explicit Exclusion(GivenValue given);

  /// Throws Error{usage} for a value that the parameter of the policy that is named cannot have.
  bool covers(const ConfiguredPolicy& policy) const;
  bool covers(const Budget& budget) const;

  const GivenValue& given() const { return given_; }

  /// Why it covers none of them, to be thrown.
  Error covers_nothing(const std::vector<ConfiguredPolicy>& policies) const;

 private:
  GivenValue given_;
  std::string policy_;  // empty: any
  std::vector<std::pair<std::string, std::string>> values_;
  std::optional<Budget> budget_;
};

}  // namespace kvreplay
