// SCA's greedy choice in its incremental form. Similarities are integers, so that it is the direct one bit for bit.
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "attention/rope.h"
#include "cpu/cpu_backend.h"
#include "error.h"

namespace kvreplay {
namespace {

// Rows that read a tile of columns while it lies in the first-level cache, whole panels and whole tiles of any level:
// so no two threads write the same similarities.
constexpr int band_rows = 96;
// Dimensions multiplied at a time, for the same reason.
constexpr int chunk_dims = 192;
// The fewest panels to hold where not all are: a step needs some rows side by side.
constexpr std::size_t fewest_panels = 4;
constexpr std::int32_t highest_similarity = std::numeric_limits<std::int32_t>::max();
// Beyond any Add, and far enough from the ends of 64 bits for what is still added to those that have joined.
constexpr std::int64_t joined_excess = std::int64_t{1} << 62;

int pieces(int count, int size) { return (count + size - 1) / size; }

/// How the similarities of some tokens lie in memory.
struct Shape {
  Shape(const SimilarityKernels& kernels, int token_count)
      : tokens(token_count), panels(pieces(tokens, kernels.rows)), tiles(pieces(tokens, kernels.wide_columns)) {
    // Whole panels and whole tiles, also once rows have become columns; an odd number of cache lines, because rows at
    // distances of a power of two would share few places in a cache.
    constexpr int line = 64 / sizeof(std::int32_t);
    const int lines = pieces(std::max(panels * kernels.rows, tiles * kernels.wide_columns), line);
    stride = static_cast<std::size_t>(lines | 1) * line;
    panel_bytes = static_cast<std::size_t>(kernels.rows) * stride * sizeof(std::int32_t);
    all_bytes = stride * stride * sizeof(std::int32_t);
  }

  /// Panels to hold within `bytes`.
  std::size_t held_panels(std::size_t bytes) const {
    return all_bytes <= bytes ? static_cast<std::size_t>(panels) : std::max(fewest_panels, bytes / panel_bytes);
  }
  std::size_t held_bytes(std::size_t bytes) const {
    return all_bytes <= bytes ? all_bytes : held_panels(bytes) * panel_bytes;
  }

  int tokens;
  int panels;
  int tiles;
  std::size_t stride;
  std::size_t panel_bytes;
  std::size_t all_bytes;
};

/// S_ij = rint(2^30 cos(w_i, w_j)) of the resident tokens, by panels of rows: all of them, or those used last.
class Similarities {
 public:
  Similarities(const SimilarityKernels& kernels, int threads, const Shape& shape, std::size_t bytes, int dim,
               bool of_floats, AlignedBuffer<double>& vectors, AlignedBuffer<std::int32_t>& rows)
      : kernels_(kernels),
        threads_(threads),
        shape_(shape),
        dim_(dim),
        of_floats_(of_floats),
        vectors_(vectors.at_least(product(shape.tiles * kernels.wide_columns, dim))),
        scales_(shape.stride, 0.0),
        rows_(rows.at_least(shape.held_bytes(bytes) / sizeof(std::int32_t))),
        panel_in_(shape.held_panels(bytes), -1),
        last_use_(panel_in_.size(), 0),
        slot_of_(static_cast<std::size_t>(shape.panels), -1) {}

  /// Vectors for the products: vectors_of(token, out) writes one, [dim]. Throws where numbers are not finite. True
  /// where the buffer, if it holds vectors of as many tokens and numbers, held the same ones.
  template <class VectorsOf>
  bool pack(VectorsOf vectors_of, bool holds_vectors) {
    const int width = kernels_.wide_columns;
    std::atomic<bool> finite{true}, same{holds_vectors};
#pragma omp parallel num_threads(threads_)
    {
      std::vector<double> vectors(product(width, dim_));
      AlignedBuffer<double> packed;
#pragma omp for schedule(static)
      for (int tile = 0; tile < shape_.tiles; ++tile) {
        const int count = std::min(width, shape_.tokens - tile * width);
        for (int i = 0; i < count; ++i) vectors_of(tile * width + i, vectors.data() + product(i, dim_));
        const std::span present(vectors.data(), product(count, dim_));
        if (!std::ranges::all_of(present, [](double x) { return std::isfinite(x); })) finite = false;
        const std::span wide(packed.at_least(vectors.size()), vectors.size());
        kernels_.pack_wide(vectors.data(), count, dim_, width, wide.data(), scales_.data() + tile * width);
        if (same && std::equal(wide.begin(), wide.end(), tile_at(tile))) continue;
        same = false;
        std::ranges::copy(wide, tile_at(tile));
      }
    }
    if (!finite) throw Error{Refusal::input, "similarity", "vectors", "finite numbers", "NaN or Inf"};
    return same;
  }

