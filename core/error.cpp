#include "error.h"

#include <utility>

#include "nearest.h"

namespace kvreplay {
namespace {

/// One line whatever the text: '\n' as \n, any other control character as \xNN.
std::string without_controls(const std::string& text) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n')
      line += "\\n";
    else if (byte < 0x20 || byte == 0x7f)
      line += {'\\', 'x', digits[byte / 16], digits[byte % 16]};
    else
      line += c;
  }
  return line;
}

}  // namespace

Error::Error(Refusal refusal, std::string where, std::string what, std::string expected, std::string found)
    : refusal_(refusal),
      where_(std::move(where)),
      problem_(std::move(what)),
      expected_(std::move(expected)),
      found_(std::move(found)) {
  line_ = where_ + ": " + problem_;
  if (expected_.starts_with(suggestion)) {
    if (!found_.empty() && !where_.ends_with(found_)) line_ += " " + found_;
    line_ = without_controls(line_ + ": " + expected_);
    return;
  }
  if (!expected_.empty()) line_ += ": expected " + expected_;
  if (!found_.empty()) line_ += (expected_.empty() ? ": found " : ", found ") + found_;
  line_ = without_controls(line_);
}

}  // namespace kvreplay
