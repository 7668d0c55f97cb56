#include "trace/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <numbers>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "float_types.h"
#include "hash.h"

namespace kvreplay {
namespace {

// Few tokens, or pairs that hardly turn, leave nothing to tell a turned key from an unturned one.
constexpr int fewest_tokens = 64;
constexpr double fewest_turns = 2.0;
// Keys that line up so well as stored, and so much less when turned back, were never turned so. SmolLM2-135M on 1,102
// tokens, layer by layer: as captured 0.03 stored, 0.73 to 0.91 turned back; from before RoPE 0.73 to 0.91 and 0.03;
// with the other style 0.20 to 0.33 and 0.07.
constexpr double high_coherence = 0.15;
constexpr double clear_ratio = 2.0;

/// Whether a stored element is NaN or infinite: all exponent bits set.
template <class Bits>
bool any_not_finite(const std::byte* elements, std::size_t count, Bits exponent) {
  Bits any = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, elements + i * sizeof bits, sizeof bits);
    any = static_cast<Bits>(any | ((bits & exponent) == exponent ? 1U : 0U));
  }
  return any != 0;
}

bool any_not_finite(const std::byte* elements, DType type, std::size_t count) {
  if (type == DType::float32) return any_not_finite<std::uint32_t>(elements, count, 0x7F800000U);
  return any_not_finite<std::uint16_t>(elements, count, type == DType::float16 ? 0x7C00U : 0x7F80U);
}

/// How well the keys of a layer line up over positions, as stored and turned back by RoPE: the length of their sum over
/// the sum of their lengths, a mean over heads and those pairs that turn often enough.
struct Coherence {
  double stored = 0.0;
  double turned_back = 0.0;
  int pairs = 0;
};

Coherence key_coherence(const TensorView& keys, const Rope& rope) {
  using Complex = std::complex<double>;
  Coherence coherence;
  const std::size_t pairs = rope.inv_freq.size();
  for (std::size_t i = 0; i < pairs; ++i) {
    const double frequency = rope.inv_freq[i];
    if (std::abs(frequency) * keys.tokens < fewest_turns * 2.0 * std::numbers::pi) continue;
    const std::size_t first = static_cast<std::size_t>(rope.offset) + (rope.interleaved ? 2 * i : i);
    const std::size_t second = first + (rope.interleaved ? 1 : pairs);
    for (int head = 0; head < keys.heads; ++head) {
      Complex stored, turned_back;
      double length = 0.0;
      Complex turn{1.0, 0.0};
      const Complex step = std::polar(1.0, -frequency);
      for (int token = 0; token < keys.tokens; ++token) {
        const std::byte* row = keys.row(head, token);
        const Complex key{load(row, keys.dtype, first), load(row, keys.dtype, second)};
        stored += key;
        turned_back += key * turn;
        length += std::abs(key);
        turn = (token + 1) % 1024 == 0 ? std::polar(1.0, -frequency * (token + 1)) : turn * step;
      }
      if (!(length > 0.0)) continue;
      coherence.stored += std::abs(stored) / length;
      coherence.turned_back += std::abs(turned_back) / length;
      ++coherence.pairs;
    }
  }
  if (coherence.pairs > 0) {
    coherence.stored /= coherence.pairs;
    coherence.turned_back /= coherence.pairs;
  }
  return coherence;
}

bool rotates(std::span<const double> frequencies) {
  return std::ranges::any_of(frequencies, [](double f) { return f != 0.0; });
}

/// A layer stored without RoPE: do its keys line up once they are turned back by the frequencies of another layer?
void check_missing_rope(const std::string& file, const std::string& path, const LayerTensors& layer,
                        const TraceHeader& header, DeepReport& report) {
  if (layer.k.tokens < fewest_tokens) return;
  std::set<std::vector<double>> rows;
  bool compared = false;
  for (int l = 0; l < header.layers; ++l) {
    const std::span<const double> row = header.frequencies(l);
    if (header.rope_offset + 2 * std::ssize(row) > layer.k.dim) continue;
    if (!rotates(row) || !rows.emplace(row.begin(), row.end()).second) continue;
    const Coherence coherence = key_coherence(layer.k, {row, 1.0, header.rope_interleaved, header.rope_offset});
    if (coherence.pairs == 0 || !std::isfinite(coherence.stored)) continue;
    compared = true;
    if (coherence.turned_back <= high_coherence || coherence.turned_back <= clear_ratio * coherence.stored) continue;
    report.problems.emplace_back(
        Refusal::input, file + ":" + path, "RoPE",
        "stored keys that are aligned, since inv_freq gives this layer no RoPE",
        fmt::format("keys aligned only after undoing RoPE with the frequencies of layer {} ({:.2f}), "
                    "and not as stored ({:.2f})",
                    header.layer_index[static_cast<std::size_t>(l)], coherence.turned_back, coherence.stored));
    break;
  }
  if (compared) ++report.rope_layers;
}