  bool holds_all() const { return panel_in_.size() == slot_of_.size(); }
  int rows_at_once() const { return holds_all() ? shape_.tokens : static_cast<int>(panel_in_.size()); }

  /// All rows are computed.
  void enter_all() {
    std::iota(panel_in_.begin(), panel_in_.end(), 0);
    std::iota(slot_of_.begin(), slot_of_.end(), 0);
  }

  /// Computes all rows once and for all, one triangle of products.
  void compute_all(Interruption& interruption) {
    enter_all();
    const int bands = pieces(shape_.tokens, band_rows);
    assert(band_rows % kernels_.rows == 0 && band_rows % kernels_.wide_columns == 0);
#pragma omp parallel num_threads(threads_)
    {
      AlignedBuffer<double> panels, sums;
#pragma omp for schedule(dynamic)
      for (int number = 0; number < bands; ++number) {  // the longest first
        const int first_panel = (bands - 1 - number) * (band_rows / kernels_.rows);
        const int end_panel = std::min(first_panel + band_rows / kernels_.rows, shape_.panels);
        double* packed = panels.at_least(product(band_rows, dim_));
        for (int panel = first_panel; panel < end_panel; ++panel)
          gather(panel, packed + product((panel - first_panel) * kernels_.rows, dim_));
        for (int tile = 0; tile < shape_.tiles && tile * kernels_.wide_columns < end_panel * kernels_.rows; ++tile)
          if (!interruption.ended())
            multiply(packed, first_panel, end_panel, tile, rows_ + product(first_panel, kernels_.rows) * shape_.stride,
                     true, sums);
      }
    }
  }

  /// Row i of them, at least until rows_at_once() - 1 other rows have been asked for.
  const std::int32_t* row(int i) {
    const auto panel = static_cast<std::size_t>(i / kernels_.rows);
    if (slot_of_[panel] < 0) compute(static_cast<int>(panel));
    const auto slot = static_cast<std::size_t>(slot_of_[panel]);
    last_use_[slot] = ++uses_;
    return rows_ + (slot * static_cast<std::size_t>(kernels_.rows) + static_cast<std::size_t>(i % kernels_.rows)) *
                       shape_.stride;
  }

 private:
  double* tile_at(int tile) { return vectors_ + product(tile, kernels_.wide_columns) * static_cast<std::size_t>(dim_); }

  /// Computes a panel where the one lies that was used the longest ago.
  void compute(int panel) {
    const auto oldest = std::min_element(last_use_.begin(), last_use_.end()) - last_use_.begin();
    int& resident = panel_in_[static_cast<std::size_t>(oldest)];
    if (resident >= 0) slot_of_[static_cast<std::size_t>(resident)] = -1;
    resident = panel;
    slot_of_[static_cast<std::size_t>(panel)] = static_cast<int>(oldest);
    double* packed = panel_.at_least(product(kernels_.rows, dim_));
    gather(panel, packed);
    std::int32_t* out = rows_ + static_cast<std::size_t>(oldest) * product(kernels_.rows, 1) * shape_.stride;
#pragma omp parallel num_threads(threads_)
    {
      AlignedBuffer<double> sums;
#pragma omp for schedule(static)
      for (int tile = 0; tile < shape_.tiles; ++tile) multiply(packed, panel, panel + 1, tile, out, false, sums);
    }
  }

  /// The vectors of a panel, from their tiles.
  void gather(int panel, double* out) {
    const int width = kernels_.wide_columns;
    const int first = panel * kernels_.rows;
    for (int r = 0; r < kernels_.rows;) {
      const int tile = (first + r) / width;
      const int column = (first + r) % width;
      const int some = std::min(width - column, kernels_.rows - r);
      if (tile < shape_.tiles) {
        const double* from = tile_at(tile) + column;
        for (int c = 0; c < dim_; ++c) std::copy_n(from + product(c, width), some, out + product(c, kernels_.rows) + r);
      } else {
        for (int c = 0; c < dim_; ++c) std::fill_n(out + product(c, kernels_.rows) + r, some, 0.0);
      }
      r += some;
    }
  }

