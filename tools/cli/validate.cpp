#include "trace/validate.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "arguments.h"
#include "commands.h"
#include "interruption.h"
#include "output.h"
#include "progress_line.h"
#include "replay/stored_observables.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    {"deep", 0, "", "", "read every number: finite, equal to the stored hashes, keys after RoPE"},
    progress_option,
    json_option,
};

struct Verdict {
  std::string path;
  std::vector<std::string> problems;
  std::optional<DeepReport> deep;
};

Verdict verdict_of(const std::string& path, bool deep, ProgressLine& line) {
  Verdict verdict;
  verdict.path = path;
  for (const Error& violation : violations(path)) verdict.problems.emplace_back(violation.what());
  if (!deep || !verdict.problems.empty()) return verdict;
  try {
    const Trace trace = Trace::open(path);
    verdict.deep = validate_deep(trace, [&](double share) {
      line.show(share, path);
      if (interrupted()) throw Error{Refusal::interrupted, path, "interrupted"};
    });
    for (const Error& problem : verdict.deep->problems) verdict.problems.emplace_back(problem.what());
  } catch (const Error& error) {
    if (error.refusal() != Refusal::input) throw;
    verdict.problems.emplace_back(error.what());
  }
  return verdict;
}

std::string looked_at(const DeepReport& report) {
  return fmt::format("; {} numbers are finite, {} of {} tensors equal their hashes, RoPE was checked in {} layers",
                     report.numbers, report.hashes, report.tensors, report.rope_layers);
}

int run(const Arguments& arguments) {
  const std::vector<std::string> paths = without_observables(arguments.operands());
  for (const std::string& path : paths) require_file(path);  // no file says nothing about a trace
  heed_interruptions();
  Json document = Json::array();
  bool all_valid = true;
  for (const std::string& path : paths) {
    Verdict verdict;
    {
      ProgressLine line(arguments.text("progress"));
      verdict = verdict_of(path, arguments.given("deep"), line);
    }
    const bool valid = verdict.problems.empty();
    all_valid = all_valid && valid;
    if (arguments.given("json")) {
      Json entry{{"path", path}, {"valid", valid}, {"problems", verdict.problems}};
      if (verdict.deep)
        entry["deep"] = {{"numbers", verdict.deep->numbers},
                         {"hashes", verdict.deep->hashes},
                         {"tensors", verdict.deep->tensors},
                         {"rope_layers", verdict.deep->rope_layers}};
      document.push_back(std::move(entry));
      continue;
    }
    fmt::print("{}: {}{}\n", path, valid ? "valid" : "invalid", valid && verdict.deep ? looked_at(*verdict.deep) : "");
    for (const std::string& problem : verdict.problems) fmt::print("  {}\n", problem);
  }
  if (arguments.given("json")) print_json(document);
  return all_valid ? 0 : 1;
}

}  // namespace

const Command validate_command{"validate", "lists every violation of the trace format, each with its remedy",
                               "TRACE...", options, run};

}  // namespace kvreplay
