// The general comparison, plainly: two softmaxes written out in float64.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <numeric>
#include <utility>

#include "attention/rope.h"
#include "attention/row_sums.h"
#include "cpu/cpu_backend.h"

namespace kvreplay {
namespace {

// Rows that read each key once.
constexpr int rows_at_once = 48;
// Keys whose weighted values are summed before they join those of the keys before.
constexpr int chunk_keys = 256;

std::size_t at(int i) { return static_cast<std::size_t>(i); }
int rounded_up(int count, int step) { return (count + step - 1) / step * step; }

/// The kernels of the backend, and what a thread works in.
struct Worker {
  const TileKernels& tiles;
  const ComparisonKernels& sums;
  ThreadScratch& scratch;

  void widen(const TensorView& tensor, int head, int token, double* out) const {
    tiles.widen_to_double(tensor.row(head, token), tensor.dtype, tensor.dim, out);
  }
};

struct Row {
  int head = 0;
  int query = 0;
  QueryPlace place;
};

/// Numbers of rows at some columns, [groups, columns, lanes]. The rows of a group stand side by side, as many as a tile
/// of float64 is wide; the last group is padded.
struct LaneMatrix {
  LaneMatrix() = default;
  LaneMatrix(AlignedBuffer<double>& buffer, const TileKernels& tiles, int rows, int column_count)
      : lanes(tiles.wide_keys), groups((rows + lanes - 1) / lanes), columns(column_count) {
    numbers = buffer.at_least(product(groups * lanes, columns));
  }

  double* group(int g) const { return numbers + product(g * lanes, columns); }
  /// The numbers of a row are `lanes` apart.
  double* row(int r) const { return group(r / lanes) + r % lanes; }

  void fill(double number) const { std::fill_n(numbers, product(groups * lanes, columns), number); }
  void fill_column(int column, double number) const {
    for (int g = 0; g < groups; ++g) std::fill_n(group(g) + product(column, lanes), lanes, number);
  }

  int lanes = 0;
  int groups = 0;
  int columns = 0;
  double* numbers = nullptr;
};

/// Logits of a group -> exponentials, and for each row the sum that they are to be divided by; -infinity is a key that
/// does not take part, or no sink logit. There are as many rows as sink logits.
std::vector<double> exponentials(const ComparisonKernels& kernels, const double* logits, int columns, int lanes,
                                 std::span<const double> sinks, double* out) {
  std::vector<double> highest(at(lanes), -HUGE_VAL), sum(highest.size(), 1.0);
  kernels.raise_highest(logits, columns, highest.data());
  for (std::size_t lane = 0; lane < sinks.size(); ++lane)
    sum[lane] = sink_weight(sinks[lane] * std::numbers::log2e, highest[lane] * std::numbers::log2e);
  std::ranges::replace(highest, -HUGE_VAL, 0.0);  // of rows where nothing takes part
  kernels.exponentials(logits, columns, highest.data(), out, sum.data());
  return sum;
}

/// out(first, count, i, products): <row, key i> of `count` rows from `first` on; row_vector(r, at) and
/// key_vector(i, at) write vectors of `dim` numbers.
void for_products(const Worker& worker, int dim, int rows, int keys, const auto& row_vector, const auto& key_vector,
                  const auto& out) {
  const auto& [tiles, sums, scratch] = worker;
  const int lanes = tiles.wide_keys;
  double* packed_rows = scratch.wide_rows.at_least(product(rounded_up(rows, lanes), dim));
  double* vectors = scratch.sums.at_least(product(std::max(tiles.rows, lanes), dim));
  double* products = scratch.wide_products.at_least(product(tiles.rows, lanes));
  for (int first = 0; first < rows; first += lanes) {
    const int count = std::min(lanes, rows - first);
    for (int r = 0; r < count; ++r) row_vector(first + r, vectors + product(r, dim));
    tiles.wide_pack(vectors, count, dim, packed_rows + product(first, dim));
  }
  for (int begin = 0; begin < keys; begin += tiles.rows) {
    const int count = std::min(tiles.rows, keys - begin);
    for (int i = 0; i < count; ++i) key_vector(begin + i, vectors + product(i, dim));
    for (int first = 0; first < rows; first += lanes) {
      tiles.wide_products({vectors, dim, 1}, packed_rows + product(first, dim), dim, count, products);
      for (int i = 0; i < count; ++i)
        out(first, std::min(lanes, rows - first), begin + i, products + product(i, lanes));
    }
  }
}

/// <q, k> -> logit.
class Logit {
 public:
  explicit Logit(const LayerTensors& layer)
      : scale_(static_cast<double>(layer.softmax_scale)), cap_(static_cast<double>(layer.logit_softcap)) {}

