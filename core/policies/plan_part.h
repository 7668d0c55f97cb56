// The parts of plans by name, so that a user can put one into any policy: select=chunks, schedule=threshold(4000,2000).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parameters.h"
#include "policies/policy.h"

namespace kvreplay {

/// Which member of Plan a part fills.
enum class PartKind { score, heads, select, allocate, share, schedule, store };

inline constexpr Choice<PartKind> part_kinds[] = {{"score", PartKind::score},   {"heads", PartKind::heads},
                                                  {"select", PartKind::select}, {"allocate", PartKind::allocate},
                                                  {"share", PartKind::share},   {"schedule", PartKind::schedule},
                                                  {"store", PartKind::store}};

/// A part with values of its own.
class PlanPart {
 public:
  virtual ~PlanPart() = default;
  virtual Parameters parameters() = 0;
  /// The default of every seed parameter of the values that it reads as text.
  virtual void set_seed(std::uint64_t) {}
  /// Fills its member of the plan.
  virtual void fill(Plan& plan) const = 0;
};

struct PartCard {
  std::string name;
  std::string summary;
  std::function<std::unique_ptr<PlanPart>()> make;
  Source source = current_source();
};

Registry<PartCard>& parts(PartKind kind);

/// "NAME" or "NAME(VALUE,...)". A value may have its name, as in turboquant(bits=4); others follow the order of the
/// parameters.
struct PartText {
  std::string text;
  std::string name;
  std::vector<std::string> values;

  /// Throws Error{usage}, as assignments() does.
  static PartText parse(std::string_view text);
  /// Names and values, not set.
  std::vector<std::pair<std::string, std::string>> assignments(const Parameters& parameters) const;
};

/// Text whose assignments are appended to `values`, and not set. Throws Error{usage}.
std::unique_ptr<PlanPart> parse_part(PartKind kind, std::string_view text,
                                     std::vector<std::pair<std::string, std::string>>& values);
/// The same with its values set.
std::unique_ptr<PlanPart> make_part(PartKind kind, std::string_view text);

/// "NAME(KEY=VALUE,...)" with all values: equal text, equal part.
template <class T>
std::string name_with_values(const char* name, T part) {
  Parameters declared{name};
  part.parameters(declared);
  return std::string(name) + "(" + declared.canonical() + ")";
}

/// `T` has `static constexpr PartKind kind`, `name` and `summary`, `parameters(Parameters&)` and `fill(Plan&) const`.
template <class T>
struct RegisteredPart {
  struct Holder final : PlanPart {
    T value;
    Parameters parameters() override {
      Parameters declared{T::name};
      value.parameters(declared);
      return declared;
    }
    void set_seed(std::uint64_t seed) override {
      if constexpr (requires { value.set_seed(seed); }) value.set_seed(seed);
    }
    void fill(Plan& plan) const override { value.fill(plan); }
  };
  RegisteredPart() {
    parts(T::kind).add({T::name, T::summary, [] { return std::unique_ptr<PlanPart>(new Holder); }});
  }
};

/// A part without parameters.
struct RegisteredFixedPart {
  RegisteredFixedPart(PartKind kind, const char* name, const char* summary, void (*fill)(Plan&));
};

}  // namespace kvreplay
