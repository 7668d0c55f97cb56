#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "observables/query_products.h"
#include "policies/arithmetic/ranking.h"
#include "policies/policy.h"
#include "policies/schedules/sparse_reads.h"
#include "policies/schedules/token_reads.h"

namespace kvreplay {
namespace {

enum class Channels { product, query, key };
enum class ChannelHeads { query, kv };

struct DoubleSparsity {
  static constexpr Card card{
      .name = "double-sparsity",
      .summary =
          "Sparse reads: all tokens are kept; each query of each head reads the tokens with the largest logits over a "
          "few channels, which are the largest in the prompt and are stored a second time in few bits",
      .paper = "Yang et al. 2024, Double Sparsity, arXiv:2408.07092",
      .score =
          "s[t,j] = sum over the r = floor(d / group_factor) channels c with the largest mean |q_c k_c| of "
          "q'_c k'_c, q' and k' quantised to label_bits",
      .family = Family::reading,
  };

  static constexpr Choice<Channels> channel_words[] = {
      {"qk", Channels::product}, {"q", Channels::query}, {"k", Channels::key}};
  static constexpr Choice<ChannelHeads> head_words[] = {{"query-head", ChannelHeads::query},
                                                        {"kv-head", ChannelHeads::kv}};
  static constexpr int unquantised = 16;  // label bits

  int group_factor = 16;
  int label_bits = 4;
  Channels channels = Channels::product;
  ChannelHeads channel_heads = ChannelHeads::query;
  TokenReads tokens = {};
  DenseLayers dense = {};

  void parameters(Parameters& p) {
    p.add("group_factor", group_factor, IntRange{.least = 1}, "head dimension divided by the number of channels");
    p.add("label_bits", label_bits, IntRange{.least = 1, .most = unquantised},
          "bits of a stored number of a label; 16: not quantised");
    p.add<Channels>("channels", channels, channel_words,
                    "ranks channels by the mean of |q_c k_c| of the same token (qk), or of |q_c| (q) or |k_c| (k) "
                    "before RoPE");
    p.add<ChannelHeads>("share", channel_heads, head_words,
                        "one list of channels for each query head, or for each KV head by the mean over its group");
    tokens.parameters(p);
    dense.parameters(p);
  }

  /// [Hq or Hkv, d]: how large each channel is in the tokens of the prompt.
  Matrix channel_sizes(const LayerView& view) const {
    const LayerTensors& layer = view.tensors();
    const auto dim = static_cast<std::size_t>(layer.q.dim);
    const BackwardRotation rotation(layer.rope, channels == Channels::product ? 0 : view.prompt());
    Matrix sizes(view.query_heads(), layer.q.dim);
    view.on_threads(static_cast<std::size_t>(view.query_heads()), [&](std::size_t number) {
      const auto head = static_cast<int>(number);
      std::vector<double> query(dim, 1.0), key(dim, 1.0);
      for (int t = 0; t < view.prompt(); ++t) {
        if (channels != Channels::key) read_row(layer.q, head, stored_query(layer, t), query);
        if (channels != Channels::query) read_row(layer.k, head / view.group(), t, key);
        if (channels == Channels::query) rotation.apply(-t, query);
        if (channels == Channels::key) rotation.apply(-t, key);
        for (std::size_t c = 0; c < dim; ++c) sizes.row(head)[c] += std::abs(query[c] * key[c]) / view.prompt();
      }
    });
    return channel_heads == ChannelHeads::query ? sizes : Grouping{}(sizes, view.group());
  }

  int label_size(const LayerView& view) const { return std::max(1, view.tensors().k.dim / group_factor); }

  /// [Hq or Hkv, r]: the largest channels, ascending.
  const Matrix& label_channels(const LayerView& view) const {
    return view.remember("label_channels", arguments(), [&] {
      const Matrix sizes = channel_sizes(view);
      Matrix best(sizes.rows(), label_size(view));
      for (int row = 0; row < sizes.rows(); ++row)
        std::ranges::copy(largest(sizes.row(row), best.columns()), best.row(row).begin());
      return best;
    });
  }