  double operator()(double product) const {
    const double z = scale_ * product;
    return cap_ > 0.0 ? cap_ * std::tanh(z / cap_) : z;
  }
  void of_each(const double* products, int count, double* out) const {
    if (cap_ > 0.0)
      std::transform(products, products + count, out, *this);
    else
      for (int i = 0; i < count; ++i) out[i] = scale_ * products[i];
  }

 private:
  double scale_;
  double cap_;
};

/// Σ over columns of weights * values -> [rows, dim]; value(number, at) writes the value of the column with a number.
/// Numbers ascend.
LaneMatrix weighted_sums(const Worker& worker, const LaneMatrix& weights, std::span<const std::int32_t> numbers,
                         int dim, AlignedBuffer<double>& buffer, const auto& value) {
  const auto& [tiles, sums, scratch] = worker;
  const int lanes = weights.lanes;
  const LaneMatrix outputs(buffer, tiles, weights.groups * lanes, dim);
  outputs.fill(0.0);
  double* values = scratch.wide_keys.at_least(product(chunk_keys, dim) + at(tiles.rows));  // [chunk_keys, dim]
  double* products = scratch.wide_products.at_least(product(tiles.rows, lanes));
  for (std::size_t begin = 0, end = 0; begin < numbers.size(); begin = end) {
    for (; end < numbers.size() && numbers[end] / chunk_keys == numbers[begin] / chunk_keys; ++end)
      value(numbers[end], values + (end - begin) * at(dim));
    for (int group = 0; group < weights.groups; ++group) {
      for (int c = 0; c < dim; c += tiles.rows) {
        const int count = std::min(tiles.rows, dim - c);
        tiles.wide_products({values + c, 1, dim}, weights.group(group) + begin * at(lanes),
                            static_cast<int>(end - begin), count, products);
        double* out = outputs.group(group) + product(c, lanes);
        for (std::size_t i = 0; i < product(count, lanes); ++i) out[i] += products[i];
      }
    }
  }
  return outputs;
}

/// Keys that are columns of a matrix, as numbers from the block's first key on.
struct Columns {
  Columns() = default;
  Columns(std::vector<std::int32_t> ascending, int first_key, int boundary) : numbers(std::move(ascending)) {
    prompt = below(boundary - first_key);
    sinks = std::min(prompt, below(sink_tokens - first_key));
  }

  int count() const { return static_cast<int>(numbers.size()); }
  int below(int number) const { return static_cast<int>(std::ranges::lower_bound(numbers, number) - numbers.begin()); }
  StoredColumns stored() const { return {numbers.data(), count(), sinks, prompt}; }

  std::vector<std::int32_t> numbers;
  int sinks = 0;   // of the first tokens, below the boundary
  int prompt = 0;  // below the boundary
};

/// Alignment sums of the rows of a group.
struct GroupSums {
  explicit GroupSums(int lanes) : dot(at(lanes)), square(at(lanes)) {}

