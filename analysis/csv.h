// Comma-separated values as RFC 4180 has them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvreplay {

/// The field, in quotation marks where its characters ask for them.
std::string csv_field(std::string_view text);

/// Neighbouring fields of a line.
std::string csv_fields(const std::vector<std::string>& fields);

/// Fields of one line, with its end.
std::string csv_line(const std::vector<std::string>& fields);

/// Every line's fields. `where` names the text in Error{input}, thrown for a quotation that never ends.
std::vector<std::vector<std::string>> parse_csv(const std::string& where, std::string_view text);

/// 17 significant digits, so that every double reads back as itself; empty for what is not finite: undefined.
std::string csv_number(double value);

}  // namespace kvreplay
