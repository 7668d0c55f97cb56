// What the user gave to a command, read once and held against the command's declaration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "command.h"

namespace kvreplay {

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

  /// The same command line with long names, each followed by its value as a word of its own; operands first, and
  /// without the option `left_out`.
  std::vector<std::string> spelled_out(std::string_view left_out) const;

  bool given(std::string_view option) const { return values_.contains(option); }
  /// The value as given, or the declared standard.
  std::string text(std::string_view option) const;
  std::vector<std::string> all(std::string_view option) const;

  int whole_number(std::string_view option, int least, int most) const;
  double real_number(std::string_view option, double least, double most) const;
  std::uint64_t seed(std::string_view option) const;
  /// "512M", "1.5G", "4096": binary multiples.
  std::size_t bytes(std::string_view option) const;

 private:
  const Command& command_;
  std::vector<std::string> command_line_;
  std::vector<std::string> operands_;
  std::map<std::string, std::vector<std::string>, std::less<>> values_;
};

}  // namespace kvreplay
