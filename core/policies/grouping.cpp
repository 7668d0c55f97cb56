#include "policies/grouping.h"

#include <algorithm>

namespace kvreplay {
namespace {

constexpr Choice<Heads> heads_words[] = {{"kv", Heads::kv}, {"query", Heads::query}, {"layer", Heads::layer}};
constexpr Choice<Aggregate> aggregate_words[] = {
    {"mean", Aggregate::mean}, {"sum", Aggregate::sum}, {"max", Aggregate::max}};

void reduce(const Matrix& in, int first, int count, Aggregate how, std::span<double> out) {
  std::ranges::copy(in.row(first), out.begin());
  for (int h = first + 1; h < first + count; ++h) {
    const std::span<const double> row = in.row(h);
    for (std::size_t j = 0; j < out.size(); ++j)
      out[j] = how == Aggregate::max ? std::max(out[j], row[j]) : out[j] + row[j];
  }
  if (how == Aggregate::mean)
    for (double& value : out) value /= count;
}

}  // namespace

Matrix sum_over_rows(const Matrix& rows) {
  Matrix layer(1, rows.columns());
  reduce(rows, 0, rows.rows(), Aggregate::sum, layer.row(0));
  return layer;
}

void add_heads(Parameters& p, Heads& heads) {
  p.add<Heads>("heads", heads, heads_words, "granularity: a kept set per KV head, per query head, or per layer");
}

void Grouping::parameters(Parameters& p) {
  add_heads(p, heads);
  p.add<Aggregate>("agg", aggregate, aggregate_words, "how the query heads of a group are combined (heads=kv)");
}

Matrix Grouping::operator()(const Matrix& per_query_head, int group) const {
  if (heads == Heads::query) return per_query_head;
  if (heads == Heads::layer) return sum_over_rows(per_query_head);
  Matrix grouped(per_query_head.rows() / group, per_query_head.columns());
  for (int row = 0; row < grouped.rows(); ++row)
    reduce(per_query_head, row * group, group, aggregate, grouped.row(row));
  return grouped;
}

}  // namespace kvreplay