  AlignmentSums sums() { return {dot.data(), square.data()}; }
  void store(Alignment Comparison::* part, std::span<Comparison> rows) const {
    for (std::size_t row = 0; row < rows.size(); ++row) {
      (rows[row].*part).dot = dot[row];
      (rows[row].*part).stored_square = square[row];
    }
  }

  std::vector<double> dot, square;
};

/// Rows of one KV head, and their full attention to keys [first_key, end_key).
class Block {
 public:
  Block(const Worker& with, const LayerTensors& of_layer, std::span<const QueryPlace> places, int of_head,
        int first_query, int end_query)
      : worker(with), layer(of_layer), kv_head(of_head), queries(end_query - first_query) {
    const int group = layer.group();
    first_key = std::numeric_limits<int>::max();
    first_end = first_key;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int query = first_query; query < end_query; ++query) {
        const QueryPlace& place = places[at(query)];
        rows.push_back({head, query, place});
        first_key = std::min(first_key, place.first);
        end_key = std::max(end_key, place.end);
        last_first = std::max(last_first, place.first);
        first_end = std::min(first_end, place.end);
      }
    }
    full.resize(rows.size());
  }

  int row_count() const { return static_cast<int>(rows.size()); }
  int width() const { return end_key - first_key; }
  bool sees(int row, int key) const { return key >= rows[at(row)].place.first && key < rows[at(row)].place.end; }
  bool all_see(int key) const { return key >= last_first && key < first_end; }

  /// Logits, weights and outputs, and the sums of them alone.
  void attend(int boundary) {
    std::vector<std::int32_t> numbers(at(width()));
    std::iota(numbers.begin(), numbers.end(), 0);
    const Columns columns(std::move(numbers), first_key, boundary);
    logits = LaneMatrix(worker.scratch.full_logits, worker.tiles, row_count(), width());
    for (int i = 0; i < width(); ++i)
      if (!all_see(first_key + i)) logits.fill_column(i, -HUGE_VAL);
    for_products(
        worker, layer.q.dim, row_count(), width(),
        [&](int row, double* out) { worker.widen(layer.q, rows[at(row)].head, rows[at(row)].place.stored, out); },
        [&](int i, double* out) { worker.widen(layer.k, kv_head, first_key + i, out); },
        [&, logit = Logit(layer)](int first, int count, int i, const double* products) {
          double* out = logits.row(first) + product(i, logits.lanes);
          if (all_see(first_key + i)) return logit.of_each(products, logits.lanes, out);
          for (int r = 0; r < count; ++r)
            if (sees(first + r, first_key + i)) out[r] = logit(products[r]);
        });
    weights = LaneMatrix(worker.scratch.full_weights, worker.tiles, row_count(), width());
    compare_weights(columns, logits, weights, full);
    compare_logits(columns, logits, full);
    for (Comparison& row : full) {
      for (Alignment* part : {&row.all, &row.prompt, &row.nosink, &row.logits}) part->full_square = part->stored_square;
      if (!layer.sinks.empty()) row.full_mass = row.mass;
    }
    outputs = weighted_sums(worker, weights, columns.numbers, layer.v.dim, worker.scratch.full_outputs,
                            [&](int i, double* out) { worker.widen(layer.v, kv_head, first_key + i, out); });
  }

  void compare_logits(const Columns& columns, const LaneMatrix& stored, std::span<Comparison> compared) const {
    for (int group = 0; group < logits.groups; ++group) {
      GroupSums sums(logits.lanes);
      std::vector<double> mass(at(logits.lanes));
      worker.sums.compare_logits(logits.group(group), weights.group(group), columns.stored(), stored.group(group),
                                 sums.sums(), mass.data());
      const std::span<Comparison> of_rows = rows_of_group(compared, group);
      sums.store(&Comparison::logits, of_rows);
      for (std::size_t row = 0; row < of_rows.size(); ++row) of_rows[row].mass = mass[row];
    }
  }