  /// Panels [first, end), packed, times a tile: into their rows, which begin at `out`, and if they are to be turned
  /// into those of the tile's tokens too. What lies above the diagonal has then come from below it.
  void multiply(const double* packed, int first, int end, int tile, std::int32_t* out, bool turn,
                AlignedBuffer<double>& buffer) {
    const int rows = kernels_.rows;
    const int width = kernels_.wide_columns;
    double* sums = buffer.at_least(product((end - first) * rows, width));
    for (int begin = 0; begin < dim_; begin += chunk_dims) {
      const int dims = std::min(chunk_dims, dim_ - begin);
      for (int panel = first; panel < end; ++panel) {
        if (turn && tile * width >= (panel + 1) * rows) continue;
        const WideChunk chunk{.panel = packed + product((panel - first) * rows, dim_) + product(begin, rows),
                              .tile = tile_at(tile) + product(begin, width),
                              .dims = dims,
                              .of_floats = of_floats_,
                              .first = begin == 0,
                              .sums = sums + product((panel - first) * rows, width)};
        if (begin + dims < dim_) {
          kernels_.add_wide_products(chunk);
          continue;
        }
        kernels_.store_similarities(
            chunk, scales_.data() + panel * rows, scales_.data() + tile * width, shape_.stride,
            out + product(panel - first, rows) * shape_.stride + product(tile, width),
            turn ? rows_ + product(tile, width) * shape_.stride + product(panel, rows) : nullptr);
      }
    }
  }

  const SimilarityKernels& kernels_;
  int threads_;
  const Shape& shape_;
  int dim_;
  bool of_floats_;
  double* vectors_;             // [tiles, dim, wide_columns]
  std::vector<double> scales_;  // [stride]
  std::int32_t* rows_;          // [slots, rows, stride]
  std::vector<int> panel_in_;   // [slots] -1: none
  std::vector<std::int64_t> last_use_;
  std::vector<int> slot_of_;  // [panels] -1: not held
  std::int64_t uses_ = 0;
  AlignedBuffer<double> panel_;
};

/// What one matrix of similarities has to do with Add(j) = Σ_{i in R} max(0, S_ij − red_i) + max_{i in R} S_ij, while R
/// grows. The sum over matrices and over i is kept outside.
class Redundancy {
 public:
  Redundancy(const SimilarityKernels& kernels, Similarities& similarities, const Shape& shape)
      : kernels_(kernels),
        similarities_(similarities),
        shape_(shape),
        red_(shape.stride, highest_similarity),
        highest_(shape.stride, std::numeric_limits<std::int32_t>::min()),
        raised_(shape.stride) {}

  /// What changes when `token` joins the members: its own terms, and those whose red_i it raises. Valid until the next
  /// call.
  RedundancyStep join(int token, std::span<const int> members, std::int64_t* excess) {
    const std::int32_t* joining = similarities_.row(token);
    added_.clear();
    removed_.clear();
    const std::int32_t red = members.empty() ? 0 : highest_[static_cast<std::size_t>(token)];
    added_.push_back({joining, red, highest_similarity});
    if (members.size() == 1) {
      // The first, alone, had 0, whatever it has now.
      const std::int32_t* alone = similarities_.row(members.front());
      removed_.push_back({alone, 0, highest_similarity});
      added_.push_back({alone, red, highest_similarity});
      red_[static_cast<std::size_t>(members.front())] = red;
    }
    const int raised = kernels_.find_raised(joining, red_.data(), shape_.tokens, raised_.data());
    for (int i = 0; i < raised; ++i) {
      const auto member = static_cast<std::size_t>(raised_[static_cast<std::size_t>(i)]);
      if (static_cast<int>(removed_.size()) + 2 > similarities_.rows_at_once()) {
        remove(excess);
        joining = added_.front().row = similarities_.row(token);
      }
      removed_.push_back({similarities_.row(static_cast<int>(member)), red_[member], joining[member]});
      red_[member] = joining[member];
    }
    if (!members.empty()) red_[static_cast<std::size_t>(token)] = red;
    return {.added = added_.data(),
            .added_count = static_cast<int>(added_.size()),
            .removed = removed_.data(),
            .removed_count = static_cast<int>(removed_.size()),
            .joining = joining,
            .highest = highest_.data()};
  }

 private:
  /// Takes the removed terms from the sums at once: no more of their rows can be held.
  void remove(std::int64_t* excess) {
    const RedundancyStep step{
        .removed = removed_.data(), .removed_count = static_cast<int>(removed_.size()), .highest = highest_.data()};
    kernels_.redundancy_step(&step, 1, shape_.tokens, false, excess);
    removed_.clear();
  }

