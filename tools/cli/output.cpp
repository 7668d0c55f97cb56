#include "output.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <boost/algorithm/string/replace.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <nlohmann/json.hpp>

#include "arguments.h"

namespace kvreplay {
namespace {

/// Characters of UTF-8 text.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U; }));
}

std::size_t longest_word(std::string_view text) {
  std::size_t longest = 0;
  for (const std::string& word : split(text, ' ')) longest = std::max(longest, width(word));
  return longest;
}

}  // namespace

void say(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stderr); }

bool uses_colour(std::string_view choice) {
  if (choice != "auto") return choice == "always";
  const char* refused = std::getenv("NO_COLOR");
  return isatty(STDOUT_FILENO) != 0 && (refused == nullptr || *refused == '\0');
}

void print_json(const Json& value) { fmt::print("{}\n", value.dump(2, ' ', false, Json::error_handler_t::replace)); }

std::size_t page_width() {
  constexpr std::size_t without_terminal = 80;
  winsize size{};
  const bool is_terminal = isatty(STDOUT_FILENO) != 0 && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0;
  return is_terminal && size.ws_col > 0 ? size.ws_col : without_terminal;
}

std::vector<std::string> wrapped(std::string_view text, std::size_t width_of_line) {
  std::vector<std::string> lines;
  for (const std::string& word : split(text, ' ')) {
    if (lines.empty() || width(lines.back()) + 1 + width(word) > width_of_line)
      lines.push_back(word);
    else
      lines.back() += ' ' + word;
  }
  return lines;
}

void print_columns(const std::vector<TableRow>& rows, std::size_t indent) {
  const std::size_t room = page_width();
  constexpr std::size_t least_width = 20;  // of a wrapped column
  constexpr std::size_t further_indent = 4;
  std::vector<std::size_t> widths;
  for (const TableRow& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  for (const TableRow& row : rows) {
    std::string line(indent, ' ');
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (i + 1 < row.size()) {
        line += row[i];
        line.append(widths[i] - width(row[i]) + 2, ' ');
        continue;
      }
      std::size_t margin = width(line);
      if (margin + width(row[i]) <= room) {
        line += row[i];
        continue;
      }
      if (margin + std::max(least_width, longest_word(row[i])) > room && i > 0) {
        margin = indent + further_indent;
        line.erase(line.find_last_not_of(' ') + 1);
        line += '\n' + std::string(margin, ' ');
      }
      line += fmt::format("{}", fmt::join(wrapped(row[i], std::max(room, margin + least_width) - margin),
                                          '\n' + std::string(margin, ' ')));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    fmt::print("{}\n", line);
  }
}

void print_markdown_table(const TableRow& heads, const std::vector<TableRow>& rows, const std::set<std::size_t>& code) {
  fmt::print("| {} |\n|", fmt::join(heads, " | "));
  for (std::size_t i = 0; i < heads.size(); ++i) fmt::print(" --- |");
  for (const auto& row : rows) {
    fmt::print("\n|");  // a bar within a cell would end it
    for (std::size_t i = 0; i < row.size(); ++i)
      fmt::print(" {0}{1}{0} |", code.contains(i) && !row[i].empty() ? "`" : "",
                 boost::replace_all_copy(row[i], "|", "\\|"));
  }
  fmt::print("\n");
}

void print_list(const Arguments& arguments, const Json& document, const TableRow& heads,
                const std::vector<TableRow>& rows, const std::set<std::size_t>& code) {
  if (arguments.given(json_option.name))
    print_json(document);
  else if (arguments.given("markdown"))
    print_markdown_table(heads, rows, code);
  else
    print_columns(rows);
}

std::string size_text(std::size_t bytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double size = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (size >= 1023.95 && unit + 1 < std::size(units)) {
    size /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", size, units[unit]);
}

std::string duration_text(double seconds) {
  if (seconds < 1.0) return fmt::format("{:.0f} ms", 1000.0 * seconds);
  if (seconds < 60.0) return fmt::format("{:.{}f} s", seconds, seconds < 10.0 ? 1 : 0);
  const long whole = std::lround(std::min(seconds, 3e8));
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

}  // namespace kvreplay