  /// Writes the weights of these logits to `out`, which may be the same matrix, and compares them with the full
  /// attention.
  void compare_weights(const Columns& columns, const LaneMatrix& of_columns, const LaneMatrix& out,
                       std::span<Comparison> compared) const {
    std::vector<double> sinks;
    for (const Row& row : rows) sinks.push_back(layer.sink(row.head));
    for (int group = 0; group < out.groups; ++group) {
      const std::vector<double> sum = exponentials(worker.sums, of_columns.group(group), columns.count(), out.lanes,
                                                   rows_of_group(std::span(sinks), group), out.group(group));
      GroupSums nosink(out.lanes), prompt(out.lanes), all(out.lanes);
      std::vector<double> distance(at(out.lanes));
      worker.sums.compare_weights(weights.group(group), width(), columns.stored(), out.group(group), sum.data(),
                                  {nosink.sums(), prompt.sums(), all.sums(), distance.data()});
      const std::span<Comparison> of_rows = rows_of_group(compared, group);
      nosink.store(&Comparison::nosink, of_rows);
      prompt.store(&Comparison::prompt, of_rows);
      all.store(&Comparison::all, of_rows);
      for (std::size_t row = 0; row < of_rows.size(); ++row) of_rows[row].l1 = distance[row];
    }
  }

  const Worker& worker;
  const LayerTensors& layer;
  int kv_head;
  int queries;  // of each query head
  int first_key = 0;
  int end_key = 0;
  int last_first = 0, first_end = 0;  // all rows see the keys [last_first, first_end)
  std::vector<Row> rows;              // query heads, the queries of each
  LaneMatrix logits, weights;         // of all keys
  LaneMatrix outputs;                 // a column for each number of a value
  std::vector<Comparison> full;       // of each row with itself

 private:
  template <class T>
  std::span<T> rows_of_group(std::span<T> of_rows, int group) const {
    const std::size_t first = product(group, worker.tiles.wide_keys);
    return of_rows.subspan(first, std::min(at(worker.tiles.wide_keys), of_rows.size() - first));
  }
};

/// No key of a set moves by more than the number of those that went.
int farthest_move(std::span<const ChangedSet> sets) {
  int farthest = 0;
  for (const ChangedSet& set : sets) {
    if (set.positions != Positions::cache) continue;
    for (const KeptSet& kept : set.kept)
      for (int row = 0; row < kept.rows(); ++row) farthest = std::max(farthest, kept.tokens() - kept.count(row));
  }
  return farthest;
}

/// A set's attention in a block.
class ChangedBlock {
 public:
  ChangedBlock(const BackwardRotation& rotation, const ChangedSet& changed, const Block& block, int boundary)
      : worker_(block.worker), rotation_(rotation), changed_(changed), block_(block) {
    words_ = (block.end_key + 63) / 64;
    std::vector<std::uint64_t> by_some(at(words_)), by_all(at(words_), ~std::uint64_t{0});
    for (const Row& row : block.rows) {
      const KeptSet& kept = changed.kept[changed.kept.size() == 1 ? 0 : at(row.query)];
      sets_.push_back({&kept, kept.row_of(row.head, block.layer.group())});
      const std::span<const std::uint64_t> bits = kept.row_bits(sets_.back().row);
      for (int word = 0; word < words_; ++word) {
        const std::uint64_t read = held_keys(at(word) < bits.size() ? bits[at(word)] : 0, 64 * word, kept.tokens(),
                                             row.place.own, row.place.first, row.place.end);
        read_.push_back(read);
        by_some[at(word)] |= read;
        by_all[at(word)] &= read;
      }
    }
    std::vector<std::int32_t> numbers;
    for_bits(by_some, [&](int key) {
      numbers.push_back(key - block.first_key);
      shared_.push_back((by_all[at(key / 64)] >> (key % 64) & 1) != 0);
    });
    columns_ = Columns(std::move(numbers), block.first_key, boundary);
    weights_ = LaneMatrix(worker_.scratch.set_weights, worker_.tiles, block.row_count(), columns_.count());
    for (int column = 0; column < columns_.count(); ++column)
      if (!shared_[at(column)]) weights_.fill_column(column, -HUGE_VAL);
  }

