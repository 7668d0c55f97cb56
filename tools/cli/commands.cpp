#include "commands.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "error.h"
#include "machine.h"
#include "nearest.h"

namespace kvreplay {
namespace {

constexpr const Command* command_table[] = {
    &doctor_command,  &synth_command,      &info_command, &validate_command, &convert_command,
    &replay_command,  &merge_command,      &diff_command, &policies_command, &new_policy_command,
    &metrics_command, &completion_command, &help_command};

constexpr Companion companion_table[] = {
    {"capture", "a real model's queries, keys and values as a trace"},
    {"compare", "policies against a baseline over traces: paired differences, intervals, tests"},
    {"export", "the numbers of a run as Parquet, Arrow or CSV, or its kept sets as one HDF5 file"},
    {"live", "a replay's kept sets in the live model: what it then predicts, and writes"},
    {"python", "any command, with policies that are written in Python: -p FILE.py:NAME"},
    {"plot", "figures of a run: heatmaps, curves, kept positions"},
    {"predict", "which offline metric has policies in the order of the live model"},
    {"regret", "how far policies stay below the best that could be kept: by scores, chunks, heads, layers"},
    {"report", "one offline page of a run: table, curves, and who keeps which token"},
    {"sweep", "a replay as tasks on many workers: this machine's, a Dask cluster's, Slurm's"},
    {"tune", "parameters, layer budgets or layer ranges fitted on some traces, reported on others"},
};

}  // namespace

std::span<const Command* const> commands() { return command_table; }

const Command* find_command(std::string_view name) {
  for (const Command* command : commands())
    if (command->name == name) return command;
  return nullptr;
}

std::span<const Companion> companions() { return companion_table; }

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
  const auto known = std::ranges::find(companion_table, name, &Companion::name);
  const std::optional<std::filesystem::path> program = find_companion(name);
  if (!program && known != std::end(companion_table))
    throw Error{Refusal::capability, name, "kvreplay-" + name + " is not installed", how_to_install_companions};
  if (!program) {
    std::vector<std::string> names;
    for (const Command* command : commands()) names.emplace_back(command->name);
    for (const Companion& companion : companion_table) names.emplace_back(companion.name);
    throw Error{Refusal::usage, name, "unknown command", nearest(name, names), name};
  }
  std::vector<std::string> words{program->string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> raw;
  for (std::string& word : words) raw.push_back(word.data());
  raw.push_back(nullptr);
  execv(program->c_str(), raw.data());
  throw Error{Refusal::capability, program->string(), std::strerror(errno)};
}

}  // namespace kvreplay
