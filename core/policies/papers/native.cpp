#include <algorithm>
#include <cstdint>
#include <memory>

#include "attention/softmax_keys.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

KeptSet read_by(const LayerView& view, int query) {
  const LayerTensors& layer = view.tensors();
  const int stored = stored_query(layer, query), prompt = view.prompt();
  KeptSet read(Heads::kv, layer.k.heads, prompt);
  for (int head = 0; head < layer.k.heads; ++head)
    for (const std::int32_t unit : layer.visible.of(head, stored, layer.q, layer.k.heads))
      if (const int begin = unit * layer.visible.tokens; begin < prompt)
        read.keep(head, begin, std::min(begin + layer.visible.tokens, prompt));
  return read;
}

class RecordedReads final : public Schedule {
 public:
  std::string name() const override { return "queries that each read some tokens"; }
  Decision decided() const override { return Decision::never; }
  bool has_budget() const override { return false; }

  Requirements required() const override {
    constexpr const char* reason = "each query reads some of the whole prompt, as it is";
    constexpr const char* remedy = "no other allocator and store";
    return {{Property::every_token, reason, remedy}, {Property::unchanged, reason, remedy}};
  }

  LayerReads reads(const LayerView& view, int /*budget*/) const override {
    if (view.tensors().visible.units.empty()) return {};
    return {[&view](int query) { return read_by(view, query); }, 0};
  }
};

struct Native {
  static constexpr Card card{
      .name = "native",
      .summary =
          "Sparse reads: all tokens are kept; each query reads the tokens that the model itself selected for it "
          "(/layers/N/visible of the trace), and all tokens in layers without such a selection",
      .paper = "DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556",
      .score = "none: the selection of the model's own indexer, as captured",
      .family = Family::reading,
  };

  void parameters(Parameters&) {}
  Plan plan() const { return {.allocate = every_token(), .schedule = std::make_shared<RecordedReads>()}; }
};

const Registered<Native> registered;

}  // namespace
}  // namespace kvreplay
