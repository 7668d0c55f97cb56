#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "arguments.h"
#include "commands.h"
#include "machine.h"
#include "output.h"
#include "policies/text/configured.h"
#include "policies/text/plugin.h"
#include "replay/estimate.h"
#include "replay/replay.h"
#include "replay/stored_observables.h"
#include "trace/header.h"
#include "trace/trace.h"
#include "trace_list.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    boundary_option,
    {"each", 0, "", "", "print all facts of each trace (default: a table, where there are several)"},
    {"no-estimate", 0, "", "", "omit the estimates of time and memory"},
    plugin_option,
    json_option,
};

/// The budget at which time and memory are estimated.
constexpr double estimated_budget = 0.1;

/// A policy, and why the trace cannot serve it; empty: it can.
struct Service {
  ConfiguredPolicy policy;
  std::string refused;
  std::string parameter = {};  // that has no default, if nothing else is missing
  std::string values = {};     // of the parameter
};

/// What the trace can be used for, with everything at its default where the trace allows it.
struct Use {
  Conditions conditions;
  std::vector<std::string> notes;  // defaults that the trace refuses
  std::vector<Service> policies;
};

int tokens_at_estimated_budget(const Conditions& conditions) {
  return Budget::parse(fmt::format("{}", estimated_budget)).tokens(conditions.boundary);
}

/// Throws what stands against the policy at the estimated budget and at the largest that evicts.
void check_at_some_budget(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy) {
  try {
    check_policy(trace, conditions, policy, tokens_at_estimated_budget(conditions));
  } catch (const Error&) {
    check_policy(trace, conditions, policy, conditions.boundary - 1);
  }
}

Use use_of(const Trace& trace, const std::string& boundary_text) {
  Use use;
  use.conditions.boundary = boundary(trace, boundary_text);
  const auto fallback = [&use](auto preferred, auto otherwise) {
    try {
      return preferred();
    } catch (const Error& error) {
      if (error.refusal() != Refusal::input) throw;
      use.notes.emplace_back(error.what());
      return otherwise();
    }
  };
  use.conditions.layers =
      fallback([&] { return treated_layers(trace, false); }, [&] { return treated_layers(trace, true); });
  use.conditions.eval_queries =
      fallback([&] { return eval_queries(trace, "continuation"); }, [] { return std::vector<std::int32_t>{}; });
  for (const std::string& name : policies().names()) {
    Service service{ConfiguredPolicy::parse(name), ""};
    try {
      check_at_some_budget(trace, use.conditions, service.policy);
      const std::vector<LayerPlan> plans = service.policy.plans(static_cast<int>(use.conditions.layers.size()));
      if (plans.front().plan.score.needs.future_queries && use.conditions.eval_queries.empty())
        service.refused = "needs evaluation queries, and the trace has no continuation";
    } catch (const Error& error) {
      service.refused = error.what();
      if (error.where().starts_with(name + ":")) {
        service.parameter = error.where().substr(name.size() + 1);
        service.values = error.expected();
      }
    }
    use.policies.push_back(std::move(service));
  }
  return use;
}

Estimate cost_of(const Trace& trace, const Use& use) {
  std::vector<Cell> cells;
  const int budget = tokens_at_estimated_budget(use.conditions);
  for (const Service& service : use.policies)
    if (service.refused.empty()) cells.push_back({.policy = service.policy, .budget = budget});
  const std::unique_ptr<Backend> backend = make_backend(find_device("auto").backend, 0);
  Estimator estimator(*backend);
  Estimate cost = estimator(trace, use.conditions, cells);
  cost.seconds = estimator.seconds(trace, use.conditions, cells);
  return cost;
}

