#include "analysis/live_rows.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "analysis/csv.h"
#include "analysis/replaced_file.h"
#include "error.h"
#include "parameters.h"

namespace kvreplay {

namespace fs = std::filesystem;

namespace {

/// Of a file of live numbers, which has a header.
std::vector<std::vector<std::string>> lines_of(const fs::path& path) {
  std::ifstream stream(path);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  std::vector<std::vector<std::string>> lines = parse_csv(path.string(), text);
  if (!stream || lines.empty()) throw Error{Refusal::input, path.string(), "cannot be read", "a header"};
  return lines;
}

}  // namespace

std::map<std::string, std::map<MetricName, double>> live_values(const fs::path& folder, const std::string& trace) {
  std::map<std::string, std::map<MetricName, double>> found;
  const fs::path path = folder / "live" / (trace + ".csv");
  if (std::error_code none; !fs::exists(path, none)) return found;
  const std::vector<std::vector<std::string>> lines = lines_of(path);
  std::map<std::string, std::size_t> places;
  for (std::size_t i = 0; i < lines.front().size(); ++i) places.emplace(lines.front()[i], i);
  for (const char* column : {"cell", "layer", "metric", "variant", "value", "decisions"})
    if (!places.contains(column)) throw Error{Refusal::input, path.string(), "no such column", column};
  for (const std::vector<std::string>& fields : std::span(lines).subspan(1)) {
    if (fields.size() != lines.front().size())
      throw Error{Refusal::input, path.string(), "line with other columns", std::to_string(lines.front().size()),
                  std::to_string(fields.size())};
    const auto field = [&](const char* column) -> const std::string& { return fields[places.at(column)]; };
    if (field("layer") != "all" || field("decisions") == "during-prefill" || field("value").empty()) continue;
    const double value = parse_real(path.string(), field("value"));
    found[field("cell")].try_emplace(MetricName{field("metric"), field("variant")}, value);
  }
  return found;
}

void LiveRows::add(const fs::path& folder) {
  std::error_code none;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder / "live", none)) {
    const fs::path& path = entry.path();
    if (path.extension() != ".csv") continue;
    std::vector<std::vector<std::string>> lines = lines_of(path);
    const std::string header = csv_line(lines.front());
    if (header_.empty()) header_ = header;
    if (header != header_) throw Error{Refusal::input, path.string(), "different header", header_, header};
    const auto value = std::ranges::find(lines.front(), "value") - lines.front().begin();
    for (std::vector<std::string>& fields : std::span(lines).subspan(1)) {
      const std::string line = csv_line(fields);
      if (std::ssize(fields) > value) fields.erase(fields.begin() + value);
      const auto [known, added] = rows_[path.stem().string()].try_emplace(csv_line(fields), Row{line, path});
      if (!added && known->second.line != line)
        throw Error{Refusal::input, path.string(), "a number differs from " + known->second.file.string(),
                    known->second.line, line};
    }
  }
}

void LiveRows::write(const fs::path& folder) const {
  if (rows_.empty()) return;
  fs::create_directories(folder / "live");
  const auto replace = [this](const fs::path& path, const std::set<std::string>& lines) {
    std::string text = header_;
    for (const std::string& line : lines) text += line;
    replace_file(path, text);
  };
  std::set<std::string> every;
  for (const auto& [trace, rows] : rows_) {
    std::set<std::string> lines;
    for (const auto& [key, row] : rows) lines.insert(row.line);
    replace(folder / "live" / (trace + ".csv"), lines);
    every.merge(lines);
  }
  replace(folder / "live.csv", every);
}

}  // namespace kvreplay
