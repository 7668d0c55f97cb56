// SCA's greedy choice in its incremental form. Similarities are integers, so that it is the direct one bit for bit.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>

#include "attention/cpu_backend.h"
#include "attention/rope.h"

namespace kvreplay {
namespace {

// Bytes of similarities to hold; beyond it rows are computed as they are needed.
constexpr std::size_t most_held_bytes = std::size_t{1} << 30;
// Panels of rows that read a tile of columns from the second-level cache.
constexpr int panels_at_once = 4;
constexpr double one = 0x1p30;

/// S_ij = rint(2^30 cos(w_i, w_j)) of the resident tokens. Every sum over dimensions begins with the first one, so
/// equal vectors have equal similarities, and S_ij = S_ji.
class Similarities {
 public:
  Similarities(const TileKernels& kernels, int threads, const TensorView& tensor,
               std::span<const std::int32_t> resident, const BackwardRotation* to_slots)
      : kernels_(kernels),
        threads_(threads),
        tokens_(static_cast<int>(resident.size())),
        dim_(tensor.heads * tensor.dim),
        tiles_((tokens_ + kernels.wide_keys - 1) / kernels.wide_keys),
        norms_(resident.size()) {
    const std::size_t tile_doubles = product(dim_, kernels_.wide_keys);
    packed_.at_least(static_cast<std::size_t>(tiles_) * tile_doubles);
#pragma omp parallel num_threads(threads_)
    {
      std::vector<float> narrow(static_cast<std::size_t>(tensor.dim));
      std::vector<double> vectors(tile_doubles);
#pragma omp for schedule(static)
      for (int tile = 0; tile < tiles_; ++tile) {
        const int begin = tile * kernels_.wide_keys;
        const int count = std::min(kernels_.wide_keys, tokens_ - begin);
        for (int i = 0; i < count; ++i) {
          const int slot = begin + i;
          const int position = resident[static_cast<std::size_t>(slot)];
          double* vector = vectors.data() + product(i, dim_);
          for (int head = 0; head < tensor.heads; ++head) {
            kernels_.widen(tensor.row(head, position), tensor.dtype, tensor.dim, narrow.data());
            double* part = vector + product(head, tensor.dim);
            std::copy(narrow.begin(), narrow.end(), part);
            if (to_slots != nullptr) to_slots->apply(slot - position, {part, narrow.size()});
          }
          double square = 0.0;
          for (int c = 0; c < dim_; ++c) square += vector[c] * vector[c];
          norms_[static_cast<std::size_t>(slot)] = std::sqrt(square);
        }
        kernels_.wide_pack(vectors.data(), count, dim_, kernels_.wide_keys, tile_at(tile));
      }
    }
  }

  std::size_t bytes() const { return product(tokens_, tokens_) * sizeof(std::int32_t); }

  /// Computes all rows once and for all.
  void hold() {
    std::int32_t* all = held_.at_least(product(tokens_, tokens_));
    const int rows_at_once = panels_at_once * kernels_.rows;
    const int bands = (tokens_ + rows_at_once - 1) / rows_at_once;
#pragma omp parallel num_threads(threads_)
    {
      AlignedBuffer<double> panels, products;
#pragma omp for schedule(dynamic)
      for (int band = bands - 1; band >= 0; --band) {  // the longest first
        const int first_row = band * rows_at_once;
        const int end_row = std::min(first_row + rows_at_once, tokens_);
        double* panel = panels.at_least(product(rows_at_once, dim_));
        for (int row = first_row; row < first_row + rows_at_once; row += kernels_.rows)
          gather(row, std::clamp(end_row - row, 0, kernels_.rows), panel + product(row - first_row, dim_));
        for (int tile = 0; tile * kernels_.wide_keys < end_row; ++tile) {
          for (int row = first_row; row < end_row; row += kernels_.rows) {
            if (tile * kernels_.wide_keys >= std::min(row + kernels_.rows, tokens_)) continue;
            similarities(panel + product(row - first_row, dim_), tile, products, row,
                         std::min(row + kernels_.rows, tokens_), [&](int i, int j, std::int32_t s) {
                           if (j > i) return;
                           all[product(i, tokens_) + static_cast<std::size_t>(j)] = s;
                           all[product(j, tokens_) + static_cast<std::size_t>(i)] = s;
                         });
          }
        }
      }
    }
  }

