#include "observables/reconstruction.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "float_types.h"
#include "observables/vector_products.h"

namespace kvreplay {
namespace {

/// The passes of one query head.
class HeadPasses {
 public:
  HeadPasses(const LayerView& view, int head)
      : view_(view),
        of_(view.place().reconstruction),
        head_(head),
        prompt_keys_(view.keys(), head / view.group()),
        pass_keys_({of_.k.heads, of_.k.tokens, of_.k.dim,
                    [this](int kv_head, int i, std::span<double> key) { read_row(of_.k, kv_head, i, key); }},
                   head / view.group()),
        query_(static_cast<std::size_t>(of_.q.dim)) {}

  /// Raises `largest` [P] to the attention of token `number` of the pass.
  void add(const ReconstructionPass& pass, const PassTokens& read, int number, std::span<double> largest) {
    read_row(of_.q, head_, pass.begin + number, query_);
    const auto sinks = static_cast<std::size_t>(read.sinks), columns = static_cast<std::size_t>(read.end - read.first);
    logits_.resize(sinks + columns + static_cast<std::size_t>(number) + 1);
    const std::span<double> all(logits_);
    prompt_keys_.with(query_, 0, all.first(sinks));
    prompt_keys_.with(query_, read.first, all.subspan(sinks, columns));
    pass_keys_.with(query_, pass.begin, all.subspan(sinks + columns));
    const LayerTensors& tensors = view_.tensors();
    const int lowest = tensors.first_visible(view_.prompt() + number);
    const double scale = tensors.softmax_scale, cap = tensors.logit_softcap;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const int position = i < sinks             ? static_cast<int>(i)
                           : i < sinks + columns ? read.first + static_cast<int>(i - sinks)
                                                 : view_.prompt() + static_cast<int>(i - sinks - columns);
      all[i] *= scale;
      if (cap > 0) all[i] = cap * std::tanh(all[i] / cap);
      if (position < lowest) all[i] = -HUGE_VAL;
    }
    const double most = std::max(std::ranges::max(all), tensors.sink(head_));
    double sum = std::exp(tensors.sink(head_) - most);
    for (double& term : all) sum += term = std::exp(term - most);
    const std::span<double> raised = largest.subspan(static_cast<std::size_t>(read.first), columns);
    for (std::size_t j = 0; j < columns; ++j) raised[j] = std::max(raised[j], all[sinks + j] / sum);
  }

 private:
  const LayerView& view_;
  const Reconstruction& of_;
  int head_;
  VectorProducts prompt_keys_, pass_keys_;
  std::vector<double> query_, logits_;
};

}  // namespace

const Matrix& largest_attention_of_passes(const LayerView& view, std::span<const PassTokens> reads) {
  LayerView::Arguments arguments;
  for (const PassTokens& read : reads)
    for (const int number : {read.sinks, read.first, read.end}) arguments.push_back(number);
  return view.remember("largest_attention_of_passes", std::move(arguments), [&] {
    const std::span<const ReconstructionPass> passes = view.place().reconstruction.passes;
    Matrix largest(view.query_heads(), view.prompt());
    view.on_threads(static_cast<std::size_t>(view.query_heads()), [&](std::size_t head) {
      HeadPasses of_head(view, static_cast<int>(head));
      for (std::size_t i = 0; i < passes.size(); ++i)
        for (int number = 0; number < passes[i].tokens() && !view.backend().interruption().ended(); ++number)
          of_head.add(passes[i], reads[i], number, largest.row(static_cast<int>(head)));
    });
    return largest;
  });
}

}  // namespace kvreplay