  /// Rounds the numbers of a label to 2^label_bits levels between the least and the largest of them, in float32.
  void quantise(std::span<double> label) const {
    if (label_bits == unquantised) return;
    const auto [least, most] = std::ranges::minmax(label);
    const auto low = static_cast<float>(least);
    const float range = static_cast<float>(most) - low, levels = static_cast<float>((1 << label_bits) - 1);
    const float scale = levels / (range == 0 ? 1 : range);
    for (double& number : label) {
      const float level = std::nearbyint((static_cast<float>(number) - low) * scale);
      number = static_cast<double>(std::clamp(level, 0.0F, levels) / scale + low);
    }
  }

  /// The channels of a label from a whole vector.
  void make_label(std::span<const double> vector, std::span<const double> of_channels, std::span<double> label) const {
    for (std::size_t i = 0; i < label.size(); ++i) label[i] = vector[static_cast<std::size_t>(of_channels[i])];
    quantise(label);
  }

  /// [Hq or Hkv, P * r] of the keys.
  const Matrix& key_labels(const LayerView& view, const Matrix& of_channels) const {
    return view.remember("key_labels", arguments(), [&] {
      const TensorView& keys = view.tensors().k;
      const auto size = static_cast<std::size_t>(of_channels.columns());
      Matrix labels(of_channels.rows(), view.prompt() * of_channels.columns());
      view.on_threads(static_cast<std::size_t>(labels.rows()), [&](std::size_t number) {
        const auto row = static_cast<int>(number);
        std::vector<double> key(static_cast<std::size_t>(keys.dim));
        for (int t = 0; t < view.prompt(); ++t) {
          read_row(keys, row * keys.heads / labels.rows(), t, key);
          make_label(key, of_channels.row(row), labels.row(row).subspan(static_cast<std::size_t>(t) * size, size));
        }
      });
      return labels;
    });
  }

  LayerView::Arguments arguments() const {
    return {static_cast<double>(group_factor), static_cast<double>(label_bits), static_cast<double>(channels),
            static_cast<double>(channel_heads)};
  }

  /// [Hq, end - first].
  Matrix scores(const LayerView& view, const Matrix& of_channels, const Matrix& labels, int query, int first,
                int end) const {
    const LayerTensors& layer = view.tensors();
    const int stored = stored_query(layer, query), rows = labels.rows(), heads = view.query_heads();
    const auto size = static_cast<std::size_t>(of_channels.columns());
    Matrix result(heads, end - first);
    view.on_threads(static_cast<std::size_t>(heads), [&](std::size_t number) {
      const auto head = static_cast<int>(number);
      const int row = head * rows / heads;
      std::vector<double> vector(static_cast<std::size_t>(layer.q.dim)), label(size);
      read_row(layer.q, head, stored, vector);
      make_label(vector, of_channels.row(row), label);
      std::ranges::copy(products_with(label, labels.row(row).subspan(static_cast<std::size_t>(first) * size,
                                                                     static_cast<std::size_t>(end - first) * size)),
                        result.row(head).begin());
    });
    return result;
  }

  TokenIndex index(const LayerView& view) const {
    const Matrix& of_channels = label_channels(view);
    const Matrix& labels = key_labels(view, of_channels);
    const auto count = static_cast<double>(labels.rows()) * view.prompt();
    constexpr double minimum_and_scale = 4;  // bytes, 16 bits each
    return {
        .scores = [*this, &view, &of_channels, &labels](
                      int query, int first, int end) { return scores(view, of_channels, labels, query, first, end); },
        .bytes =
            count * (of_channels.columns() * label_bits / 8.0 + (label_bits == unquantised ? 0 : minimum_and_scale))};
  }

  std::vector<LayerPlan> plans(int layers) const {
    const auto make_index = [*this](const LayerView& view) { return index(view); };
    return dense.plans(layers, tokens.best_of(make_index),
                       {.all_queries = channels != Channels::key, .rope = channels != Channels::product});
  }
};

const Registered<DoubleSparsity> registered;

}  // namespace
}  // namespace kvreplay
