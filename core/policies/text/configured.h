// Policies as users write them: NAME[:KEY=VALUE{,KEY=VALUE}], lists and files of them, and budgets.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/protected_tokens.h"

namespace kvreplay {

/// The preset that has kvpress's defaults.
inline constexpr const char* press_preset = "kvpress";

/// A policy with all its values, the parts that the user put into it, and which values the user gave.
class ConfiguredPolicy {
 public:
  /// "snapkv:window=32,pool=avg"; a preset is applied before the other values: the name of a press of kvpress stands
  /// for the preset of its defaults, where the policy has one. `seed` is the default of every seed parameter. score=,
  /// select=, allocate=, share=, schedule= and store=, and heads= where the policy has no parameter of that name, put a
  /// part into the policy's plan, whose parameters then are the policy's too; one that both have is one.
  /// "layers:0-14=(chunkkv:chunk=20),15-29=snapkv" replays ranges of treated layers by policies of their own. A policy
  /// that selects by score has the parameter sinks= where it declares none itself, one that scores by an observation
  /// window has window_at=, and protect=(sinks=4,recent=10%) replaces the tokens that it protects. Throws Error{usage}.
  static ConfiguredPolicy parse(std::string_view text, std::uint64_t seed = 0);

  /// The text with a preset, or a press of kvpress, spelt as the values that it stands for; any other text as it is.
  /// Throws Error{usage} where parse() does.
  static std::string without_preset(std::string_view text);

  /// To be described: its values are not checked, and its plans may throw.
  static ConfiguredPolicy with_defaults(std::string_view name);

  /// Replaces the protected tokens of the policy, or of the policies that it is made of. Policies
  /// without protected tokens are not changed. Throws Error{usage} where the user has replaced them already.
  void replace_protected(const ProtectedTokens& tokens);

  const std::string& name() const { return name_; }
  const Card& card() const { return policy_->card(); }
  /// Whether it has the preset of kvpress's defaults.
  bool has_press_preset() const;
  /// The files that it comes from where it is not built in, those of its parts and of policies that it is made of
  /// included: each once, ascending by hash.
  std::vector<Source> sources() const;
  /// Their hashes, with commas; empty: all of it is built in.
  std::string source_hash() const;
  Parameters parameters() const;
  /// "window=8,kernel=7,...": every parameter.
  std::string params() const { return parameters().canonical(); }
  /// The name, and the values that differ from the defaults.
  std::string label() const;
  /// The same with every seed, so that it means one policy whatever the default of seeds is.
  std::string label_with_seeds() const;
  /// For L treated layers. Throws Error{usage} where ranges of layers do not cover them.
  std::vector<LayerPlan> plans(int layers) const;

  /// Throws Error{usage} when a value that the user gave is too large for P tokens or L layers. Defaults are clamped
  /// where they are used.
  void check_limits(int prompt, int layers) const;

  /// Why it has no random twin for L treated layers, as "its kept set is dynamic"; empty: it has one. Layers that keep
  /// every token, beside others that have one, are their own twins.
  std::string why_no_twin(int layers) const;

  /// Throws Error{usage} unless ranges of layers that are cut out of it have the sets that it has there itself: each
  /// layer's depend on that layer and the budget alone.
  void check_layers_apart() const;

 private:
  static ConfiguredPolicy made(std::string_view name);
  struct Placed {
    PartKind kind;
    std::string name;
    std::shared_ptr<PlanPart> part;
  };
  /// Parameters that no policy or part declares. The plans decide which of them a policy has.
  struct Common {
    bool has_sinks = false, has_window_at = false;
    int own_sinks = 0;  // of the plan itself: the default
    int sinks = 0;
    WindowAt window_at = WindowAt::end;
    std::optional<ProtectedTokens> protect = {};
    std::string lacks_protection =
        {};  // a reason of the function of that name; empty: at least one plan has protected tokens

    /// `filled`: the plan with its parts, which decides what applies.
    void apply_to(Plan& plan, const Plan& filled) const;
  };
  void find_common();
  void set_common(const std::string& name, const std::string& text);
  void fill_parts(Plan& plan) const;

  void place_parts(std::vector<std::pair<std::string, std::string>>& values);
  void share_parameters();
  void set(std::string_view name, std::string_view text);
  /// Throws Error{usage} for parts that do not fit, and for a value that was given and that none of them reads.
  void check_given() const;
  std::string label_of(bool (*also)(const Parameter&)) const;

  std::string name_;
  Source source_ = {};  // of the policy itself; another file's may have its name by now
  std::shared_ptr<Policy> policy_;
  std::vector<Placed> parts_;
  std::shared_ptr<Common> common_ = std::make_shared<Common>();
  std::set<std::string, std::less<>> given_;
};

/// "h2o,snapkv:window=32,pool=avg,random" -> three policies. A piece with '=' before any ':' or '(' belongs to the
/// policy before it; commas inside parentheses do not separate; "@mine.yaml" stands for the policies of that file
/// (policy_file.h).
std::vector<std::string> split_policies(std::string_view text);

/// Bytes of a number of tokens in every row of every layer; they rise with it.
using BytesOfTokens = std::function<double(int tokens)>;

/// A budget as asked for: a literal with a point, an exponent or '%' is a fraction of P in (0, 1], with "@seen" of all
/// tokens seen so far; with KiB, MiB or GiB it is the memory that kept keys and values may take; an integer is a count.
struct Budget {
  std::string literal;
  double fraction = 0;  // one of the three is not 0
  int count = 0;
  double bytes = 0;
  bool at_seen = false;

  /// The share of the tokens seen so far that it grows with; 0: it stands.
  double of_seen() const { return at_seen ? fraction : 0.0; }

  static Budget parse(std::string_view text);
  /// kvpress's compression ratio, the evicted share of the prompt, as the literal of a budget: "0.9" -> "0.1". Throws
  /// Error{usage} unless it is in [0, 1).
  static std::string of_compression_ratio(std::string_view text);
  /// max(1, floor(f * P + 1/2)), the count, or the largest number of tokens that fits into the bytes: 0 to P.
  int tokens(int prompt, const BytesOfTokens& bytes_of = {}) const;
};

}  // namespace kvreplay