/// A line for each entry of the file of stored observables beside the trace.
std::vector<std::string> stored_observables(const Trace& trace) {
  const std::filesystem::path path = observables_path(trace);
  if (!std::filesystem::exists(path)) return {};
  std::vector<std::string> lines;
  try {
    for (const StoredEntry& entry : list_observables(path)) {
      std::string what;
      for (const auto& [observable, layers] : entry.layers)
        what += fmt::format("{}{} of {} layers", what.empty() ? "" : ", ", observable, layers.size());
      lines.push_back(fmt::format(
          "{}: {}", path.filename().string(),
          entry.key.trace_hash == trace.hash()
              ? fmt::format("{} for boundary {}, computed by {}", what, entry.key.boundary, entry.key.backend)
              : "belongs to another trace"));
    }
  } catch (const Error& error) {
    if (error.refusal() != Refusal::input) throw;
    lines.emplace_back(error.what());
  }
  return lines;
}

std::string stored_queries(const Trace& trace) {
  const auto stored = [&trace](int l) { return trace.query_positions(l); };
  const TraceHeader& header = trace.header();
  std::size_t least = static_cast<std::size_t>(header.tokens());
  for (int l = 0; l < header.layers; ++l)
    if (!stored(l).empty()) least = std::min(least, stored(l).size());
  return least == static_cast<std::size_t>(header.tokens()) ? "all" : fmt::format("{} of {}", least, header.tokens());
}

/// "none", or "4096 in 5 of 6 layers", of the windows or chunks of all layers.
std::string sizes_by_layer(const std::vector<std::int32_t>& of_layers) {
  std::vector<std::int32_t> sizes;
  for (const std::int32_t size : of_layers)
    if (size > 0 && std::ranges::find(sizes, size) == sizes.end()) sizes.push_back(size);
  if (sizes.empty()) return "none";
  std::string text;
  for (const std::int32_t size : sizes) {
    const auto n = std::ranges::count(of_layers, size);
    text += fmt::format("{}{} in {} of {} layers", text.empty() ? "" : ", ", size, n, of_layers.size());
  }
  return text;
}

/// Layers that read keys and values of others; "none".
std::string sources_text(const TraceHeader& header) {
  std::string text;
  for (int l = 0; l < header.layers; ++l)
    if (const std::vector<int> readers = header.readers(l); readers.size() > 1)
      text += fmt::format("{}layers {} read those of layer {}", text.empty() ? "" : ", ",
                          fmt::join(std::span(readers).subspan(1), "+"), l);
  return text.empty() ? "each layer has its own" : text;
}

bool has_sinks(const TraceHeader& header) {
  return std::ranges::any_of(header.sinks, [](double logit) { return std::isfinite(logit); });
}

/// Names of the tensors of a layer: "q", "k" and so on.
std::vector<std::string> tensor_names(const Trace& trace) {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : trace.tensors(0)) names.push_back(tensor.path.substr(tensor.path.rfind('/') + 1));
  return names;
}

/// "0-2, 4-6" of ascending numbers.
std::string ranges_text(const std::vector<std::int32_t>& numbers) {
  std::string text;
  for (std::size_t first = 0, last = 0; first < numbers.size(); first = ++last) {
    last = first;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", numbers[first]);
    if (last > first) text += fmt::format("-{}", numbers[last]);
  }
  return text;
}

/// Layers of a hybrid model that have other state than keys and values, by kind.
std::vector<std::string> other_state_lines(const TraceHeader& header) {
  std::vector<std::string> lines;
  for (const OtherState& state : other_states(header))
    lines.push_back(fmt::format("{}  {} of each of {} layers: {}", state.kind,
                                size_text(static_cast<std::size_t>(state.bytes)), state.layers.size(),
                                ranges_text(state.layers)));
  return lines;
}

