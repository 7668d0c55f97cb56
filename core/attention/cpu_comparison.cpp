// The general comparison, plainly: two softmaxes written out in float64.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "attention/cpu_backend.h"
#include "attention/rope.h"

namespace kvreplay {
namespace {

// Rows that read each key once.
constexpr int rows_at_once = 32;

double dot(std::span<const float> a, std::span<const float> b) {
  double sums[8] = {};
  for (std::size_t c = 0; c < a.size(); ++c) sums[c % 8] += static_cast<double>(a[c]) * static_cast<double>(b[c]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// Logits -> weights in place; -infinity is a key that does not take part.
void softmax(std::span<double> row) {
  const double highest = *std::max_element(row.begin(), row.end());
  double sum = 0.0;
  for (double& x : row) sum += x = std::exp(x - highest);
  for (double& x : row) x /= sum;
}

}  // namespace

std::vector<Comparison> CpuBackend::compare_attention(const LayerTensors& layer, const LayerTensors& stored,
                                                      Positions positions, std::span<const std::int32_t> queries,
                                                      int boundary, const KeptSet& set) {
  const int query_count = static_cast<int>(queries.size());
  const int group = layer.group();
  const auto dim = static_cast<std::size_t>(layer.q.dim);
  std::vector<Comparison> result(static_cast<std::size_t>(layer.q.heads) * static_cast<std::size_t>(query_count));
  if (query_count == 0) return result;
  const std::vector<QueryPlace> places = query_places(layer, queries, {.count = queries.back() + 1});

  // slots[row][key]: how many kept tokens stand before the key.
  std::vector<std::vector<std::int32_t>> slots(static_cast<std::size_t>(set.rows()));
  for (int row = 0; row < set.rows(); ++row) {
    int slot = 0;
    for (int key = 0; key <= queries.back(); ++key) {
      slots[static_cast<std::size_t>(row)].push_back(slot);
      if (key >= boundary || set.keeps(row, key)) ++slot;
    }
  }
  const auto moved = [&](int set_row, int key) {
    return positions == Positions::cache ? slots[static_cast<std::size_t>(set_row)][static_cast<std::size_t>(key)] - key
                                         : 0;
  };
  const double scale = static_cast<double>(layer.softmax_scale);
  const double cap = static_cast<double>(layer.logit_softcap);
  const auto logit = [&](std::span<const float> query, std::span<const float> key) {
    const double z = scale * dot(query, key);
    return cap > 0.0 ? cap * std::tanh(z / cap) : z;
  };

  const auto compare_block = [&](int kv_head, int first_query, int end_query) {
    struct Row {
      int head, query, set_row;
      QueryPlace place;
      std::vector<float> vector, moved_vector;
      std::vector<double> full, kept;
      // Eigen's own memory is aligned, so its reductions take the same order every time.
      Eigen::VectorXd full_output, output;
    };
    std::vector<Row> rows;
    int end_key = 0;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int query = first_query; query < end_query; ++query) {
        Row row{head, query, set.row_of(head, group), places[static_cast<std::size_t>(query)], {}, {}, {}, {}, {}, {}};
        row.vector.resize(dim);
        kernels_.widen(layer.q.row(head, row.place.stored), layer.q.dtype, layer.q.dim, row.vector.data());
        row.moved_vector = row.vector;
        rotate(layer.rope, moved(row.set_row, row.place.own), row.moved_vector);
        row.full.assign(static_cast<std::size_t>(row.place.end), -HUGE_VAL);
        row.kept = row.full;
        row.full_output = row.output = Eigen::VectorXd::Zero(layer.v.dim);
        end_key = std::max(end_key, row.place.end);
        rows.push_back(std::move(row));
      }
    }

    std::vector<float> key_vector(dim), stored_vector(dim), moved_vector(dim);
    for (int key = 0; key < end_key; ++key) {
      const auto at = static_cast<std::size_t>(key);
      kernels_.widen(layer.k.row(kv_head, key), layer.k.dtype, layer.k.dim, key_vector.data());
      kernels_.widen(stored.k.row(kv_head, key), stored.k.dtype, stored.k.dim, stored_vector.data());
      int moved_for = -1;
      for (Row& row : rows) {
        if (key < row.place.first || key >= row.place.end) continue;
        row.full[at] = logit(row.vector, key_vector);
        if (key < boundary && key != row.place.own && !set.keeps(row.set_row, key)) continue;
        if (moved_for != row.set_row) {
          moved_vector = stored_vector;
          rotate(layer.rope, moved(row.set_row, key), moved_vector);
          moved_for = row.set_row;
        }
        row.kept[at] = logit(row.moved_vector, moved_vector);
      }
    }
    for (Row& row : rows) {
      softmax(row.full);
      softmax(row.kept);
    }

    Eigen::VectorXf value(layer.v.dim), stored_value(layer.v.dim);
    for (int key = 0; key < end_key; ++key) {
      const auto at = static_cast<std::size_t>(key);
      kernels_.widen(layer.v.row(kv_head, key), layer.v.dtype, layer.v.dim, value.data());
      kernels_.widen(stored.v.row(kv_head, key), stored.v.dtype, stored.v.dim, stored_value.data());
      for (Row& row : rows) {
        if (key < row.place.first || key >= row.place.end) continue;
        row.full_output += row.full[at] * value.cast<double>();
        row.output += row.kept[at] * stored_value.cast<double>();
      }
    }

    for (const Row& row : rows) {
      Comparison comparison;
      for (int key = row.place.first; key < row.place.end; ++key) {
        const double a = row.full[static_cast<std::size_t>(key)];
        const double kept = row.kept[static_cast<std::size_t>(key)];
        comparison.dot += a * kept;
        comparison.full_square += a * a;
        comparison.stored_square += kept * kept;
        comparison.l1 += std::abs(a - kept);
        if (key >= boundary || key == row.place.own || set.keeps(row.set_row, key)) comparison.mass += a;
      }
      comparison.output_full_square = row.full_output.squaredNorm();
      comparison.output_square = row.output.squaredNorm();
      comparison.output_dot = row.full_output.dot(row.output);
      comparison.error_square = (row.full_output - row.output).squaredNorm();
      result[static_cast<std::size_t>(row.head) * static_cast<std::size_t>(query_count) +
             static_cast<std::size_t>(row.query)] = comparison;
    }
  };

  const int queries_at_once = std::max(1, rows_at_once / group);
  const int blocks = (query_count + queries_at_once - 1) / queries_at_once;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads_)
  for (int kv_head = 0; kv_head < layer.k.heads; ++kv_head) {
    for (int block = 0; block < blocks; ++block) {
      compare_block(kv_head, block * queries_at_once, std::min((block + 1) * queries_at_once, query_count));
    }
  }
  return result;
}

}  // namespace kvreplay