  /// Row i: where it is held, or computed into `buffer`.
  const std::int32_t* row(int i, std::vector<std::int32_t>& buffer) const {
    if (held_.data() != nullptr) return held_.data() + product(i, tokens_);
    buffer.resize(static_cast<std::size_t>(tokens_));
    AlignedBuffer<double> panel;
    gather(i, 1, panel.at_least(product(kernels_.rows, dim_)));
#pragma omp parallel num_threads(threads_)
    {
      AlignedBuffer<double> products;
#pragma omp for schedule(static)
      for (int tile = 0; tile < tiles_; ++tile) {
        similarities(panel.data(), tile, products, i, i + 1,
                     [&](int, int j, std::int32_t s) { buffer[static_cast<std::size_t>(j)] = s; });
      }
    }
    return buffer.data();
  }

 private:
  double* tile_at(int tile) {
    return packed_.data() + static_cast<std::size_t>(tile) * product(dim_, kernels_.wide_keys);
  }
  const double* tile_at(int tile) const {
    return packed_.data() + static_cast<std::size_t>(tile) * product(dim_, kernels_.wide_keys);
  }

  /// A panel of the tokens [first, first + count).
  void gather(int first, int count, double* panel) const {
    std::fill_n(panel, product(dim_, kernels_.rows), 0.0);
    for (int r = 0; r < count; ++r) {
      const double* column = tile_at((first + r) / kernels_.wide_keys) + (first + r) % kernels_.wide_keys;
      for (int c = 0; c < dim_; ++c)
        panel[product(c, kernels_.rows) + static_cast<std::size_t>(r)] = column[product(c, kernels_.wide_keys)];
    }
  }

  /// out(i, j, S_ij) for the tokens i of a panel, [first, end), and j of a tile.
  template <class Out>
  void similarities(const double* panel, int tile, AlignedBuffer<double>& buffer, int first, int end, Out out) const {
    double* products = buffer.at_least(product(kernels_.rows, kernels_.wide_keys));
    kernels_.wide_products(panel, tile_at(tile), dim_, products);
    const int begin = tile * kernels_.wide_keys;
    for (int i = first; i < end; ++i) {
      for (int j = begin; j < std::min(begin + kernels_.wide_keys, tokens_); ++j) {
        const double norm = norms_[static_cast<std::size_t>(i)] * norms_[static_cast<std::size_t>(j)];
        const double dot = products[product(i - first, kernels_.wide_keys) + static_cast<std::size_t>(j - begin)];
        out(i, j, static_cast<std::int32_t>(norm > 0.0 ? std::nearbyint(one * (dot / norm)) : 0.0));
      }
    }
  }

  const TileKernels& kernels_;
  int threads_;
  int tokens_;
  int dim_;
  int tiles_;
  AlignedBuffer<double> packed_;  // [tiles, dim, wide_keys]
  std::vector<double> norms_;
  AlignedBuffer<std::int32_t> held_;  // [tokens, tokens], or nothing
};

/// Add(j) = Σ_{i in R} max(0, S_ij − red_i) + max_{i in R} S_ij of every token, while R grows.
class Redundancy {
 public:
  Redundancy(std::unique_ptr<Similarities> similarities, int tokens)
      : similarities_(std::move(similarities)),
        red_(static_cast<std::size_t>(tokens)),
        excess_(red_.size()),
        highest_(red_.size()) {}

  std::int64_t of(int token) const {
    const auto at = static_cast<std::size_t>(token);
    return excess_[at] + highest_[at];
  }

