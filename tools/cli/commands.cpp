#include "commands.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "error.h"
#include "listed_names.h"
#include "machine.h"
#include "python_commands.h"

namespace kvreplay {
namespace {

constexpr const Command* command_table[] = {
    &doctor_command,     &synth_command,   &info_command,       &validate_command, &convert_command,
    &replay_command,     &show_command,    &merge_command,      &diff_command,     &policies_command,
    &new_policy_command, &metrics_command, &completion_command, &help_command};

constexpr Command companion_table[] = {
    {"calibrate", "computes calibration files of eviction methods from traces", calibrate_operands, calibrate_options,
     nullptr, nullptr, calibrate_examples},
    {"capture", "captures queries, keys and values of a language model as a trace", capture_operands, capture_options,
     nullptr, nullptr, capture_examples},
    {"check", "compares the kept positions of an inference engine with a policy, and names the cause of a difference",
     check_operands, check_options, nullptr, nullptr, check_examples},
    {"compare", "compares policies with a baseline over many traces: paired differences, intervals, tests",
     compare_operands, compare_options, nullptr, nullptr, compare_examples},
    {"example", "writes an example trace: 10 MB of a small language model, with a needle and a question",
     example_operands, example_options, nullptr, nullptr, example_examples},
    {"export", "writes results as Parquet, Arrow or CSV, kept sets as HDF5, and cards and datasets of traces",
     export_operands, export_options, nullptr, nullptr, export_examples},
    {"live", "applies the kept sets of a replay in the live model and measures its predictions and answers",
     live_operands, live_options, nullptr, nullptr, live_examples},
    {"python", "runs any command with policies written in Python: -p FILE.py:NAME", "COMMAND...", {}, nullptr},
    {"plot", "draws figures of a run: heatmaps, curves, kept positions", plot_operands, plot_options, nullptr, nullptr,
     plot_examples},
    {"predict", "correlates the ranking of policies by offline metrics with that of the live model", predict_operands,
     predict_options, nullptr, nullptr, predict_examples},
    {"regret", "splits the gap to the best kept set into scores, chunks, heads and layers", regret_operands,
     regret_options, nullptr, nullptr, regret_examples},
    {"report", "writes one offline HTML page of a run: table, curves, kept tokens", report_operands, report_options,
     nullptr, nullptr, report_examples},
    {"sql", "runs an SQL query over the results, kept sets, tokens, spans and attention of a run", sql_operands,
     sql_options, nullptr, nullptr, sql_examples},
    {"sweep", "runs a replay as tasks on many workers: local processes, Dask or Slurm", sweep_operands, sweep_options,
     nullptr, nullptr, sweep_examples},
    {"tune", "fits parameters or layer budgets on some traces and reports them on held-out traces", tune_operands,
     tune_options, nullptr, nullptr, tune_examples},
    {"why", "explains why a policy keeps or evicts one token, and which query attends to it later", why_operands,
     why_options, nullptr, nullptr, why_examples},
};

struct GroupedNames {
  const char* heading;
  const char* names;
};

constexpr GroupedNames grouped_names[] = {
    {"first steps", "example doctor help completion"},
    {"traces", "capture synth info validate convert"},
    {"replay and results", "replay sweep show compare merge diff export sql"},
    {"figures and reports", "plot report why regret"},
    {"policies and metrics", "policies metrics new-policy python tune calibrate"},
    {"models and engines", "live predict check"},
};

}  // namespace

std::vector<CommandGroup> command_groups() {
  std::vector<CommandGroup> groups;
  for (const auto& [heading, names] : grouped_names) {
    CommandGroup& group = groups.emplace_back(CommandGroup{heading, {}});
    for (const std::string& name : split(names, ' ')) {
      const Command* const command = find_command(name);
      group.commands.push_back(command != nullptr ? command : std::ranges::find(companion_table, name, &Command::name));
    }
  }
  return groups;
}

std::span<const Command* const> commands() { return command_table; }

const Command* find_command(std::string_view name) {
  for (const Command* command : commands())
    if (command->name == name) return command;
  return nullptr;
}

std::span<const Command> companions() { return companion_table; }

std::optional<std::filesystem::path> find_companion(std::string_view name) {
  if (name.empty() || name.find('/') != std::string_view::npos) return std::nullopt;
  std::vector<std::filesystem::path> folders;
  std::error_code problem;
  if (const std::filesystem::path beside = program_folder(); !beside.empty()) folders.push_back(beside);
  const char* path = std::getenv("PATH");
  for (const std::string& folder : split(path == nullptr ? "" : path, ':')) folders.emplace_back(folder);
  for (const std::filesystem::path& folder : folders) {
    const std::filesystem::path program = folder / ("kvreplay-" + std::string(name));
    if (std::filesystem::is_regular_file(program, problem) && access(program.c_str(), X_OK) == 0) return program;
  }
  return std::nullopt;
}

void run_companion(const std::string& name, const std::vector<std::string>& arguments) {
  const auto known = std::ranges::find(companion_table, name, &Command::name);
  const std::optional<std::filesystem::path> program = find_companion(name);
  if (!program && known != std::end(companion_table))
    throw Error{Refusal::capability, name, "kvreplay-" + name + " is not installed", how_to_install_companions};
  if (!program) {
    std::vector<std::string> names;
    for (const Command* command : commands()) names.emplace_back(command->name);
    for (const Command& companion : companion_table) names.emplace_back(companion.name);
    throw Error{Refusal::usage, name, "unknown command", nearest_listed(name, names, "kvreplay help"), name};
  }
  std::vector<std::string> words{program->string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> raw;
  for (std::string& word : words) raw.push_back(word.data());
  raw.push_back(nullptr);
  execv(program->c_str(), raw.data());
  throw Error{Refusal::capability, program->string(), std::string("cannot be started: ") + std::strerror(errno)};
}

}  // namespace kvreplay
