// A parameter is declared once, by its owner: default, range, help. Command line, tables and documentation read that.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"

namespace kvreplay {

/// A number of tokens, or a fraction of a budget; which one, the literal says: "8" is a count, "0.25" and "25%" are
/// fractions.
struct Amount {
  static Amount tokens(int n) { return {n, 0.0}; }
  static Amount fraction(double f) { return {-1, f}; }
  /// Throws Error{usage} for anything but 0 or more tokens and fractions 0..1.
  static Amount parse(std::string_view where, std::string_view text);

  bool is_fraction() const { return count < 0; }
  /// floor(fraction * whole), or the count.
  int of(int whole) const;
  /// max(1, floor(fraction * P + 1/2)), or the count: how a budget is read.
  int of_prompt(int prompt) const;
  std::string text() const;

  int count = -1;
  double share = 0.0;
};

/// The largest value that a parameter may take on a given trace; known only when the trace is.
enum class UpTo { any, prompt, layers };

struct IntRange {
  int least = 0;
  int most = std::numeric_limits<int>::max();
  UpTo up_to = UpTo::any;
  bool odd = false;
};

/// A layer by its number, -L ... L-1: -1 is the last one.
inline constexpr IntRange any_layer{.least = -1'000'000, .most = 1'000'000, .up_to = UpTo::layers};

struct RealRange {
  double least = 0.0;
  double most = 1.0;
};

/// One declared parameter, bound to the value that it sets.
struct Parameter {
  std::string name;
  std::string help;
  std::string range;                          // as people read it: "1..4096", "sum | mean"
  std::string default_text;                   // the declared value
  std::function<std::string()> text;          // the value now, in the form that `set` reads
  std::function<void(std::string_view)> set;  // throws Error{usage}
  std::function<int()> tokens;                // empty, or the value to hold against `up_to`
  UpTo up_to = UpTo::any;
  bool is_seed = false;
  std::string part;  // the one part of a plan that reads it, as users call it; empty: not one alone

  /// What stands after "name=" in a list of values.
  std::string value() const;
  /// "name=value"; a value that would not end at the next comma stands in parentheses.
  std::string assignment() const;
};

/// A named bundle of values, written as preset=NAME.
struct Preset {
  std::string name;
  std::string who;
  std::vector<std::pair<std::string, std::string>> values;
};

/// A word that stands for a value of an enumerated parameter.
template <class E>
struct Choice {
  const char* word;
  E value;
};

/// The parameters of one object, in the order of their declaration. Holds references into the object: make it, use it,
/// drop it.
class Parameters {
 public:
  /// `owner` names the policy in messages.
  explicit Parameters(std::string owner) : owner_(std::move(owner)) {}

  void add(std::string name, int& value, IntRange range, std::string help);
  void add(std::string name, double& value, RealRange range, std::string help);
  void add(std::string name, bool& value, std::string help);
  /// Tokens 0..P (or any number of them), or a fraction 0..1 of `whole`.
  void add(std::string name, Amount& value, std::string help, UpTo up_to = UpTo::prompt,
           const std::string& whole = "the budget");
  /// A seed; the program's --seed is its default.
  void add_seed(std::string name, std::uint64_t& value, std::string help);
  /// Text that its owner reads, such as another policy in parentheses; `normal` gives it its one normal form, or throws
  /// what is wrong with it. `up_to` is held against the number that the text is, if it is one.
  void add(std::string name, std::string& value, std::string range, std::function<std::string(std::string_view)> normal,
           std::string help, UpTo up_to = UpTo::any);
  /// Parameters of another owner, under names that begin with `prefix`.
  void adopt(const std::string& prefix, Parameter parameter);
  void adopt_all(const std::string& prefix, const Parameters& others);

  template <class E>
  void add(std::string name, E& value, std::span<const Choice<E>> choices, std::string help) {
    const auto word = [choices, &value] {
      for (const Choice<E>& choice : choices)
        if (choice.value == value) return std::string(choice.word);
      return std::string("?");
    };
    std::vector<std::string> words;
    for (const Choice<E>& choice : choices) words.emplace_back(choice.word);
    Parameter& parameter = declare(std::move(name), std::move(help), joined(words), word);
    parameter.set = [choices, &value, words, where = where(parameter.name)](std::string_view text) {
      for (const Choice<E>& choice : choices)
        if (text == choice.word) {
          value = choice.value;
          return;
        }
      refuse_word(where, text, words);
    };
  }

  /// While it lives, what is declared is read by one part of a plan alone: by nothing where another takes its place.
  class [[nodiscard]] OfPart {
   public:
    OfPart(Parameters& parameters, std::string part) : parameters_(parameters) { parameters.part_ = std::move(part); }
    OfPart(const OfPart&) = delete;
    OfPart& operator=(const OfPart&) = delete;
    ~OfPart() { parameters_.part_.clear(); }

   private:
    Parameters& parameters_;
  };
  OfPart of_part(std::string part) { return {*this, std::move(part)}; }

  void preset(Preset preset) { presets_.push_back(std::move(preset)); }
  /// Adds a value to a declared preset.
  void add_to_preset(std::string_view name, std::string parameter, std::string value);

  /// Sets a parameter, or with the name "preset" a bundle of them. Throws Error{usage} with the nearest name.
  void set(std::string_view name, std::string_view text);
  /// Sets what a list gives, each name once; `example` is shown where a piece is no NAME=VALUE. Throws Error{usage}.
  void set_list(std::string_view text, const char* example);

  const Parameter* find(std::string_view name) const;
  std::span<const Parameter> all() const { return all_; }
  std::span<const Preset> presets() const { return presets_; }

  /// "key=value,key=value" of every parameter, in the order of declaration: equal text, equal meaning.
  std::string canonical() const;

 private:
  Parameter& declare(std::string name, std::string help, std::string range, std::function<std::string()> text);
  std::string where(const std::string& name) const { return owner_ + ":" + name; }
  static std::string joined(std::span<const std::string> words);
  [[noreturn]] static void refuse_word(const std::string& where, std::string_view text,
                                       std::span<const std::string> words);

  std::string owner_;
  std::string part_;  // of what is being declared
  std::vector<Parameter> all_;
  std::vector<Preset> presets_;
};

/// Reads a whole text as a number; throws Error{usage} at `where`.
int parse_int(const std::string& where, std::string_view text, int least = std::numeric_limits<int>::min(),
              int most = std::numeric_limits<int>::max());
double parse_real(const std::string& where, std::string_view text);

/// A value as it stands in a list of KEY=VALUE: in parentheses where it would not end at the next comma.
std::string list_value(std::string_view value);

/// The pieces of a comma-separated list, without the blanks around them; commas inside parentheses do not separate.
/// Throws Error{usage} at `where` for an empty piece, for parentheses that do not match and for more than 16 inside one
/// another.
std::vector<std::string_view> split_list(const std::string& where, std::string_view text);

}  // namespace kvreplay
