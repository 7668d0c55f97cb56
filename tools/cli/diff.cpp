#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "analysis/compare_runs.h"
#include "arguments.h"
#include "commands.h"
#include "error.h"
#include "output.h"
#include "trace/compare.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    {"tolerance", 0, "X", "0", "largest absolute difference at which numbers count as equal"},
    {"lines", 0, "N", "20", "number of differences to list; all are counted"},
    json_option,
};

/// One difference: where, and what each side has.
struct Difference {
  std::string where;
  std::string first;
  std::string second;
};

std::vector<Difference> differences_of_traces(const std::string& a, const std::string& b, double tolerance) {
  std::vector<Difference> all;
  for (const TraceDifference& difference : compare(Trace::open(a), Trace::open(b), tolerance)) {
    const std::string where = difference.where.empty() ? "" : ", " + difference.where;
    const std::string largest =
        difference.largest > 0.0 ? fmt::format(" (largest difference {:.3g})", difference.largest) : "";
    all.push_back({difference.object + where + largest, difference.first, difference.second});
  }
  return all;
}

std::vector<Difference> differences_of_runs(const std::string& a, const std::string& b, double tolerance) {
  std::vector<Difference> all;
  for (const auto& [where, first, second] : compare_runs(a, b, tolerance))
    all.push_back({where, first.value_or("missing"), second.value_or("missing")});
  return all;
}

int run(const Arguments& arguments) {
  const std::string& a = arguments.operands()[0];
  const std::string& b = arguments.operands()[1];
  const double tolerance = arguments.real_number("tolerance", 0.0, std::numeric_limits<double>::max());
  const int lines = arguments.whole_number("lines", 0, std::numeric_limits<int>::max());
  for (const std::string& path : arguments.operands())
    if (!std::filesystem::exists(path)) throw Error{Refusal::input, path, "no such file or folder"};
  const bool runs = is_run(a);
  if (runs != is_run(b))
    throw Error{Refusal::usage, b, "cannot be compared with " + a, runs ? "a run or its cells" : "a trace",
                runs ? "another file or folder" : "a run or its cells"};
  const std::vector<Difference> all =
      runs ? differences_of_runs(a, b, tolerance) : differences_of_traces(a, b, tolerance);
  if (arguments.given("json")) {
    Json document{{"equal", all.empty()}, {"differences", Json::array()}};
    for (const Difference& difference : all)
      document["differences"].push_back(
          {{"where", difference.where}, {"first", difference.first}, {"second", difference.second}});
    print_json(document);
    return all.empty() ? 0 : 1;
  }
  if (all.empty()) {
    fmt::print("equal\n");
    return 0;
  }
  std::vector<TableRow> rows;
  for (const Difference& difference : all) {
    if (rows.size() == static_cast<std::size_t>(lines)) break;
    rows.push_back({difference.where, difference.first + " | " + difference.second});
  }
  print_columns(rows);
  fmt::print("{} {}\n", all.size(), all.size() == 1 ? "difference" : "differences");
  return 1;
}

}  // namespace

const Command diff_command{"diff",
                           "compares two traces or two runs and lists their differences",
                           "TRACE|RUN TRACE|RUN",
                           options,
                           run,
                           nullptr,
                           "kvreplay diff first.h5 second.h5\nkvreplay diff out/cpu out/cuda --tolerance 1e-6\n"};

}  // namespace kvreplay