  std::vector<Comparison> compare() {
    if (!moves() && changed_.stored.k.data == block_.layer.k.data) {
      copy_logits();
    } else {
      compute_logits();
    }
    std::vector<Comparison> compared = block_.full;
    block_.compare_logits(columns_, weights_, compared);
    if (changed_.weights != nullptr) weigh_tokens();
    block_.compare_weights(columns_, weights_, weights_, compared);
    return compared;
  }

  /// A column for each number of a value, after compare().
  LaneMatrix outputs() const {
    if (changed_.values != nullptr) return evolving_outputs();
    return weighted_sums(
        worker_, weights_, columns_.numbers, dim(), worker_.scratch.set_outputs,
        [&](int i, double* out) { worker_.widen(changed_.stored.v, block_.kv_head, block_.first_key + i, out); });
  }

 private:
  struct RowOfSet {
    const KeptSet* set;
    int row;
    bool operator==(const RowOfSet&) const = default;
    bool keeps(int key) const { return key >= set->tokens() || set->keeps(row, key); }
  };

  bool moves() const { return changed_.positions == Positions::cache; }  // resident keys up to their slots
  int dim() const { return block_.layer.v.dim; }
  int key_of(int column) const { return block_.first_key + columns_.numbers[at(column)]; }
  /// [words_] of the keys that a row sees and holds.
  std::span<const std::uint64_t> read_by(int row) const {
    return std::span(read_).subspan(product(row, words_), at(words_));
  }
  bool reads(int row, int key) const { return (read_by(row)[at(key / 64)] >> (key % 64) & 1) != 0; }

  void copy_logits() {
    const auto lanes = at(weights_.lanes);
    std::vector<std::size_t> column_of(at(block_.width()));
    for (std::size_t column = 0; column < shared_.size(); ++column) {
      const std::size_t number = at(columns_.numbers[column]);
      column_of[number] = column;
      for (int group = 0; shared_[column] && group < weights_.groups; ++group)
        std::copy_n(block_.logits.group(group) + number * lanes, lanes, weights_.group(group) + column * lanes);
    }
    for (int row = 0; row < block_.row_count(); ++row) {
      const double* full = block_.logits.row(row);
      double* out = weights_.row(row);
      for_bits(read_by(row), [&](int key) {
        const std::size_t number = at(key - block_.first_key), column = column_of[number];
        if (!shared_[column]) out[column * lanes] = full[number * lanes];
      });
    }
  }

  /// Rows that read the same keys at the same places: all, unless keys move as a set says.
  std::vector<std::vector<int>> rows_of_same_places() const {
    std::vector<std::vector<int>> groups;
    for (int row = 0; row < block_.row_count(); ++row) {
      const auto same = std::ranges::find_if(
          groups, [&](const std::vector<int>& some) { return !moves() || sets_[at(some.front())] == sets_[at(row)]; });
      if (same == groups.end()) {
        groups.push_back({row});
      } else {
        same->push_back(row);
      }
    }
    return groups;
  }

