// The one error type: where, what, expected, found, and the exit code of the program.
#pragma once

#include <exception>
#include <string>

namespace kvreplay {

/// Why something is refused. The value is the program's exit code.
enum class Refusal : int {
  usage = 2,         // a flag, name or value that cannot be meant
  input = 3,         // a file that cannot be read, or that lacks what is needed
  capability = 4,    // this build or machine cannot do it
  resources = 5,     // memory or disk would not suffice
  internal = 70,     // a bug of ours
  interrupted = 130  // the user stopped the run
};

/// `what()` is one line: "WHERE: WHAT: expected EXPECTED, found FOUND", or "WHERE: WHAT FOUND: did you mean NAME?" with
/// an `expected` from nearest(). Empty pieces are left out, control characters escaped.
class Error : public std::exception {
 public:
  Error(Refusal refusal, std::string where, std::string what, std::string expected = {}, std::string found = {});

  const char* what() const noexcept override { return line_.c_str(); }
  Refusal refusal() const { return refusal_; }
  int exit_code() const { return static_cast<int>(refusal_); }
  const std::string& where() const { return where_; }
  const std::string& problem() const { return problem_; }
  const std::string& expected() const { return expected_; }
  const std::string& found() const { return found_; }

 private:
  Refusal refusal_;
  std::string where_, problem_, expected_, found_, line_;
};

}  // namespace kvreplay
