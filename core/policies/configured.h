// Policies as users write them: NAME[:KEY=VALUE{,KEY=VALUE}], lists of them, and budgets.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// A policy with all its values, and which of them the user gave.
class ConfiguredPolicy {
 public:
  /// "snapkv:window=32,pool=avg"; a preset is applied before the other values, `seed` is the default of every seed
  /// parameter. Throws Error{usage}.
  static ConfiguredPolicy parse(std::string_view text, std::uint64_t seed = 0);

  const std::string& name() const { return name_; }
  const Card& card() const { return policy_->card(); }
  Parameters parameters() const { return policy_->parameters(); }
  /// "window=8,kernel=7,...": every parameter.
  std::string params() const { return parameters().canonical(); }
  /// The name, and the values that differ from the defaults.
  std::string label() const;
  Plan plan() const { return policy_->plan(); }

  /// Throws Error{usage} when a value that the user gave is too large for P tokens or L layers. Defaults are clamped
  /// where they are used.
  void check_limits(int prompt, int layers) const;

 private:
  std::string name_;
  std::shared_ptr<Policy> policy_;
  std::set<std::string, std::less<>> given_;
};

/// "h2o,snapkv:window=32,pool=avg,random" -> three policies. A piece with '=' before any ':' or '(' belongs to the
/// policy before it; commas inside parentheses do not separate.
std::vector<std::string> split_policies(std::string_view text);

/// A budget as asked for: a literal with a point, an exponent or '%' is a fraction of P in (0, 1], an integer a count.
struct Budget {
  std::string literal;
  double fraction = 0;  // 0: a count
  int count = 0;

  static Budget parse(std::string_view text);
  /// max(1, floor(f * P + 1/2)), or the count.
  int tokens(int prompt) const;
};

}  // namespace kvreplay
