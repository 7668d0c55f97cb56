#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "arguments.h"
#include "attention/backend.h"
#include "build.h"
#include "commands.h"
#include "machine.h"
#include "output.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {json_option};

/// A fact is a key, what people read, and the same for programs.
struct Fact {
  std::string key;
  std::string text;
  Json value;
};

std::vector<Fact> backend_facts() {
  std::vector<Fact> facts;
  const auto add = [&](const std::string& name, bool runs, const std::string& text) {
    facts.push_back({"backend " + name, text, {{"name", name}, {"runs", runs}, {"description", text}}});
  };
  for (const std::string& name : backends().names()) {
    const std::string reason = why_not(name);
    add(name, reason.empty(), reason.empty() ? make_backend(name, 0)->description() : "not usable: " + reason);
  }
  if (backends().find("cuda") == nullptr) add("cuda", false, "not in this build");
  return facts;
}

std::vector<Fact> companion_facts() {
  std::vector<Fact> facts;
  for (const Command& companion : companions()) {
    const auto program = find_companion(companion.name);
    const std::string text = program ? program->string() : std::string("not installed: ") + how_to_install_companions;
    facts.push_back(
        {companion.name, text, {{"name", companion.name}, {"installed", program.has_value()}, {"description", text}}});
  }
  return facts;
}

std::vector<Fact> machine_facts() {
  std::vector<Fact> facts{
      {"version", build_version, build_version},
      {"commit", build_commit, build_commit},
      {"compiler", build_compiler, build_compiler},
  };
  std::string libraries;
  Json versions = Json::object();
  for (const auto& [name, version] : build_libraries) {
    libraries += fmt::format("{}{} {}", libraries.empty() ? "" : ", ", name, version);
    versions[name] = version;
  }
  facts.push_back({"libraries", libraries, versions});
  facts.push_back({"threads", std::to_string(machine_threads()), machine_threads()});
  facts.push_back({"memory",
                   fmt::format("{}, {} free", size_text(machine_memory()), size_text(free_memory())),
                   {{"bytes", machine_memory()}, {"free_bytes", free_memory()}}});
  facts.push_back({"page size", size_text(page_size()), page_size()});
  return facts;
}

int doctor(const Arguments& arguments) {
  const std::vector<Fact> machine = machine_facts(), devices = backend_facts(), tools = companion_facts();
  if (arguments.given("json")) {
    Json document = Json::object();
    for (const Fact& fact : machine) document[fact.key] = fact.value;
    for (const Fact& fact : devices) document["backends"].push_back(fact.value);
    for (const Fact& fact : tools) document["programs"].push_back(fact.value);
    print_json(document);
    return 0;
  }
  std::vector<TableRow> rows;
  for (const std::vector<Fact>* facts : {&machine, &devices, &tools})
    for (const Fact& fact : *facts) rows.push_back({fact.key, fact.text});
  print_columns(rows);
  return 0;
}

}  // namespace

const Command doctor_command{"doctor",
                             "reports the capabilities of this build and this machine",
                             "",
                             options,
                             doctor,
                             nullptr,
                             "kvreplay doctor\nkvreplay doctor --json\n"};

}  // namespace kvreplay