/// What the model itself lets a query read.
std::string own_reads(const Trace& trace) {
  const TraceHeader& header = trace.header();
  int layers = 0;
  std::size_t most = 0;
  for (int l = 0; l < header.layers; ++l) {
    const LayerTensors tensors = trace.layer(l);
    if (tensors.visible.units.empty()) continue;
    ++layers;
    most = tensors.visible.units.size() / static_cast<std::size_t>(tensors.k.heads * tensors.q.tokens);
  }
  if (layers == 0) return "all tokens";
  const std::string unit =
      header.visible_block == 1 ? "tokens" : fmt::format("blocks of {} tokens", header.visible_block);
  return fmt::format("at most {} {} per query, in {} of {} layers", most, unit, layers, header.layers);
}

/// "4 layers  8 query / 2 KV heads  head dimension 64"; a line for each shape where layers differ.
std::vector<std::string> shape_lines(const TraceHeader& header) {
  std::vector<std::pair<LayerShape, int>> shapes;  // and the number of layers
  for (int l = 0; l < header.layers; ++l) {
    LayerShape shape = header.shape(l);
    shape.query_heads = header.own_query_heads(l);
    const auto found = std::ranges::find(shapes, shape, &std::pair<LayerShape, int>::first);
    if (found == shapes.end())
      shapes.emplace_back(shape, 1);
    else
      ++found->second;
  }
  std::vector<std::string> lines;
  for (const auto& [shape, layers] : shapes) {
    const std::string values = !header.stores_values()
                                   ? fmt::format("  values: first {} components of the keys", shape.value_dim)
                               : shape.value_dim == shape.key_dim ? ""
                                                                  : fmt::format(", {} of values", shape.value_dim);
    lines.push_back(
        fmt::format("{} layers  {} query / {} KV heads  head dimension {}{}",
                    shapes.size() == 1 ? fmt::format("{}", layers) : fmt::format("{} of {}", layers, header.layers),
                    shape.query_heads, shape.kv_heads, shape.key_dim, values));
  }
  return lines;
}

/// [L, 2]; empty where all layers have the same.
Json pairs_of(const std::vector<std::int32_t>& numbers) {
  Json pairs = Json::array();
  for (std::size_t i = 0; i + 1 < numbers.size(); i += 2) pairs.push_back({numbers[i], numbers[i + 1]});
  return pairs;
}

Json as_json(const Trace& trace, const Use& use, const std::optional<Estimate>& cost) {
  const TraceHeader& header = trace.header();
  Json document{{"path", trace.path().string()},
                {"name", trace.name()},
                {"hash", trace.hash()},
                {"producer", header.producer},
                {"created", header.created},
                {"synthetic", header.synthetic},
                {"model", header.model},
                {"architecture", header.architecture},
                {"dtype", name_of(header.dtype)},
                {"stored_dtype", name_of(trace.layer(0).k.dtype)},
                {"layers", header.layers},
                {"query_heads", header.query_heads},
                {"kv_heads", header.kv_heads},
                {"head_dim", header.head_dim},
                {"value_dim", header.value_components()},
                {"value_is_key", !header.stores_values()},
                {"heads", pairs_of(header.heads)},
                {"kv_source", header.kv_source},
                {"head_dims", pairs_of(header.head_dims)},
                {"prompt", header.prefill},
                {"continuation", header.continuation()},
                {"boundary", use.conditions.boundary},
                {"stored_queries", stored_queries(trace)},
                {"sliding_window", header.sliding_window},
                {"chunk", header.chunk},
                {"sinks", has_sinks(header)},
                {"visible_block", header.visible_block},
                {"layer_index", header.layer_index},
                {"softmax_scale", header.softmax_scale},
                {"logit_softcap", header.logit_softcap},
                {"rope_pairs", header.rope_pairs},
                {"tensors", tensor_names(trace)},
                {"tensor_bytes", trace.tensor_bytes()},
                {"other_state", Json::array()},
                {"spans", Json::array()},
                {"policies", Json::array()},
                {"stored_observables", stored_observables(trace)},
                {"reconstruction", Json::object()},
                {"notes", use.notes}};
  if (const std::vector<ReconstructionPass> passes = header.passes(); !passes.empty())
    document["reconstruction"] = {{"boundary", header.reconstruction_boundary},
                                  {"passes", passes.size()},
                                  {"tokens", header.reconstruction_ids.size()}};
  for (const OtherState& state : other_states(header))
    document["other_state"].push_back({{"kind", state.kind}, {"layers", state.layers}, {"bytes", state.bytes}});
  for (const Span& span : header.spans)
    document["spans"].push_back({{"name", span.name}, {"kind", span.kind}, {"begin", span.begin}, {"end", span.end}});
  for (const Service& service : use.policies)
    document["policies"].push_back(
        {{"name", service.policy.name()}, {"served", service.refused.empty()}, {"why_not", service.refused}});
  if (cost)
    document["estimate"] = {
        {"seconds", cost->seconds}, {"memory_bytes", cost->memory_bytes}, {"disk_bytes", cost->disk_bytes}};
  return document;
}