  void compute_logits() {
    const LayerTensors& layer = block_.layer;
    const TensorView& stored_keys = changed_.stored.k;
    std::vector<double*> logits;  // of each row
    for (int row = 0; row < block_.row_count(); ++row) logits.push_back(weights_.row(row));
    std::vector<int> columns;                    // that some row reads
    std::vector<int> moved(at(block_.end_key));  // by how much each is nearer the beginning, negative
    for (const std::vector<int>& members : rows_of_same_places()) {
      const bool of_all = std::ssize(members) == block_.row_count();  // in their order
      int slot = 0;
      for (int key = 0; moves() && key < block_.end_key; ++key) {
        moved[at(key)] = slot - key;
        if (sets_[at(members.front())].keeps(key)) ++slot;
      }
      columns.clear();
      for (int column = 0; column < columns_.count(); ++column)
        if (shared_[at(column)] || std::ranges::any_of(members, [&](int row) { return reads(row, key_of(column)); }))
          columns.push_back(column);
      for_products(
          worker_, layer.q.dim, static_cast<int>(members.size()), static_cast<int>(columns.size()),
          [&](int member, double* out) {
            const Row& row = block_.rows[at(members[at(member)])];
            worker_.widen(layer.q, row.head, row.place.stored, out);
            rotation_.apply(moved[at(row.place.own)], {out, at(layer.q.dim)});
          },
          [&](int i, double* out) {
            const int key = key_of(columns[at(i)]);
            worker_.widen(stored_keys, block_.kv_head, key, out);
            rotation_.apply(moved[at(key)], {out, at(stored_keys.dim)});
          },
          [&, logit = Logit(layer)](int first, int count, int i, const double* products) {
            const int column = columns[at(i)];
            const bool shared = shared_[at(column)];
            if (shared && of_all)
              return logit.of_each(products, weights_.lanes, weights_.row(first) + product(column, weights_.lanes));
            for (int r = 0; r < count; ++r) {
              const int row = members[at(first + r)];
              if (shared || reads(row, key_of(column)))
                logits[at(row)][product(column, weights_.lanes)] = logit(products[r]);
            }
          });
    }
  }

  void weigh_tokens() {
    std::vector<double> logits;
    for (int row = 0; row < block_.row_count(); ++row) {
      const auto& [head, query, place] = block_.rows[at(row)];
      const int begin = columns_.below(place.first - block_.first_key),
                end = columns_.below(place.end - block_.first_key);
      double* of_row = weights_.row(row);
      logits.assign(at(place.end - place.first), -HUGE_VAL);
      const auto place_of = [&](int column) -> double& { return logits[at(key_of(column) - place.first)]; };
      for (int column = begin; column < end; ++column) place_of(column) = of_row[product(column, weights_.lanes)];
      (*changed_.weights)(head, place.own, place.first, logits);
      for (int column = begin; column < end; ++column) of_row[product(column, weights_.lanes)] = place_of(column);
    }
  }

  LaneMatrix evolving_outputs() const {
    const int heads = block_.row_count() / block_.queries;
    const EvolvingValues::Reader values_before = changed_.values->of_head(block_.kv_head);
    const LaneMatrix outputs(worker_.scratch.set_outputs, worker_.tiles, block_.row_count(), dim());
    for (int query = 0; query < block_.queries; ++query) {
      const QueryPlace& place = block_.rows[at(query)].place;
      const int begin = columns_.below(place.first - block_.first_key),
                end = columns_.below(place.end - block_.first_key);
      const std::span<const float> values = values_before(place.own);
      std::vector<std::int32_t> numbers;  // from the first key that the query sees on
      for (int column = begin; column < end; ++column) numbers.push_back(key_of(column) - place.first);
      const LaneMatrix weights(worker_.scratch.query_weights, worker_.tiles, heads, end - begin);
      weights.fill(0.0);
      for (int head = 0; head < heads; ++head)
        copy_row(weights_.row(head * block_.queries + query) + product(begin, weights.lanes), weights, head);
      const LaneMatrix of_query =
          weighted_sums(worker_, weights, numbers, dim(), worker_.scratch.query_outputs, [&](int i, double* out) {
            std::ranges::copy(values.subspan(product(place.first + i, dim()), at(dim())), out);
          });
      for (int head = 0; head < heads; ++head) copy_row(of_query.row(head), outputs, head * block_.queries + query);
    }
    return outputs;
  }

