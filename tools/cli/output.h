// Results on stdout: words, tables and JSON; and what is said besides, on stderr.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvreplay {

class Arguments;
using Json = nlohmann::ordered_json;

/// Onto stderr. What cannot be written there is lost: there is nowhere left to say so.
void say(std::string_view text);

template <class... Values>
void say(fmt::format_string<Values...> text, Values&&... values) {
  say(std::string_view(fmt::format(text, std::forward<Values>(values)...)));
}

/// By a value of --color. auto: whether stdout is a terminal, and the environment has no NO_COLOR (no-color.org).
bool uses_colour(std::string_view choice);

/// Indented, one document a call. Bytes that are no UTF-8 are replaced.
void print_json(const Json& value);

/// Of a table.
using TableRow = std::vector<std::string>;

/// Lines of words of at most `width` characters, if no word is longer.
std::vector<std::string> wrapped(std::string_view text, std::size_t width);

/// Characters of a line of the terminal, or 80 where stdout is none.
std::size_t page_width();

/// Columns padded to their widest entry, two spaces between. Widths count characters. The last column is wrapped at
/// page_width(), and begins on a line below the others if they leave no room for it.
void print_columns(const std::vector<TableRow>& rows, std::size_t indent = 0);

/// A Markdown table; the columns `code` hold names.
void print_markdown_table(const TableRow& heads, const std::vector<TableRow>& rows,
                          const std::set<std::size_t>& code = {0});

/// As the command's options want it: `document` with --json, a Markdown table with --markdown, else columns.
void print_list(const Arguments& arguments, const Json& document, const TableRow& heads,
                const std::vector<TableRow>& rows, const std::set<std::size_t>& code = {0});

/// "23.4 MiB"; "120 ms", "1.2 s", "3 min 20 s".
std::string size_text(std::size_t bytes);
std::string duration_text(double seconds);

}  // namespace kvreplay