void print_text(const Trace& trace, const Use& use, const std::optional<Estimate>& cost) {
  const TraceHeader& header = trace.header();
  std::string served;
  for (const Service& service : use.policies)
    if (service.refused.empty()) served += (served.empty() ? "" : ", ") + service.policy.name();
  std::vector<TableRow> rows{
      {"trace", fmt::format("{}  {} of {} tensors", trace.path().string(), size_text(trace.tensor_bytes()),
                            name_of(trace.layer(0).k.dtype))},
      {"hash", trace.hash()},
      {"written", fmt::format("{} by {}", header.created, header.producer)},
      {"model", fmt::format("{}  {}  computed in {}{}", header.model, header.architecture, name_of(header.dtype),
                            header.synthetic ? "  synthetic" : "")},
      {"tokens", fmt::format("prompt {} + continuation {}", header.prefill, header.continuation())}};
  for (const std::string& line : shape_lines(header)) rows.push_back({"shape", line});
  for (const std::string& line : other_state_lines(header)) rows.push_back({"other state", line});
  const TableRow of_attention[] = {
      {"tensors", fmt::format("{}", fmt::join(tensor_names(trace), ", "))},
      {"queries", stored_queries(trace)},
      {"keys", sources_text(header)},
      {"window", sizes_by_layer(header.sliding_window)},
      {"chunk", sizes_by_layer(header.chunk)},
      {"sinks", has_sinks(header) ? "sink logits in the softmax" : "no sink logits"},
      {"reads", own_reads(trace)},
      {"scale", header.logit_softcap > 0.0 ? fmt::format("{}  softcap {}", header.softmax_scale, header.logit_softcap)
                                           : fmt::format("{}", header.softmax_scale)},
      {"rope", header.has_rope ? fmt::format("{}{} pairs, {}", header.layer_pairs.empty() ? "" : "at most ",
                                             header.rope_pairs, header.rope_interleaved ? "interleaved" : "half-split")
                               : "none"}};
  rows.insert(rows.end(), std::begin(of_attention), std::end(of_attention));
  if (const std::vector<ReconstructionPass> passes = header.passes(); !passes.empty())
    rows.push_back({"passes", fmt::format("{} that repeat tokens [{}, {}), {} tokens after the first {}", passes.size(),
                                          passes.front().first, passes.back().last, header.reconstruction_ids.size(),
                                          header.reconstruction_boundary)});
  for (const Span& span : header.spans)
    rows.push_back({"span", fmt::format("{}  {}  [{}, {})", span.name, span.kind, span.begin, span.end)});
  if (const int tokens = use.conditions.boundary; tokens < header.prefill)
    rows.push_back({"boundary", fmt::format("{} tokens under compression, then {} other tokens of the prompt", tokens,
                                            header.prefill - tokens)});
  rows.push_back({"policies", served.empty() ? "none" : served});
  for (const Service& service : use.policies)
    if (!service.parameter.empty())
      rows.push_back({"parameter", fmt::format("{} needs a parameter: {}: {}", service.policy.name(), service.parameter,
                                               service.values)});
  for (const Service& service : use.policies)
    if (!service.refused.empty() && service.parameter.empty())
      rows.push_back({"rejected", service.policy.name() + ": " + service.refused});
  for (const std::string& line : stored_observables(trace)) rows.push_back({"stored", line});
  for (const std::string& note : use.notes) rows.push_back({"note", note});
  if (cost)
    rows.push_back({"replay", fmt::format("all these policies at budget {}: about {}, {} of memory, {} of results",
                                          estimated_budget, duration_text(cost->seconds), size_text(cost->memory_bytes),
                                          size_text(cost->disk_bytes))});
  print_columns(rows);
}