  /// Only rows whose red_i the newcomer raises change; that of the first alone in R, 0, whatever it becomes.
  void join(int token, std::span<const int> members) {
    const auto at = static_cast<std::size_t>(token);
    const std::int32_t* joining = similarities_->row(token, joining_row_);
    for (const int member : members) {
      std::int64_t& red = red_[static_cast<std::size_t>(member)];
      const std::int64_t found = joining[member];
      if (members.size() > 1 && found <= red) continue;
      const std::int32_t* row = similarities_->row(member, member_row_);
      for (std::size_t j = 0; j < excess_.size(); ++j) {
        const std::int64_t s = row[j];
        excess_[j] += std::max<std::int64_t>(0, s - found) - std::max<std::int64_t>(0, s - red);
      }
      red = found;
    }
    red_[at] = members.empty() ? 0 : highest_[at];
    for (std::size_t j = 0; j < excess_.size(); ++j) {
      const std::int64_t s = joining[j];
      excess_[j] += std::max<std::int64_t>(0, s - red_[at]);
      highest_[j] = members.empty() ? s : std::max(highest_[j], s);
    }
  }

 private:
  std::unique_ptr<Similarities> similarities_;
  std::vector<std::int64_t> red_;      // of members
  std::vector<std::int64_t> excess_;   // the sum
  std::vector<std::int64_t> highest_;  // the maximum
  std::vector<std::int32_t> joining_row_, member_row_;
};

}  // namespace

std::vector<std::int32_t> CpuBackend::least_redundant(const LayerTensors& layer, const RedundancyElimination& what) {
  const int tokens = static_cast<int>(what.resident.size());
  assert(what.keys || what.values);
  assert(what.sinks + what.recent >= 1 && what.sinks + what.recent <= what.keep && what.keep <= tokens);

  std::vector<std::unique_ptr<Similarities>> similarities;
  if (what.keys) {
    std::optional<BackwardRotation> to_slots;
    if (what.positions == Positions::cache) to_slots.emplace(layer.rope, what.resident.back() - (tokens - 1));
    similarities.push_back(
        std::make_unique<Similarities>(kernels_, threads_, layer.k, what.resident, to_slots ? &*to_slots : nullptr));
  }
  if (what.values)
    similarities.push_back(std::make_unique<Similarities>(kernels_, threads_, layer.v, what.resident, nullptr));
  std::vector<Redundancy> parts;
  const bool hold = similarities.size() * similarities.front()->bytes() <= most_held_bytes;
  for (std::unique_ptr<Similarities>& some : similarities) {
    if (hold) some->hold();
    parts.emplace_back(std::move(some), tokens);
  }

  std::vector<int> members;
  std::vector<bool> joined(static_cast<std::size_t>(tokens));
  const auto join = [&](int token) {
    for (Redundancy& part : parts) part.join(token, members);
    members.push_back(token);
    joined[static_cast<std::size_t>(token)] = true;
  };
  for (int token = 0; token < what.sinks; ++token) join(token);
  for (int token = tokens - what.recent; token < tokens; ++token) join(token);
  while (static_cast<int>(members.size()) < what.keep) {
    int best = -1;
    std::int64_t least = 0;
    for (int token = 0; token < tokens; ++token) {
      if (joined[static_cast<std::size_t>(token)]) continue;
      std::int64_t redundancy = 0;
      for (const Redundancy& part : parts) redundancy += part.of(token);
      if (what.most_redundant) redundancy = -redundancy;
      if (best >= 0 && redundancy >= least) continue;
      best = token;
      least = redundancy;
    }
    join(best);
  }
  std::ranges::sort(members);
  return members;
}

std::size_t CpuBackend::redundancy_bytes(const LayerTensors& layer, int tokens) const {
  // Vectors of keys and of values packed in float64, similarities of both as far as they are held.
  const auto n = static_cast<std::size_t>(tokens);
  const std::size_t vectors = n * product(layer.k.heads, layer.k.dim + layer.v.dim) * sizeof(double);
  return vectors + std::min(most_held_bytes, 2 * n * n * sizeof(std::int32_t));
}

}  // namespace kvreplay