void check_rope(const std::string& file, const std::string& path, const LayerTensors& layer, const TraceHeader& header,
                DeepReport& report) {
  const std::span<const double> frequencies = layer.rope.inv_freq;
  if (!rotates(frequencies)) return check_missing_rope(file, path, layer, header, report);
  const double fastest = std::ranges::max(frequencies, {}, [](double f) { return std::abs(f); });
  if (std::abs(fastest) > std::numbers::pi)
    report.problems.emplace_back(Refusal::input, file + ":/model/rope/inv_freq", "value",
                                 "at most pi radians a position", fmt::format("{}", fastest));
  if (layer.k.tokens < fewest_tokens) return;
  const Coherence coherence = key_coherence(layer.k, layer.rope);
  if (coherence.pairs == 0 || !std::isfinite(coherence.stored)) return;
  ++report.rope_layers;
  if (coherence.stored > high_coherence && coherence.stored > clear_ratio * coherence.turned_back)
    report.problems.emplace_back(Refusal::input, file + ":" + path, "RoPE",
                                 "keys after RoPE, aligned once RoPE is undone",
                                 fmt::format("keys aligned as stored ({:.2f}), not once RoPE is undone ({:.2f})",
                                             coherence.stored, coherence.turned_back));
}

}  // namespace

std::optional<Error> first_not_finite(const std::string& file, const StoredTensor& tensor, int head,
                                      std::span<const std::int32_t> positions,
                                      std::optional<std::span<const std::int32_t>> rows) {
  const TensorView& view = tensor.view;
  const auto dim = static_cast<std::size_t>(view.dim);
  const int count = rows ? static_cast<int>(rows->size()) : view.tokens;
  for (int i = 0; i < count; ++i) {
    const int number = rows ? (*rows)[static_cast<std::size_t>(i)] : i;
    const std::byte* row = view.row(head, number);
    if (!any_not_finite(row, view.dtype, dim)) continue;
    std::size_t component = 0;
    while (std::isfinite(load(row, view.dtype, component))) ++component;
    const int position = positions.empty() ? number : positions[static_cast<std::size_t>(number)];
    return Error{Refusal::input, file + ":" + tensor.path, "number", "finite numbers",
                 fmt::format("{} at head {}, position {}, component {}", load(row, view.dtype, component), head,
                             position, component)};
  }
  return std::nullopt;
}

DeepReport validate_deep(const Trace& trace, const std::function<void(double)>& progress) {
  DeepReport report;
  const std::string file = trace.path().string();
  const int layers = trace.header().layers;
  trace.prefetch(0);
  for (int l = 0; l < layers; ++l) {
    if (l + 1 < layers) trace.prefetch(l + 1);
    for (const StoredTensor& tensor : trace.tensors(l)) {
      const bool queries = tensor.path.ends_with("/q"), keys = tensor.path.ends_with("/k");
      const std::span<const std::int32_t> positions =
          queries ? trace.query_positions(l) : std::span<const std::int32_t>{};
      std::optional<Error> problem;  // one a tensor is enough
      for (int head = 0; head < tensor.view.heads && !problem; ++head)
        problem = first_not_finite(file, tensor, head, positions);
      if (problem) report.problems.push_back(*problem);
      report.numbers += static_cast<std::int64_t>(tensor.view.bytes() / size_of(tensor.view.dtype));
      ++report.tensors;
      if (!tensor.xxh3.empty()) {
        ++report.hashes;
        const std::string made = hash_of({tensor.view.data, tensor.view.bytes()});
        if (made != tensor.xxh3)
          report.problems.emplace_back(Refusal::input, file + ":" + tensor.path, "xxh3", tensor.xxh3, made);
      }
      if (keys) check_rope(file, tensor.path, trace.layer(l), trace.header(), report);
    }
    trace.release(l);
    if (progress) progress(static_cast<double>(l + 1) / layers);
  }
  return report;
}

}  // namespace kvreplay
