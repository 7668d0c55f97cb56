#include "view.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>

#include "attention/softmax_keys.h"
#include "error.h"
#include "float_types.h"
#include "interpreter_lock.h"

namespace kvreplay::python {
namespace {

namespace nb = nanobind;

using Positions32 = std::vector<std::int32_t>;

/// float32 [heads, n, d] of the tokens that are resident.
Array<float> resident(const View& view, const TensorView& tensor) {
  const auto tokens = static_cast<std::size_t>(view->tokens()), dim = static_cast<std::size_t>(tensor.dim);
  std::vector<float> numbers(static_cast<std::size_t>(tensor.heads) * tokens * dim);
  auto next = numbers.begin();
  for (int head = 0; head < tensor.heads; ++head)
    for (const std::int32_t position : view->positions(head).numbers())
      for (std::size_t i = 0; i < dim; ++i) *next++ = load(tensor.row(head, position), tensor.dtype, i);
  return as_array(std::move(numbers), {static_cast<std::size_t>(tensor.heads), tokens, dim});
}

/// float32 [Hq, last, d] of the last queries that have come.
Array<float> last_queries(const View& view, int last) {
  const TensorView& queries = view->tensors().q;
  const int seen = view->residents().seen;
  if (last < 1 || last > seen)
    throw Error{Refusal::usage, "queries", "how many of the last", "1.." + std::to_string(seen), std::to_string(last)};
  const auto dim = static_cast<std::size_t>(queries.dim);
  std::vector<float> numbers(static_cast<std::size_t>(queries.heads) * static_cast<std::size_t>(last) * dim);
  auto next = numbers.begin();
  for (int head = 0; head < queries.heads; ++head)
    for (int position = seen - last; position < seen; ++position) {
      const int row = stored_query(view->tensors(), position);
      for (std::size_t i = 0; i < dim; ++i) *next++ = load(queries.row(head, row), queries.dtype, i);
    }
  return as_array(std::move(numbers), {static_cast<std::size_t>(queries.heads), static_cast<std::size_t>(last), dim});
}

/// What an observable may be asked.
void check(int window) {
  if (window < 1) throw Error{Refusal::usage, "window_attention", "window", "1 or more", std::to_string(window)};
}
void check(double p) {
  if (!(p > 0 && std::isfinite(p))) throw Error{Refusal::usage, "norms", "p", "more than 0", std::to_string(p)};
}

auto property(int (LayerView::*get)() const) {
  return [get](const View& view) { return ((*view).*get)(); };
}

/// What `compute` gives, without the interpreter's lock, while nobody else measures the layer.
template <class Compute>
decltype(auto) measured(const View& view, Compute compute) {
  const Unlocked unlocked;
  const std::scoped_lock alone(view.lock());
  return compute();
}

template <class... Arguments>
auto observable(const Matrix& (LayerView::*compute)(Arguments...) const) {
  return [compute](const View& view, Arguments... arguments) {
    (check(arguments), ...);
    const LayerView& layer = *view;
    return as_array(measured(view, [&]() -> const Matrix& { return (layer.*compute)(arguments...); }));
  };
}

std::pair<Array<double>, Array<double>> query_moments(const View& view, int first) {
  const LayerView& layer = *view;
  const int seen = layer.residents().seen;
  if (first < 0 || first >= seen)
    throw Error{Refusal::usage, "query_moments", "first", "0.." + std::to_string(seen - 1), std::to_string(first)};
  const VectorMoments& found = measured(view, [&]() -> const VectorMoments& { return layer.query_moments(first); });
  const auto heads = static_cast<std::size_t>(layer.query_heads());
  const auto dim = static_cast<std::size_t>(found.mean.columns());
  const std::span<const double> covariance = found.covariance.values();
  return {as_array(found.mean), as_array(std::vector<double>(covariance.begin(), covariance.end()), {heads, dim, dim})};
}

Array<double> attention_of(const View& view, const Positions32& queries, const std::vector<double>& weights) {
  const LayerView& layer = *view;
  const auto refuse = [](const char* what, std::string expected, std::string found) {
    throw Error{Refusal::usage, "attention_of", what, std::move(expected), std::move(found)};
  };
  if (!weights.empty() && weights.size() != queries.size())
    refuse("weights", std::to_string(queries.size()), std::to_string(weights.size()));
  const int tokens = layer.tensors().k.tokens;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const std::int32_t query = queries[i];
    if (query < 0 || query >= tokens) refuse("query", "0.." + std::to_string(tokens - 1), std::to_string(query));
    if (i > 0 && query <= queries[i - 1]) refuse("queries", "ascending positions", std::to_string(query));
    for (int head = 0; head < layer.kv_heads(); ++head)
      if (std::ranges::count(layer.positions(head).numbers(), query) > 0)
        refuse("query", "a token that is not resident", std::to_string(query));
  }
  return as_array(measured(view, [&] { return layer.attention_of(queries, weights); }));
}

}  // namespace

