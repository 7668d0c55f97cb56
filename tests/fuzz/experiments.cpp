// An experiment, as replay reads @FILE.yaml: its options, what it excludes, and the traces that it names.

#include "policies/text/configured.h"
#include "survival.h"
#include "tools/cli/exclusion.h"
#include "tools/cli/experiment.h"
#include "tools/cli/replay_traces.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const OwnFolder folder;
  static const std::vector<ConfiguredPolicy> policies{ConfiguredPolicy::parse("h2o"),
                                                      ConfiguredPolicy::parse("snapkv:window=3")};
  // Names of traces are not the file's here: it could name any folder of the machine.
  static const std::string trace = (folder / "trace.h5").string();
  survives([&] {
    const std::string file = folder.with("sweep.yaml", {data, size}).string();
    const Asked all = asked(Arguments(replay_command, "kvreplay", std::vector<std::string>{"@" + file, trace}));
    survives([&] { all.arguments.seed("seed"); });
    survives([&] { all.arguments.bytes("memory"); });
    for (const GivenValue& value : all.arguments.values("budget")) survives([&] { Budget::parse(value.text); });
    for (const GivenValue& value : all.arguments.values("exclude")) {
      if (value.text.find('/') != std::string::npos) continue;
      survives([&] {
        const Exclusion exclusion(value);
        for (const ConfiguredPolicy& policy : policies) exclusion.covers(policy);
        exclusion.covers_nothing(policies);
      });
    }
  });
  // A manifest of the same bytes.
  survives([&] {
    const std::string file = folder.with("list.csv", {data, size}).string();
    list_traces(std::vector<GivenValue>{{file, file}});
  });
  return 0;
}