  /// From a row of another matrix with as many lanes.
  static void copy_row(const double* from, const LaneMatrix& to, int row) {
    double* out = to.row(row);
    for (int column = 0; column < to.columns; ++column)
      out[product(column, to.lanes)] = from[product(column, to.lanes)];
  }

  const Worker& worker_;
  const BackwardRotation& rotation_;
  const ChangedSet& changed_;
  const Block& block_;
  std::vector<RowOfSet> sets_;       // of each row
  int words_ = 0;                    // of 64 keys each, from key 0 on
  std::vector<std::uint64_t> read_;  // [rows, words] keys that a row reads
  Columns columns_;                  // that some row reads
  std::vector<bool> shared_;         // columns that all rows read
  LaneMatrix weights_;               // logits, then weights
};

/// Adds the comparison of one row's outputs, `dim` numbers each, `lanes` apart; writes them where `vectors` is there.
void compare_outputs(const double* full, const double* kept, int dim, int lanes, Comparison& comparison,
                     OutputVectors& vectors, std::size_t cell) {
  for (int c = 0; c < dim; ++c, full += lanes, kept += lanes) {
    if (!vectors.full.empty()) {
      vectors.full[cell * at(dim) + at(c)] = static_cast<float>(*full);
      vectors.errors[cell * at(dim) + at(c)] = static_cast<float>(*kept - *full);
    }
    comparison.output_full_square += *full * *full;
    comparison.output_square += *kept * *kept;
    comparison.output_dot += *full * *kept;
    comparison.error_square += (*full - *kept) * (*full - *kept);
  }
}

}  // namespace

std::vector<ComparedSet> CpuBackend::compare_sets(const LayerTensors& layer, std::span<const ChangedSet> sets,
                                                  std::span<const std::int32_t> queries, int boundary, bool vectors) {
  const int query_count = static_cast<int>(queries.size());
  const auto dim = at(layer.v.dim);
  std::vector<ComparedSet> result(sets.size());
  for (std::size_t i = 0; i < sets.size(); ++i) {
    assert(sets[i].kept.size() == 1 || sets[i].kept.size() == queries.size());
    result[i].comparisons.resize(product(layer.q.heads, query_count));
    if (!vectors) continue;
    result[i].outputs.full.assign(result[i].comparisons.size() * dim, 0.0F);
    result[i].outputs.errors = result[i].outputs.full;
  }
  if (query_count == 0 || sets.empty()) return result;
  const std::vector<QueryPlace> places = query_places(layer, queries, {.count = queries.back() + 1});
  const BackwardRotation rotation(layer.rope, farthest_move(sets));
  const int queries_at_once = std::max(1, rows_at_once / layer.group());
  const int blocks = (query_count + queries_at_once - 1) / queries_at_once;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
  for (int kv_head = 0; kv_head < layer.k.heads; ++kv_head) {
    for (int number = 0; number < blocks; ++number) {
      if (interruption().ended()) continue;
      const Worker worker{kernels_, comparison_kernels_, scratch()};
      const int first_query = number * queries_at_once;
      Block block(worker, layer, places, kv_head, first_query, std::min(first_query + queries_at_once, query_count));
      block.attend(boundary);
      for (std::size_t i = 0; i < sets.size() && !interruption().ended(); ++i) {
        ChangedBlock changed(rotation, sets[i], block, boundary);
        std::vector<Comparison> compared = changed.compare();
        const LaneMatrix outputs = changed.outputs();
        for (int row = 0; row < block.row_count(); ++row) {
          const std::size_t cell = product(block.rows[at(row)].head, query_count) + at(block.rows[at(row)].query);
          compare_outputs(block.outputs.row(row), outputs.row(row), layer.v.dim, outputs.lanes, compared[at(row)],
                          result[i].outputs, cell);
          result[i].comparisons[cell] = compared[at(row)];
        }
      }
    }
  }
  interruption().require_all_done();
  return result;
}

}  // namespace kvreplay
