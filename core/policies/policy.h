// A policy: a card, parameters, and a plan that they make (plan.h). A policy file names only what its paper changes;
// every member of Plan has a default.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parameters.h"
#include "policies/plan.h"
#include "registry.h"

namespace kvreplay {

/// The file that a policy or a part comes from, where the program was built without it.
struct Source {
  std::string path = {};
  std::string hash = {};  // XXH3-128 of its bytes, in hexadecimal digits; empty: it is built in

  bool is_built_in() const { return hash.empty(); }
};

/// Of what registers itself now: the plug-in that is being loaded, or the program itself.
const Source& current_source();

/// The main subject of a policy: policies are listed in this order.
enum class Family { control, rule, attention, geometry, budget, chunk, store, reading, own };

inline constexpr Choice<Family> families[] = {
    {"controls", Family::control},
    {"positions", Family::rule},                    // token positions alone
    {"attention", Family::attention},               // attention of queries
    {"keys and values", Family::geometry},          // mainly keys and values
    {"budget allocation", Family::budget},          // budgets of layers and heads
    {"chunks", Family::chunk},                      // chunks of consecutive tokens
    {"quantised or merged caches", Family::store},  // keys or values change
    {"sparse reads", Family::reading},              // a set for each query
    {"user-defined", Family::own},
};

inline const char* word_of(Family family) { return std::ranges::find(families, family, &Choice<Family>::value)->word; }

/// The description of a policy.
struct Card {
  const char* name;
  const char* summary;
  const char* paper;
  const char* score;
  Family family = Family::own;
  const char* other_names = "";  // separated by spaces: names that other programs give to it
};

/// A registered policy with values of its own.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual const Card& card() const = 0;
  /// Declares the parameters, bound to this object.
  virtual Parameters parameters() = 0;
  /// Declares `name` where the policy has parameters that only its user can name; false: it has none.
  virtual bool declare(std::string_view /*name*/) { return false; }
  /// The default of every seed parameter of the policies that it is made of.
  virtual void set_seed(std::uint64_t) {}
  /// Where the policies that it is made of come from, and the tables that it reads: one that parses or makes others
  /// must say so, since the results of an earlier version of their files are not its own.
  virtual std::vector<Source> sources() const { return {}; }
  /// Throws Error{usage} for values that contradict each other, whatever the number of layers.
  virtual void check() const = 0;
  /// Throws Error{usage} when a policy that it is made of was given a value too large for P tokens or L layers.
  virtual void check_limits(int /*prompt*/, int /*layers*/) const {}
  /// Ascending, without gaps, for L treated layers. Throws Error{usage} where they cannot be.
  virtual std::vector<LayerPlan> plans(int layers) const = 0;
};

/// Adds the plans of `policy` for the next `layers` layers.
void append_plans(std::vector<LayerPlan>& plans, const Policy& policy, int layers);

struct PolicyEntry {
  std::string name;
  std::function<std::unique_ptr<Policy>()> make;
  Source source = current_source();
};

Registry<PolicyEntry>& policies();

/// `T` has a static `card`, `parameters(Parameters&)`, and `plan()` or, where layers differ, `plans(layers)`. Define
/// one in the policy's file.
template <class T>
struct Registered {
  struct Holder final : Policy {
    T value;
    const Card& card() const override { return T::card; }
    Parameters parameters() override {
      Parameters declared{T::card.name};
      value.parameters(declared);
      return declared;
    }
    void set_seed(std::uint64_t seed) override {
      if constexpr (requires { value.set_seed(seed); }) value.set_seed(seed);
    }
    std::vector<Source> sources() const override {
      if constexpr (requires { value.sources(); })
        return value.sources();
      else
        return {};
    }
    void check() const override {
      if constexpr (requires { value.check(); })
        value.check();
      else
        plans(2);
    }
    std::vector<LayerPlan> plans(int layers) const override {
      if constexpr (requires { value.plans(layers); })
        return value.plans(layers);
      else
        return {{0, layers, value.plan()}};
    }
  };
  Registered() {
    policies().add({T::card.name, [] { return std::unique_ptr<Policy>(new Holder); }});
  }
};

}  // namespace kvreplay
