#include "analysis/csv.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

#include "error.h"

namespace kvreplay {

std::string csv_field(std::string_view text) {
  if (std::ranges::none_of(text, [](char c) { return c == ',' || c == '"' || c == '\r' || c == '\n'; }))
    return std::string(text);
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + '"';
}

std::string csv_fields(const std::vector<std::string>& fields) {
  std::string text;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    if (i > 0) text += ',';
    text += csv_field(fields[i]);
  }
  return text;
}

std::string csv_line(const std::vector<std::string>& fields) { return csv_fields(fields) + '\n'; }

std::vector<std::vector<std::string>> parse_csv(const std::string& where, std::string_view text) {
  std::vector<std::vector<std::string>> lines;
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      const bool doubled = c == '"' && i + 1 < text.size() && text[i + 1] == '"';
      if (c != '"' || doubled) fields.back() += c;
      if (doubled) ++i;
      quoted = c != '"' || doubled;
    } else if (c == '"') {
      quoted = true;
    } else if (c == ',') {
      fields.emplace_back();
    } else if (c == '\n') {
      lines.push_back(std::move(fields));
      fields.assign(1, "");
    } else if (c != '\r') {
      fields.back() += c;
    }
  }
  if (quoted) throw Error{Refusal::input, where, "unterminated quotation"};
  if (fields.size() > 1 || !fields.front().empty()) lines.push_back(std::move(fields));
  return lines;
}

std::string csv_number(double value) {
  if (!std::isfinite(value)) return {};
  char digits[32];
  return {digits, std::to_chars(digits, std::end(digits), value, std::chars_format::general, 17).ptr};
}

}  // namespace kvreplay
