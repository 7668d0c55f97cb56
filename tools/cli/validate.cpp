#include "trace/validate.h"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "commands.h"
#include "hdf5/child_process.h"
#include "interruption.h"
#include "output.h"
#include "progress_line.h"
#include "replay/stored_observables.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    {"deep", 0, "", "", "also check every number: finite, equal to the stored hash, keys rotated by RoPE"},
    {"untrusted", 0, "", "",
     "read the file in a child process with limits on time and memory, for files of unknown origin"},
    progress_option,
    json_option,
};

/// What --deep looks at; the problems that it finds are added.
Json counts_of(const std::string& path, ProgressLine& line, std::vector<std::string>& problems) {
  const DeepReport report = validate_deep(Trace::open(path), [&](double share) {
    line.show(share, path);
    if (interrupted()) throw Error{Refusal::interrupted, path, "interrupted"};
  });
  for (const Error& problem : report.problems) problems.emplace_back(problem.what());
  return {{"numbers", report.numbers},
          {"hashes", report.hashes},
          {"tensors", report.tensors},
          {"rope_layers", report.rope_layers}};
}

/// What --json prints of one file.
Json verdict_on(const std::string& path, bool deep, ProgressLine& line) {
  std::vector<std::string> problems;
  Json counts;
  for (const Error& violation : violations(path)) problems.emplace_back(violation.what());
  try {
    if (deep && problems.empty()) counts = counts_of(path, line, problems);
  } catch (const Error& error) {
    if (error.refusal() != Refusal::input) throw;
    problems.emplace_back(error.what());
  }
  Json verdict{{"path", path}, {"valid", problems.empty()}, {"problems", problems}};
  if (!counts.is_null()) verdict["deep"] = std::move(counts);
  return verdict;
}

/// The same, found by a child process; its end is a problem of the file.
Json verdict_of_child(const std::string& path, bool deep, ProgressLine& line) {
  try {
    // A name, too, may be no text: what cannot be written as JSON is replaced.
    return Json::parse(run_in_child(
        path, [&] { return verdict_on(path, deep, line).dump(-1, ' ', false, Json::error_handler_t::replace); },
        interrupted));
  } catch (const Error& error) {
    if (error.refusal() != Refusal::input) throw;
    return {{"path", path}, {"valid", false}, {"problems", {error.what()}}};
  }
}

std::string looked_at(const Json& deep) {
  return fmt::format("; {} finite numbers, {} of {} tensors match their hashes, RoPE checked in {} layers",
                     deep["numbers"].get<std::int64_t>(), deep["hashes"].get<int>(), deep["tensors"].get<int>(),
                     deep["rope_layers"].get<int>());
}

int run(const Arguments& arguments) {
  const bool untrusted = arguments.given("untrusted");
  // Telling observables from traces means to open each file, here in this process.
  const std::vector<std::string> paths = untrusted ? arguments.operands() : without_observables(arguments.operands());
  for (const std::string& path : paths) require_file(path);  // no file says nothing about a trace
  heed_interruptions();
  const auto examine = untrusted ? verdict_of_child : verdict_on;
  Json document = Json::array();
  bool all_valid = true;
  for (const std::string& path : paths) {
    {
      ProgressLine line(arguments);
      document.push_back(examine(path, arguments.given("deep"), line));
    }
    const Json& verdict = document.back();
    const bool valid = verdict["valid"].get<bool>();
    all_valid = all_valid && valid;
    if (arguments.given("json")) continue;
    fmt::print("{}: {}{}\n", path, valid ? "valid" : "invalid",
               valid && verdict.contains("deep") ? looked_at(verdict["deep"]) : "");
    for (const auto& problem : verdict["problems"]) fmt::print("  {}\n", problem.get<std::string>());
  }
  if (arguments.given("json")) print_json(document);
  return all_valid ? 0 : 1;
}

}  // namespace

const Command validate_command{"validate",
                               "checks traces and lists every violation of the trace format",
                               "TRACE...",
                               options,
                               run,
                               nullptr,
                               "kvreplay validate trace.h5\nkvreplay validate --deep --untrusted *.h5\n"};

}  // namespace kvreplay