/// "needle, question, answer".
std::string span_names(const TraceHeader& header) {
  std::string names;
  for (const Span& span : header.spans) names += (names.empty() ? "" : ", ") + span.name;
  return names;
}

/// A row for each trace, and the sum of their bytes.
void print_table(const std::vector<ListedTrace>& traces) {
  std::vector<TableRow> rows{{"trace", "model", "tokens", "layers", "heads", "dtype", "size", "spans"}};
  std::size_t bytes = 0;
  for (const ListedTrace& listed : traces) {
    const std::string file = std::filesystem::path(listed.path).stem().string();
    if (is_observables_file(listed.path)) {
      rows.push_back({file, "stored observables"});
      continue;
    }
    const Trace trace = Trace::open(listed.path);
    check_hash(listed, trace.hash());
    const TraceHeader& header = trace.header();
    bytes += trace.tensor_bytes();
    rows.push_back({file, header.model, fmt::format("{} + {}", header.prefill, header.continuation()),
                    std::to_string(header.layers), fmt::format("{}/{}", header.query_heads, header.kv_heads),
                    name_of(trace.layer(0).k.dtype), size_text(trace.tensor_bytes()), span_names(header)});
  }
  print_columns(rows);
  fmt::print("\n");
  print_columns({{"traces", fmt::format("{}, {} of tensors", traces.size(), size_text(bytes))},
                 {"tokens", "prompt + continuation"},
                 {"heads", "query heads / KV heads"},
                 {"--each", "prints all facts of each trace"}});
}

int run(const Arguments& arguments) {
  for (const std::string& file : arguments.all(plugin_option.name)) load_plugin(file);
  const std::vector<ListedTrace> traces = list_traces(arguments.operands());
  if (traces.size() > 1 && !arguments.given("each") && !arguments.given("json")) {
    print_table(traces);
    return 0;
  }
  Json document = Json::array();
  const bool json = arguments.given("json");
  const char* gap = "";
  for (const ListedTrace& listed : traces) {
    const std::string& path = listed.path;
    if (is_observables_file(path)) {
      document.push_back({{"path", path}, {"kind", "stored observables"}});
      if (!json) fmt::print("{}{}: stored observables of a trace\n", std::exchange(gap, "\n"), path);
      continue;
    }
    const Trace trace = Trace::open(path);
    check_hash(listed, trace.hash());
    const Use use = use_of(trace, arguments.text("boundary"));
    std::optional<Estimate> cost;
    if (!arguments.given("no-estimate")) cost = cost_of(trace, use);
    if (json) {
      document.push_back(as_json(trace, use, cost));
    } else {
      fmt::print("{}", std::exchange(gap, "\n"));
      print_text(trace, use, cost);
    }
  }
  if (json) print_json(document);
  return 0;
}

}  // namespace

const Command info_command{"info",
                           "describes traces: contents, replayable policies, estimated cost; several traces: a table",
                           "TRACE...",
                           options,
                           run,
                           trace_list_help,
                           "kvreplay info trace.h5\nkvreplay info traces\nkvreplay info traces --no-estimate --json\n"};

}  // namespace kvreplay
