// Texts of policies, with all their parameters and parts: parsed, written and parsed again, and replayed on a small
// trace where they fit it.
#include <fuzzer/FuzzedDataProvider.h>

#include "attention/backend.h"
#include "policies/text/configured.h"
#include "replay/replay.h"
#include "small_trace.h"
#include "survival.h"

namespace kvreplay {
namespace {

struct Sound {
  SmallTrace small;
  const Trace& trace = *small;
  std::unique_ptr<Backend> backend = make_backend("cpu", 1);
};

class Listener final : public Sink {
 public:
  void failed(int, const Error& error) override { require(error.refusal() != Refusal::internal, error.what()); }
};

/// The text names files: what is in them is not this harness's.
bool reads_files(std::string_view text) {
  for (const char* mark : {"@", ".npy", ".py", ".so", "/"})
    if (text.find(mark) != std::string_view::npos) return true;
  return false;
}

void replay_once(const Sound& sound, const ConfiguredPolicy& policy, const Budget& budget) {
  const int prompt = boundary(sound.trace, "prompt");
  const Conditions conditions{prompt, eval_queries(sound.trace, "continuation"), treated_layers(sound.trace, true)};
  const int tokens = std::max(1, budget.tokens(prompt, [](int count) { return 256.0 * count; }));
  check_policy(sound.trace, conditions, policy, tokens, budget.of_seen());
  without_question(sound.trace, conditions, policy);
  protected_tokens_fill_budget(sound.trace, conditions, policy, tokens);
  survives([&] { bytes_of_tokens(sound.trace, conditions, policy); });
  const Cell cells[] = {{policy, tokens, budget.of_seen()}};
  Listener listener;
  replay(*sound.backend, sound.trace, conditions, cells, listener);
}

void read_policy(const Sound& sound, const std::string& text, const Budget& budget) {
  const ConfiguredPolicy policy = ConfiguredPolicy::parse(text, 3);
  for (const std::string& label : {policy.label_with_seeds(), policy.name() + ":" + policy.params()}) {
    if (label.ends_with(':')) continue;
    require(ConfiguredPolicy::parse(label).params() == policy.params(), text + " is not " + label);
  }
  policy.source_hash();
  survives([&] { policy.check_layers_apart(); });
  survives([&] { policy.plans(1); });
  survives([&] { policy.plans(30); });
  survives([&] { replay_once(sound, policy, budget); });
}

}  // namespace
}  // namespace kvreplay

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const Sound sound;
  FuzzedDataProvider bytes(data, size);
  const char* budgets[] = {"6", "0.3", "1", "0.5@seen", "20", "1KiB"};
  const Budget budget = Budget::parse(bytes.PickValueInArray(budgets));
  const std::string text = bytes.ConsumeRemainingBytesAsString();
  if (reads_files(text)) return 0;
  survives([&] {
    for (const std::string& policy : split_policies(text)) survives([&] { read_policy(sound, policy, budget); });
  });
  return 0;
}