const LayerView& View::operator*() const {
  if (view_ == nullptr)
    throw Error{Refusal::usage, "view", "its layer is closed", "a view that is read inside the call that received it"};
  return *view_;
}

void bind_view(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<View>(module, "View",
                   "One layer as a policy sees it: its n resident tokens, and observables of them. Each observable is\n"
                   "computed once and shared by all policies. Hq query heads, Hkv KV heads, P prompt tokens.")
      .def_prop_ro("layer", property(&LayerView::layer), "number among the treated layers")
      .def_prop_ro("layers", property(&LayerView::layers), "treated layers")
      .def_prop_ro("stored_layer", property(&LayerView::stored_layer), "number among the layers of the trace")
      .def_prop_ro("prompt", property(&LayerView::prompt), "P: tokens under compression")
      .def_prop_ro(
          "question", [](const View& view) { return view->question().begin; },
          "position of the first token of the question at the end of the prompt; -1: no question is marked")
      .def_prop_ro(
          "question_end", [](const View& view) { return view->question().end; },
          "position behind the last token of the question; -1: no question is marked")
      .def_prop_ro("tokens", property(&LayerView::tokens), "n: resident tokens")
      .def_prop_ro(
          "seen", [](const View& view) { return view->residents().seen; }, "number of tokens so far")
      .def_prop_ro("query_heads", property(&LayerView::query_heads), "Hq")
      .def_prop_ro("kv_heads", property(&LayerView::kv_heads), "Hkv")
      .def_prop_ro(
          "head_dim", [](const View& view) { return view->tensors().k.dim; }, "d")
      .def_prop_ro("group", property(&LayerView::group), "query heads for each KV head")
      .def(
          "positions",
          [](const View& view, int row) {
            if (row < 0 || row >= view->kv_heads())
              throw Error{Refusal::usage, "positions", "row", "0.." + std::to_string(view->kv_heads() - 1),
                          std::to_string(row)};
            const auto found = view->positions(row).numbers();
            return as_array(Positions32(found.begin(), found.end()), {found.size()});
          },
          "row"_a = 0, "int32 [n]: positions of the resident tokens of a KV head")
      .def(
          "keys", [](const View& view) { return resident(view, view->tensors().k); },
          "float32 [Hkv, n, d]: keys of the resident tokens, after RoPE")
      .def(
          "values", [](const View& view) { return resident(view, view->tensors().v); },
          "float32 [Hkv, n, d]: values of the resident tokens")
      .def("queries", last_queries, "last"_a, "float32 [Hq, last, d]: the newest `last` queries, after RoPE")
      .def("window_attention", observable(&LayerView::window_attention), "window"_a, "end"_a = LayerView::newest,
           "float64 [Hq, n]: attention of the newest `window` queries to each token, summed over them; with `end`\n"
           "the last `window` queries before this position")
      .def("cumulative_attention", observable(&LayerView::cumulative_attention),
           "float64 [Hq, n]: attention of all queries so far, summed (H2O: arXiv:2306.14048, eq. 2)")
      .def("eval_attention", observable(&LayerView::eval_attention),
           "float64 [Hq, P]: attention of the eval queries, which are unknown to a real policy: for oracles")
      .def(
          "attention_of", attention_of, "queries"_a, "weights"_a = std::vector<double>(),
          "float64 [Hq, n + len(queries)]: attention of the queries at these positions, none of them resident, summed\n"
          "over the queries: to the resident tokens, then to these positions; weights: one for each query (default: 1)")
      .def("key_norms", observable(&LayerView::key_norms), "p"_a = 2.0, "float64 [Hkv, n]: p-norms of the keys")
      .def("value_norms", observable(&LayerView::value_norms), "p"_a = 2.0, "float64 [Hkv, n]: p-norms of the values")
      .def("query_moments", query_moments, "first"_a = 0,
           "float64 [Hq, d] and [Hq, d, d]: mean and covariance, before RoPE, of the queries so far from position "
           "`first` on")
      .def("key_similarity", observable(&LayerView::key_similarity),
           "float64 [1, P]: highest cosine of each token's keys, all heads concatenated, with those of another token")
      .def("value_similarity", observable(&LayerView::value_similarity), "float64 [1, P]: the same for values");
}

}  // namespace kvreplay::python
