// Results on stdout: words, tables and JSON; and what is said besides, on stderr.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvreplay {

using Json = nlohmann::ordered_json;

/// Onto stderr. What cannot be written there is lost: there is nowhere left to say so.
void say(std::string_view text);

template <class... Arguments>
void say(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  say(std::string_view(fmt::format(text, std::forward<Arguments>(arguments)...)));
}

/// Indented, one document a call. Bytes that are no UTF-8 are replaced.
void print_json(const Json& value);

/// Columns padded to their widest entry, two spaces between, the last one as it is. Widths count characters.
void print_columns(const std::vector<std::vector<std::string>>& rows, std::size_t indent = 0);

/// A Markdown table; column `code` holds names.
void print_markdown_table(const std::vector<std::string>& heads, const std::vector<std::vector<std::string>>& rows,
                          std::size_t code = 0);

/// "23.4 MiB"; "120 ms", "1.2 s", "3 min 20 s".
std::string size_text(std::size_t bytes);
std::string duration_text(double seconds);

/// A cell of a Markdown table.
std::string markdown_cell(std::string_view text);

}  // namespace kvreplay
