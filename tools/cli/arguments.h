// What the user gave to a command, read once and held against the command's declaration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "command.h"
#include "error.h"

namespace kvreplay {

/// A value and who gave it: "--eval" on the command line, or "sweep.yaml:7: eval" at a place of a file.
struct GivenValue {
  std::string text;
  std::string where;
  std::string place = {};   // "sweep.yaml:7"; empty: the command line
  std::string option = {};  // by whose name it was given: budget, or compression-ratio
};

/// Reads a value, or a part of it. An error names `place` before its own.
template <class Read>
auto read_at(const std::string& place, Read read) {
  try {
    return read();
  } catch (const Error& error) {
    throw Error{error.refusal(), place + ": " + error.where(), error.problem(), error.expected(), error.found()};
  }
}

/// The same; a value of the command line has no place.
template <class Read>
auto at_place(const GivenValue& value, Read read) {
  return value.place.empty() ? read() : read_at(value.place, read);
}

class Arguments {
 public:
  /// `program` is argv[0], `words` what follows the command's name. Throws Error{usage} for unknown options with the
  /// nearest, missing and superfluous values, empty pieces of lists, words that an option does not offer, and a wrong
  /// number of operands.
  Arguments(const Command& command, std::string program, std::span<const std::string> words);

  const Command& command() const { return command_; }
  const std::vector<std::string>& operands() const { return operands_; }
  /// The whole command line, for the record.
  const std::vector<std::string>& command_line() const { return command_line_; }

  /// The options in long names, those of kvreplay.yaml too, each followed by its value as a separate word, without
  /// those that are `left_out`.
  std::vector<std::string> spelled_out(std::span<const std::string_view> left_out) const;

  /// The value of an option in a file, checked as a word of the command line is.
  void add(std::string_view option, GivenValue value);
  void replace_operands(std::vector<std::string> operands) { operands_ = std::move(operands); }

  bool given(std::string_view option) const { return values_.contains(option); }
  bool is_quiet() const { return given(quiet_option.name); }
  /// Values of kvreplay.yaml, for options that are not on the command line.
  const std::map<std::string, GivenValue, std::less<>>& user_defaults() const { return user_defaults_; }
  /// The value as given, that of kvreplay.yaml, or the declared standard.
  GivenValue value(std::string_view option) const;
  std::string text(std::string_view option) const { return value(option).text; }
  std::vector<std::string> all(std::string_view option) const;
  std::span<const GivenValue> values(std::string_view option) const;

  int whole_number(std::string_view option, int least, int most) const;
  double real_number(std::string_view option, double least, double most) const;
  std::uint64_t seed(std::string_view option) const;
  /// "512M", "1.5G", "4096": binary multiples.
  std::size_t bytes(std::string_view option) const;

 private:
  const Command& command_;
  std::vector<std::string> command_line_;
  std::vector<std::string> operands_;
  std::map<std::string, std::vector<GivenValue>, std::less<>> values_;
  std::map<std::string, GivenValue, std::less<>> user_defaults_;
};

}  // namespace kvreplay
