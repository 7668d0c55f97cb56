#include "analysis/live_rows.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "analysis/csv.h"
#include "analysis/replaced_file.h"
#include "error.h"
#include "open_file.h"

namespace kvreplay {

namespace fs = std::filesystem;

namespace {

using Lines = std::vector<std::vector<std::string>>;

/// The header first.
Lines read_lines(const fs::path& path) {
  Lines lines = parse_csv(path.string(), read_file(path.string()));
  if (lines.empty()) throw Error{Refusal::input, path.string(), "cannot be read", "a header"};
  return lines;
}

/// The fields of lines by the names of their columns.
class Columns {
 public:
  Columns(const fs::path& path, const std::vector<std::string>& header) : path_(path), header_(header) {}

  const std::string& operator()(const std::vector<std::string>& line, const char* name) const {
    const auto place = static_cast<std::size_t>(std::ranges::find(header_, name) - header_.begin());
    if (place < std::min(line.size(), header_.size())) return line[place];
    throw Error{Refusal::input, path_.string(), "columns", name, "none"};
  }

 private:
  const fs::path& path_;
  const std::vector<std::string>& header_;
};

double number(const fs::path& path, const std::string& text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  if (const auto [stop, problem] = std::from_chars(text.data(), end, value); problem != std::errc() || stop != end)
    throw Error{Refusal::input, path.string(), "value", "a number, or empty", text};
  return value;
}

constexpr const char* decided_live = "during-prefill";  // of the column `decisions`

std::string joined(const std::string& first, const char* separator, const std::string& second) {
  return first + (first.empty() || second.empty() ? "" : separator) + second;
}

}  // namespace

std::map<std::string, std::map<MetricName, double>> live_numbers(const fs::path& folder, const std::string& trace) {
  std::map<std::string, std::map<MetricName, double>> numbers;
  const fs::path path = folder / "live" / (trace + ".csv");
  if (std::error_code ignored; !fs::exists(path, ignored)) return numbers;
  const Lines lines = read_lines(path);
  const Columns field(path, lines.front());
  std::map<std::pair<std::string, MetricName>, std::map<std::string, double>> measured;  // by way of measuring
  for (const std::vector<std::string>& line : std::span(lines).subspan(1)) {
    if (field(line, "layer") != "all" || field(line, "head") != "all" || field(line, "value").empty()) continue;
    const bool is_decided_live = field(line, "decisions") == decided_live;
    std::string way = is_decided_live ? "" : field(line, "decisions");
    for (const char* name : {"device", "dtype", "model_hash"}) way = joined(way, " ", field(line, name));
    const std::string variant = joined(field(line, "variant"), ":", is_decided_live ? decided_live : "");
    measured[{field(line, "cell"), {field(line, "metric"), variant}}][way] = number(path, field(line, "value"));
  }
  for (const auto& [key, ways] : measured)
    for (const auto& [way, value] : ways) {
      MetricName name = key.second;
      if (ways.size() > 1) name.variant = joined(name.variant, " ", way);
      if (std::isfinite(value) && is_live(name)) numbers[key.first][name] = value;
    }
  return numbers;
}

void LiveRows::add(const fs::path& folder) {
  std::error_code none;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder / "live", none)) {
    const fs::path& path = entry.path();
    if (path.extension() != ".csv") continue;
    Lines lines = read_lines(path);
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