  const SimilarityKernels& kernels_;
  Similarities& similarities_;
  const Shape& shape_;
  std::vector<std::int32_t> red_;      // of members; nothing exceeds that of the others, and of one alone
  std::vector<std::int32_t> highest_;  // max of S_ij over the members
  std::vector<ExcessTerm> added_, removed_;
  std::vector<std::int32_t> raised_;
};

}  // namespace

std::vector<std::int32_t> CpuBackend::least_redundant(const LayerTensors& layer, const RedundancyElimination& what) {
  const int tokens = static_cast<int>(what.resident.size());
  assert(what.keys || what.values);
  assert(what.sinks + what.recent >= 1 && what.sinks + what.recent <= what.keep && what.keep <= tokens);

  const SimilarityKernels& kernels = similarity_kernels_;
  const Shape shape(kernels, tokens);
  const std::size_t bytes = similarity_bytes_ / (what.keys && what.values ? 2 : 1);
  std::vector<Similarities> similarities;
  similarities.reserve(2);
  const auto add_similarities = [&](const TensorView& tensor, const BackwardRotation* to_slots) {
    const std::size_t number = similarities.size();
    const int dim = tensor.heads * tensor.dim;
    // Calls for other budgets read the same vectors.
    const HeldSimilarities asked{tokens, dim, to_slots == nullptr};
    const HeldSimilarities held = std::exchange(held_similarities_[number], {});
    Similarities& some = similarities.emplace_back(kernels, threads_, shape, bytes, dim, to_slots == nullptr,
                                                   wide_vectors_[number], similarities_[number]);
    const auto write_vector = [&](int slot, double* vector) {
      const int position = what.resident[static_cast<std::size_t>(slot)];
      for (int head = 0; head < tensor.heads; ++head) {
        const std::span part{vector + product(head, tensor.dim), static_cast<std::size_t>(tensor.dim)};
        kernels_.widen_to_double(tensor.row(head, position), tensor.dtype, tensor.dim, part.data());
        if (to_slots != nullptr) to_slots->apply(slot - position, part);
      }
    };
    const bool same = some.pack(write_vector, held == asked);
    if (!some.holds_all()) return;
    if (same)
      some.enter_all();
    else
      some.compute_all(interruption());
    interruption().require_all_done();
    held_similarities_[number] = asked;
  };
  if (what.keys) {
    std::optional<BackwardRotation> to_slots;
    if (what.positions == Positions::cache) to_slots.emplace(layer.rope, what.resident.back() - (tokens - 1));
    add_similarities(layer.k, to_slots ? &*to_slots : nullptr);
  }
  if (what.values) add_similarities(layer.v, nullptr);

  std::vector<Redundancy> parts;
  for (Similarities& some : similarities) parts.emplace_back(kernels, some, shape);
  const std::int64_t joined = what.most_redundant ? -joined_excess : joined_excess;
  AlignedBuffer<std::int64_t> excesses;
  std::int64_t* excess = excesses.at_least(shape.stride);
  std::fill_n(excess, shape.stride, joined);
  std::fill_n(excess, tokens, 0);
  std::vector<int> members;
  std::vector<RedundancyStep> steps(parts.size());
  // Returns who would join next.
  const auto join = [&](int token) {
    for (std::size_t i = 0; i < parts.size(); ++i) steps[i] = parts[i].join(token, members, excess);
    excess[token] = joined;
    members.push_back(token);
    return kernels.redundancy_step(steps.data(), static_cast<int>(steps.size()), tokens, what.most_redundant, excess);
  };
  int next = 0;
  for (int token = 0; token < what.sinks; ++token) next = join(token);
  for (int token = tokens - what.recent; token < tokens; ++token) next = join(token);
  while (static_cast<int>(members.size()) < what.keep && !interruption().ended()) next = join(next);
  interruption().require_all_done();
  std::ranges::sort(members);
  return members;
}

std::size_t CpuBackend::redundancy_bytes(const LayerTensors& layer, int tokens) const {
  // Of keys and of values: vectors in float64; similarities; and the sines and cosines that turn keys back.
  const Shape shape(similarity_kernels_, tokens);
  const int dims = layer.k.heads * layer.k.dim + layer.v.heads * layer.v.dim;
  const std::size_t vectors = product(shape.tiles * similarity_kernels_.wide_columns, dims) * sizeof(double);
  const std::size_t turns = product(layer.k.tokens, 2) * layer.rope.inv_freq.size() * sizeof(double);
  return vectors + 2 * shape.held_bytes(similarity_bytes_ / 2) + turns;
}

}  // namespace kvreplay
