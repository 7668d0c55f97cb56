#include "analysis/trace_cells.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <iterator>
#include <limits>
#include <map>

#include "analysis/csv.h"
#include "analysis/replaced_file.h"
#include "analysis/sampling_error.h"
#include "hdf5/hdf5.h"
#include "hdf5/hdf5_copy.h"
#include "parameters.h"
#include "trace/trace.h"
#include "trace/writer.h"

namespace kvreplay {
namespace {

using hdf5::File;
using hdf5::Group;
using hdf5::Shape;

constexpr const char* cells_format = "kvcells";
constexpr std::int64_t cells_version = 1;

std::size_t index(int i) { return static_cast<std::size_t>(i); }
std::size_t index64(std::int64_t i) { return static_cast<std::size_t>(i); }
hsize_t extent(int n) { return static_cast<hsize_t>(n); }

void set_numbers(const Group& object, const std::string& name, const std::vector<int>& numbers) {
  const hdf5::Lock lock;
  const std::vector<std::int32_t> stored(numbers.begin(), numbers.end());
  const hdf5::Type type = hdf5::Type::int32();
  const hdf5::Space space = hdf5::Space::of({stored.size()});
  const hdf5::Handle attribute{H5Acreate2(object.id(), name.c_str(), type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT),
                               H5Aclose};
  if (attribute.id() < 0 || H5Awrite(attribute.id(), type.id(), stored.data()) < 0)
    throw hdf5::failure(object.where(name), "cannot be written");
}

std::vector<int> numbers_of(const Group& object, const std::string& name) {
  const hdf5::Lock lock;
  const hdf5::Handle attribute{H5Aopen(object.id(), name.c_str(), H5P_DEFAULT), H5Aclose};
  if (attribute.id() < 0) throw hdf5::failure(object.where(name), "cannot be read");
  const hdf5::Type type = hdf5::Type::int32(), found{H5Aget_type(attribute.id()), H5Tclose};
  if (!(found == type)) throw Error{Refusal::input, object.where(name), "type", type.name(), found.name()};
  std::vector<std::int32_t> stored(hdf5::attribute_elements(attribute, object.where(name)));
  if (H5Aread(attribute.id(), type.id(), stored.data()) < 0) throw hdf5::failure(object.where(name), "cannot be read");
  return {stored.begin(), stored.end()};
}

void write_matrix(Group& group, const std::string& name, const Matrix& matrix) {
  group.write(name, matrix.values(), {extent(matrix.rows()), extent(matrix.columns())});
}

/// One dataset for all, as each costs a reader some 40 µs; `metrics` says whose numbers they are.
void write_values(Group& group, const ValuesByMetric& all) {
  std::vector<double> numbers;
  std::string metrics;
  for (const auto& [name, values] : all) {
    numbers.insert(numbers.end(), values.values().begin(), values.values().end());
    metrics += csv_line({name.metric, name.variant, std::to_string(values.rows()), std::to_string(values.columns())});
  }
  group.write("numbers", numbers);
  group.write_text("metrics", metrics);
}

void require_shape(const hdf5::Dataset& dataset, const Shape& expected) {
  if (const Shape shape = dataset.shape(); shape != expected)
    throw Error{Refusal::input, dataset.where(), "shape", hdf5::to_string(expected), hdf5::to_string(shape)};
}

/// All elements of a dataset that must have this shape.
template <class Element>
std::vector<Element> read_shaped(const Group& group, const std::string& name, const Shape& expected) {
  const hdf5::Dataset dataset = group.dataset(name);
  require_shape(dataset, expected);
  return dataset.values<Element>();
}

void write_by_unit(Group group, const ValuesByUnit& all, std::size_t units) {
  std::vector<double> numbers;
  std::string metrics;
  for (const auto& [name, values] : all) {
    numbers.insert(numbers.end(), values.begin(), values.end());
    metrics += csv_line({name.metric, name.variant});
  }
  group.write("numbers", std::span<const double>(numbers), {all.size(), units});
  group.write_text("metrics", metrics);
}

/// Whose numbers stand in a dataset, and how many.
struct MetricExtent {
  MetricName name;
  int rows = 0, columns = 0;
};

/// Rows or columns.
int extent_of(const hdf5::Dataset& metrics, const std::string& text, std::int64_t most) {
  int number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc{} || end != text.data() + text.size() || number < 1 || number > most)
    throw Error{Refusal::input, metrics.where(), "shape", fmt::format("1..{}", most), text};
  return number;
}

std::vector<MetricExtent> read_metrics(const hdf5::Dataset& metrics, const TraceRecord& trace) {
  constexpr std::size_t longest = 1 << 16;  // many times all metrics that there are
  if (metrics.type().bytes() > longest)
    throw Error{Refusal::input, metrics.where(), "length", fmt::format("at most {} bytes", longest),
                std::to_string(metrics.type().bytes())};
  std::vector<MetricExtent> all;
  for (const std::vector<std::string>& fields : parse_csv(metrics.where(), metrics.text())) {
    if (fields.size() != 4)
      throw Error{Refusal::input, metrics.where(), "line", "metric,variant,rows,columns",
                  fmt::format("{} fields", fields.size())};
    const MetricName name{fields[0], fields[1]};
    if (find_variant(name) == nullptr || std::ranges::find(all, name, &MetricExtent::name) != all.end())
      throw Error{Refusal::input, metrics.where(), "metric", "a known metric, once", name.text()};
    const int rows = extent_of(metrics, fields[2], std::int64_t{trace.layers} + 1);
    if (rows != 1 && rows != trace.layers + 1)
      throw Error{Refusal::input, metrics.where(), "shape", fmt::format("1 or {} rows", trace.layers + 1), fields[2]};
    all.push_back({name, rows, extent_of(metrics, fields[3], std::int64_t{trace.query_heads} + 1)});
  }
  return all;
}

ValuesByMetric read_values(const Group& group, const TraceRecord& trace) {
  const std::vector<MetricExtent> metrics = read_metrics(group.dataset("metrics"), trace);
  hsize_t count = 0;
  for (const MetricExtent& metric : metrics) count += extent(metric.rows) * extent(metric.columns);
  const std::vector<double> numbers = read_shaped<double>(group, "numbers", {count});
  std::span<const double> left = numbers;
  ValuesByMetric all;
  for (const MetricExtent& metric : metrics) {
    const std::span<double> own = (all[metric.name] = Values(metric.rows, metric.columns)).values();
    std::ranges::copy(left.first(own.size()), own.begin());
    left = left.subspan(own.size());
  }
  return all;
}

ValuesByUnit read_by_unit(const Group& group, std::size_t units) {
  const hdf5::Dataset metrics = group.dataset("metrics");
  std::vector<MetricName> names;
  for (const std::vector<std::string>& fields : parse_csv(metrics.where(), metrics.text())) {
    if (fields.size() != 2)
      throw Error{Refusal::input, metrics.where(), "line", "metric,variant", fmt::format("{} fields", fields.size())};
    names.push_back({fields[0], fields[1]});
  }
  const std::vector<double> numbers = read_shaped<double>(group, "numbers", {names.size(), units});
  ValuesByUnit all;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::span<const double> own = std::span(numbers).subspan(i * units, units);
    all[names[i]].assign(own.begin(), own.end());
  }
  return all;
}

/// A count, or a number of tokens, heads or layers.
int count(const Group& group, const std::string& name, int least) {
  const std::int64_t number = group.integer_attribute(name);
  if (number < least || number > std::numeric_limits<int>::max())
    throw Error{Refusal::input, group.where(name), "range", fmt::format("at least {}", least), std::to_string(number)};
  return static_cast<int>(number);
}

Heads read_heads(const Group& group) {
  const std::string text = group.string_attribute("heads");
  const Heads heads = heads_of(text);
  if (word(heads) != text) throw Error{Refusal::input, group.where("heads"), "heads", "kv, query or layer", text};
  return heads;
}

constexpr std::pair<const char*, std::string TraceRecord::*> words_of_trace[] = {{"trace_hash", &TraceRecord::hash},
                                                                                 {"model", &TraceRecord::model},
                                                                                 {"dtype", &TraceRecord::dtype},
                                                                                 {"eval", &TraceRecord::eval},
                                                                                 {"backend", &TraceRecord::backend}};
constexpr std::pair<const char*, int TraceRecord::*> sizes_of_trace[] = {
    {"prompt", &TraceRecord::prompt},     {"tokens", &TraceRecord::tokens},
    {"layers", &TraceRecord::layers},     {"query_heads", &TraceRecord::query_heads},
    {"kv_heads", &TraceRecord::kv_heads}, {"head_dim", &TraceRecord::head_dim},
    {"boundary", &TraceRecord::boundary}, {"n_queries", &TraceRecord::n_queries}};

void write_conditions(Group& group, const TraceRecord& trace) {
  for (const auto& [name, member] : words_of_trace) group.set_attribute(name, trace.*member);
  for (const auto& [name, member] : sizes_of_trace) group.set_attribute(name, std::int64_t{trace.*member});
  group.set_attribute("synthetic", std::int64_t{trace.synthetic});
  group.set_attribute("numerics", std::int64_t{trace.numerics});
  set_numbers(group, "treated", trace.treated);
  set_numbers(group, "layer_index", trace.layer_index);
  if (trace.reading_layers > 0) group.set_attribute("reading_layers", std::int64_t{trace.reading_layers});
  if (trace.is_sampled()) {
    group.set_attribute("sample", trace.sample);
    group.set_attribute("sample_text", trace.sample_text());
    group.set_attribute("all_queries", std::int64_t{trace.all_queries});
    group.set_attribute("looks", std::int64_t{trace.looks});
    if (trace.samples_heads()) group.set_attribute("sampled_heads", std::int64_t{trace.sampled_heads});
    if (trace.samples_layers()) set_numbers(group, "all_layers", trace.all_layers);
  }
  if (trace.has_equal_heads()) return;
  set_numbers(group, "layer_query_heads", trace.layer_query_heads);
  set_numbers(group, "layer_kv_heads", trace.layer_kv_heads);
}

void check_layer_heads(const Group& group, const TraceRecord& trace) {
  for (const auto& [name, numbers] :
       {std::pair{"layer_query_heads", &trace.layer_query_heads}, std::pair{"layer_kv_heads", &trace.layer_kv_heads}})
    if (numbers->size() != index(trace.layers))
      throw Error{Refusal::input, group.where(name), "layers", std::to_string(trace.layers),
                  std::to_string(numbers->size())};
  for (const int layer : trace.treated) {
    const int query_heads = trace.rows(Heads::query, layer), kv_heads = trace.rows(Heads::kv, layer);
    if (kv_heads < 1 || kv_heads > trace.kv_heads || query_heads > trace.query_heads || query_heads % kv_heads != 0)
      throw Error{Refusal::input, group.where("layer_kv_heads"), fmt::format("heads of layer {}", layer),
                  fmt::format("at most {}, a divisor of the query heads", trace.kv_heads), std::to_string(kv_heads)};
  }
}

/// What the rest of a file of cells is read by.
void check_conditions(const Group& group, const TraceRecord& trace) {
  if (trace.layer_index.size() != index(trace.layers))
    throw Error{Refusal::input, group.where("layer_index"), "layers", std::to_string(trace.layers),
                std::to_string(trace.layer_index.size())};
  if (trace.treated.empty() || trace.treated.front() < 0 || trace.treated.back() >= trace.layers ||
      std::ranges::adjacent_find(trace.treated, std::greater_equal<>()) != trace.treated.end())
    throw Error{Refusal::input, group.where("treated"), "layers", fmt::format("ascending in 0..{}", trace.layers - 1),
                fmt::format("{}", fmt::join(trace.treated, ","))};
  if (trace.boundary > trace.tokens)
    throw Error{Refusal::input, group.where("boundary"), "range", fmt::format("1..{}", trace.tokens),
                std::to_string(trace.boundary)};
  if (trace.has_equal_heads() && trace.query_heads % trace.kv_heads != 0)
    throw Error{Refusal::input, group.where("query_heads"), "heads", fmt::format("a multiple of {}", trace.kv_heads),
                std::to_string(trace.query_heads)};
  if (!trace.has_equal_heads()) check_layer_heads(group, trace);
  if (trace.samples_layers() && !std::ranges::includes(trace.all_layers, trace.treated))
    throw Error{Refusal::input, group.where("treated"), "layers", "some of the attribute all_layers",
                fmt::format("{}", fmt::join(trace.treated, ","))};
}

/// An array of the trace that need not be there.
bool has_array(const Group& group, const std::string& name, const Shape& shape) {
  if (group.member(name) != Group::Member::dataset) return false;
  require_shape(group.dataset(name), shape);
  return true;
}

TraceRecord read_conditions(const Group& group, const std::string& name) {
  TraceRecord trace;
  trace.name = name;
  for (const auto& [attribute, member] : words_of_trace) trace.*member = group.string_attribute(attribute);
  for (const auto& [attribute, member] : sizes_of_trace) trace.*member = count(group, attribute, 1);
  trace.synthetic = group.integer_attribute("synthetic") != 0;
  trace.numerics = count(group, "numerics", 0);
  trace.treated = numbers_of(group, "treated");
  trace.layer_index = numbers_of(group, "layer_index");
  if (group.has_attribute("reading_layers")) trace.reading_layers = count(group, "reading_layers", 1);
  if (group.has_attribute("sample")) {
    trace.sample = group.string_attribute("sample");
    trace.all_queries = count(group, "all_queries", trace.n_queries);
    trace.looks = count(group, "looks", 1);
    if (group.has_attribute("sampled_heads")) trace.sampled_heads = count(group, "sampled_heads", 2);
    if (group.has_attribute("all_layers")) trace.all_layers = numbers_of(group, "all_layers");
  }
  if (group.has_attribute("layer_query_heads")) {
    trace.layer_query_heads = numbers_of(group, "layer_query_heads");
    trace.layer_kv_heads = numbers_of(group, "layer_kv_heads");
  }
  check_conditions(group, trace);
  const hsize_t layers = extent(trace.layers), heads = extent(trace.query_heads), prompt = extent(trace.boundary);
  trace.has_eval_attention = has_array(group, "eval_attention", {layers, prompt});
  trace.has_eval_attention_by_head = has_array(group, "eval_attention_heads", {layers, heads, prompt});
  return trace;
}

constexpr std::pair<const char*, std::string CellRecord::*> words[] = {
    {"role", &CellRecord::role},   {"policy", &CellRecord::policy}, {"params", &CellRecord::params},
    {"label", &CellRecord::label}, {"paper", &CellRecord::paper},   {"heads", &CellRecord::heads},
    {"agg", &CellRecord::agg},     {"budget", &CellRecord::budget}};

constexpr const char* protected_fill_budget = "protected_fill_budget";

void write_cell_facts(Group& group, const CellRecord& cell) {
  for (const auto& [name, member] : words) group.set_attribute(name, cell.*member);
  group.set_attribute("budget_tokens", std::int64_t{cell.budget_tokens});
  group.set_attribute("seed", std::to_string(cell.seed));
  if (!cell.source.empty()) group.set_attribute("source", cell.source);
  group.set_attribute("kept_tokens", cell.kept_tokens);
  group.set_attribute("own_memory", std::int64_t{cell.own_memory});
  if (cell.protected_fill_budget) group.set_attribute(protected_fill_budget, std::int64_t{1});
  group.set_attribute("scores", std::int64_t{cell.has_scores});
  group.set_attribute("sets", cell.keeps_all_changed ? "all" : "fixed");
}

CellRecord read_cell_facts(const Group& group, const std::string& id) {
  CellRecord cell;
  cell.id = id;
  for (const auto& [name, member] : words) cell.*member = group.string_attribute(name);
  read_heads(group);
  cell.budget_tokens = count(group, "budget_tokens", 0);
  const std::string seed = group.string_attribute("seed");
  const auto [end, problem] = std::from_chars(seed.data(), seed.data() + seed.size(), cell.seed);
  if (problem != std::errc{} || end != seed.data() + seed.size())
    throw Error{Refusal::input, group.where("seed"), "number", "0..2^64-1", seed};
  if (group.has_attribute("source")) cell.source = group.string_attribute("source");
  cell.kept_tokens = group.float_attribute("kept_tokens");
  cell.own_memory = group.integer_attribute("own_memory") != 0;
  cell.protected_fill_budget = group.has_attribute(protected_fill_budget);
  cell.has_scores = group.integer_attribute("scores") != 0;
  cell.keeps_all_changed = group.string_attribute("sets") == "all";
  return cell;
}

void write_seconds(Group& group, const std::string& id, const std::vector<CellSeconds>& seconds) {
  std::vector<double> flat;
  for (const CellSeconds& layer : seconds) flat.insert(flat.end(), {layer.score, layer.select});
  group.write(id, std::span<const double>(flat), {seconds.size(), 2});
}

std::vector<CellSeconds> read_seconds(const Group& group, const std::string& id, const TraceRecord& trace) {
  const std::vector<double> flat = read_shaped<double>(group, id, {trace.treated.size(), 2});
  std::vector<CellSeconds> seconds;
  for (std::size_t i = 0; i + 1 < flat.size(); i += 2) seconds.push_back({flat[i], flat[i + 1]});
  return seconds;
}

/// The sets of a cell, [L, H] each, H the rows of the finest of them. Layers that are not treated have empty rows, and
/// so has a cell that keeps all tokens.
void write_selection(Group group, const CellRecord& cell, const CellResult& made, const TraceRecord& trace) {
  const Heads finest = std::ranges::max_element(made.selections, {}, [&](const LayerSelection& of) {
                         return trace.most_rows(of.set.heads());
                       })->set.heads();
  const std::size_t rows = index(trace.most_rows(finest)), all_rows = index(trace.layers) * rows,
                    tokens = index(trace.tokens);
  std::vector<std::int64_t> offsets(all_rows + 1);
  std::vector<std::int32_t> positions, slots, evicted_at, sources(index(trace.layers), -1), budget(all_rows),
      sinks(all_rows), recent(all_rows);
  std::vector<const char*> granularities;
  bool differ = false;
  const bool has_slots =
      std::ranges::any_of(made.selections, [](const LayerSelection& of) { return !of.slots.empty(); });
  const auto append = [](std::vector<std::int32_t>& to, const std::vector<std::int32_t>& some) {
    to.insert(to.end(), some.begin(), some.end());
  };
  for (std::size_t l = 0; l < trace.treated.size(); ++l) {
    const std::size_t layer = index(trace.treated[l]);
    const LayerSelection& selection = made.selections[l];
    sources[layer] = trace.treated[index(selection.source)];
    granularities.push_back(word(selection.set.heads()));
    differ = differ || selection.set.heads() != finest;
    const std::size_t rows_here = index(trace.rows(finest, trace.treated[l]));
    for (std::size_t row = 0; row < rows_here; ++row) {
      const std::size_t r = layer * rows + row, own = row * index(selection.set.rows()) / rows_here;
      const int own_row = static_cast<int>(own);
      if (!cell.keeps_all_changed) {
        append(positions, selection.set.positions(own_row));
        if (has_slots) append(slots, selection.in_slot_order(own_row));
      }
      offsets[r + 1] = static_cast<std::int64_t>(positions.size());
      budget[r] = selection.granted[own];
      sinks[r] = selection.sinks[own];
      recent[r] = selection.recent[own];
      if (!selection.changes_with_time()) continue;
      evicted_at.resize(all_rows * tokens, -1);
      std::ranges::copy(selection.evicted_of(own_row), evicted_at.begin() + static_cast<std::ptrdiff_t>(r * tokens));
    }
  }
  // Rows of layers that are not treated, or have fewer heads, end where they begin.
  for (std::size_t r = 0; r < all_rows; ++r) offsets[r + 1] = std::max(offsets[r], offsets[r + 1]);
  group.write("offsets", offsets);
  group.write("positions", positions);
  group.write("layer_source", sources);
  const Shape by_row{extent(trace.layers), rows};
  for (const auto& [name, numbers] : {std::pair{"budget", &budget}, {"sinks", &sinks}, {"recent", &recent}})
    group.write(name, std::span<const std::int32_t>(*numbers), by_row);
  if (has_slots && slots != positions) group.write("slots", slots);
  if (!evicted_at.empty())
    group.write("evicted_at", std::span<const std::int32_t>(evicted_at), {by_row[0], rows, tokens});
  for (const auto& [variant, matrix] : made.matrices) write_matrix(group, "jaccard_" + variant, matrix);
  if (!made.scores.empty())
    group.write("scores", std::span<const float>(made.scores),
                {by_row[0], made.scores.size() / index(trace.layers) / index(trace.boundary), extent(trace.boundary)});
  if (differ) group.set_attribute("layer_heads", fmt::format("{}", fmt::join(granularities, ",")));
  set_numbers(group, "layers", trace.treated);
}

void set_cell_attributes(Group group, const CellRecord& cell, const TraceRecord& trace) {
  const std::pair<const char*, const std::string*> attributes[] = {
      {"trace", &trace.name},   {"trace_hash", &trace.hash}, {"policy", &cell.policy}, {"params", &cell.params},
      {"budget", &cell.budget}, {"heads", &cell.heads},      {"role", &cell.role}};
  for (const auto& [name, text] : attributes) group.set_attribute(name, *text);
  group.set_attribute("budget_tokens", std::int64_t{cell.budget_tokens});
  group.set_attribute("open_loop", std::int64_t{1});
  if (cell.keeps_all_changed) group.set_attribute("sets", "all");
}

/// Per-token arrays of the trace: what is new, and what the old file has of the rest.
void write_trace_arrays(Group& group, const std::optional<Group>& old, const TraceRecord& trace,
                        const TraceResult& result) {
  const hsize_t layers = extent(trace.layers), heads = extent(trace.query_heads), prompt = extent(trace.boundary);
  for (const auto& [name, tokens] : result.tokens)
    group.write(name.text(), std::span<const float>(tokens), {layers, prompt});
  if (!result.eval_attention.empty())
    group.write("eval_attention", std::span<const float>(result.eval_attention), {layers, prompt});
  if (!result.eval_attention_by_head.empty())
    group.write("eval_attention_heads", std::span<const float>(result.eval_attention_by_head), {layers, heads, prompt});
  if (!old) return;
  for (const std::string& name : old->names())
    if (old->member(name) == Group::Member::dataset && name != "spans" && group.member(name) == Group::Member::none)
      copy(*old, name, group);
}

/// Which file each object was copied from.
using Holders = std::map<std::string, std::filesystem::path>;

/// Copies into `to` what it lacks; objects that it has must be equal. `holder`: the file that `to` was copied from.
void join(const Group& from, const std::filesystem::path& file, Group& to, const std::filesystem::path& holder,
          Holders& holders) {
  for (const std::string& name : from.names()) {
    const std::string key = to.where() + "/" + name;
    const std::filesystem::path& first = holders.contains(key) ? holders[key] : holder;
    switch (to.member(name)) {
      case Group::Member::none:
        copy(from, name, to);
        holders[key] = file;
        break;
      case Group::Member::group: {
        Group inner = to.group(name);
        join(from.group(name), file, inner, first, holders);
        break;
      }
      default:
        const hdf5::Dataset ours = to.dataset(name), theirs = from.dataset(name);
        if (ours.shape() != theirs.shape() || !(ours.type() == theirs.type()) || ours.bytes() != theirs.bytes())
          throw Error{Refusal::input, theirs.where(), "differs", "the numbers of " + first.string(), "others"};
    }
  }
}

/// A file of cells that is written: in memory until it is complete.
struct NewFile {
  explicit NewFile(const TraceRecord& of) : trace(of) {
    file.set_attribute("format", cells_format);
    file.set_attribute("version", cells_version);
    write_conditions(of_trace, trace);
    Group of_values = values.create_group("trace");
    write_values(of_values, trace.values);
    seconds.write("observables", trace.observable_seconds);
  }
  /// A cell whose sets are there.
  void describe(const CellRecord& cell) {
    set_cell_attributes(cells.group(cell.id), cell, trace);
    Group of_cell = values.create_group(cell.id);
    write_cell_facts(of_cell, cell);
    write_values(of_cell, cell.values);
    if (by_query) write_by_unit(by_query->create_group(cell.id), cell.by_query, index(trace.n_queries));
    if (by_head)
      write_by_unit(by_head->create_group(cell.id), cell.by_head, trace.treated.size() * index(trace.sampled_heads));
    if (by_layer) write_by_unit(by_layer->create_group(cell.id), cell.by_layer, trace.treated.size());
    write_seconds(seconds, cell.id, cell.seconds);
  }

  const TraceRecord& trace;
  File file = File::create_in_memory(trace.name);
  Group of_trace = file.create_group("traces").create_group(trace.name);
  Group cells = file.create_group("cells"), values = file.create_group("values"),
        seconds = file.create_group("seconds");
  std::optional<Group> by_query = trace.samples_queries() ? std::optional(file.create_group("by_query")) : std::nullopt;
  std::optional<Group> by_head = trace.samples_heads() ? std::optional(file.create_group("by_head")) : std::nullopt;
  std::optional<Group> by_layer = trace.samples_layers() ? std::optional(file.create_group("by_layer")) : std::nullopt;
};

/// The granularity of each treated layer.
std::vector<Heads> read_layer_heads(const Group& group, Heads finest, const TraceRecord& trace) {
  std::vector<Heads> of_layers(trace.treated.size(), finest);
  if (!group.has_attribute("layer_heads")) return of_layers;
  const std::string text = group.string_attribute("layer_heads");
  const std::vector<std::string_view> pieces = split_list(group.where("layer_heads"), text);
  if (pieces.size() != of_layers.size())
    throw Error{Refusal::input, group.where("layer_heads"), "layers", std::to_string(of_layers.size()),
                std::to_string(pieces.size())};
  for (std::size_t l = 0; l < pieces.size(); ++l) {
    of_layers[l] = heads_of(pieces[l]);
    if (pieces[l] != word(of_layers[l]) || trace.most_rows(of_layers[l]) > trace.most_rows(finest))
      throw Error{Refusal::input, group.where("layer_heads"), "heads", "kv, query or layer, no finer than heads", text};
  }
  return of_layers;
}

/// Row r of a list is [offsets[r], offsets[r+1]) of its positions: ascending, each once, below `tokens`.
void check_positions(const Group& group, std::span<const std::int64_t> offsets, std::span<const std::int32_t> positions,
                     int tokens) {
  const auto length = static_cast<std::int64_t>(positions.size());
  if (offsets.front() != 0 || offsets.back() != length || !std::ranges::is_sorted(offsets))
    throw Error{Refusal::input, group.where() + "/offsets", "offsets", fmt::format("ascending from 0 to {}", length),
                fmt::format("from {} to {}", offsets.front(), offsets.back())};
  for (std::size_t r = 0; r + 1 < offsets.size(); ++r) {
    const auto row = positions.subspan(index64(offsets[r]), index64(offsets[r + 1] - offsets[r]));
    if (!row.empty() && (row.front() < 0 || row.back() >= tokens ||
                         std::ranges::adjacent_find(row, std::greater_equal<>()) != row.end()))
      throw Error{Refusal::input, group.where() + "/positions", fmt::format("kept positions of row {}", r),
                  fmt::format("ascending in 0..{}", tokens - 1), "others"};
  }
}

}  // namespace

std::string TraceRecord::sample_text() const {
  std::vector<std::string> parts;
  if (samples_layers()) parts.push_back(fmt::format("{} of {} layers", treated.size(), all_layers.size()));
  if (samples_heads()) parts.push_back(fmt::format("{} of {} KV heads", sampled_heads, kv_heads));
  if (samples_queries()) parts.push_back(fmt::format("{} of {} eval queries", n_queries, all_queries));
  return fmt::format("{}", fmt::join(parts, ", "));
}

int TraceRecord::rows(Heads heads, int layer) const {
  if (has_equal_heads()) return most_rows(heads);
  return rows_of(heads, layer_query_heads[index(layer)], layer_kv_heads[index(layer)]);
}

double CellRecord::value(const MetricName& name) const {
  const auto found = values.find(name);
  return found == values.end() ? std::numeric_limits<double>::quiet_NaN() : found->second.values().back();
}

double CellRecord::half_width(const MetricName& name) const {
  const auto found = half_widths.find(name);
  return found == half_widths.end() ? std::numeric_limits<double>::quiet_NaN() : found->second;
}

void CellRecord::find_half_widths(const TraceRecord& of) {
  std::map<MetricName, SamplingError> errors;
  for (const auto& [name, in_pairs] : by_query) errors[name] = error_of_pairs(in_pairs, of.all_queries);
  for (const auto& [name, in_pairs] : by_layer)
    errors[name] = errors[name] + error_of_pairs(in_pairs, static_cast<int>(of.all_layers.size()));
  const auto layers = static_cast<double>(of.treated.size());
  const double share = of.samples_layers() ? layers / static_cast<double>(of.all_layers.size()) : 1.0;
  for (const auto& [name, in_pairs] : by_head)
    for (std::size_t l = 0; l < of.treated.size(); ++l)
      errors[name] =
          errors[name] +
          error_of_pairs(std::span(in_pairs).subspan(l * index(of.sampled_heads), index(of.sampled_heads)), of.kv_heads)
              .times(share / (layers * layers));
  for (const auto& [name, of_estimate] : errors)
    half_widths[name] = of_estimate.half_width(missed_by_intervals / of.looks);
}

double CellRecord::select_seconds() const {
  double all = 0;
  for (const CellSeconds& layer : seconds) all += layer.score + layer.select;
  return all;
}

const CellRecord* TraceCells::find(const std::string& id) const {
  for (const CellRecord& cell : cells)
    if (cell.id == id) return &cell;
  return nullptr;
}

std::optional<DifferingCondition> differing_condition(const TraceRecord& expected, const TraceRecord& found) {
  const auto list = [](const std::vector<int>& numbers) { return fmt::format("{}", fmt::join(numbers, ",")); };
  const auto sizes = [&](const TraceRecord& of) {
    return list({of.prompt, of.tokens, of.query_heads, of.kv_heads, of.head_dim, of.n_queries});
  };
  const auto sample = [](const TraceRecord& of) { return of.is_sampled() ? of.sample : std::string("none"); };
  const DifferingCondition all[] = {{"trace hash", expected.hash, found.hash},
                                    {"boundary", std::to_string(expected.boundary), std::to_string(found.boundary)},
                                    {"eval", expected.eval, found.eval},
                                    {"sample", sample(expected), sample(found)},
                                    {"treated layers", list(expected.treated), list(found.treated)},
                                    {"backend", expected.backend, found.backend},
                                    {"numerics", std::to_string(expected.numerics), std::to_string(found.numerics)},
                                    // The rest follows from the hash, unless the file is damaged.
                                    {"trace name", expected.name, found.name},
                                    {"layers", list(expected.layer_index), list(found.layer_index)},
                                    {"prompt, tokens, heads and eval queries", sizes(expected), sizes(found)}};
  const auto* differing = std::ranges::find_if(all, [](const auto& one) { return one.expected != one.found; });
  return differing == std::end(all) ? std::nullopt : std::optional(*differing);
}

namespace {

void check_format(const File& file, const std::filesystem::path& path) {
  if (!file.has_attribute("format") || file.string_attribute("format") != cells_format)
    throw Error{Refusal::input, path.string(), "format", cells_format, "another format"};
  if (const auto version = file.integer_attribute("version"); version != cells_version)
    throw Error{Refusal::input, path.string(), "results of another format version", std::to_string(cells_version),
                std::to_string(version)};
}

TraceRecord read_trace_record(const File& file, const std::filesystem::path& path) {
  check_format(file, path);
  const Group traces = file.group("traces");
  const std::vector<std::string> names = traces.names();
  if (names.size() != 1)
    throw Error{Refusal::input, traces.where(), "number of traces in one file", "1", std::to_string(names.size())};
  return read_conditions(traces.group(names.front()), names.front());
}

}  // namespace

void check_cells_format(const std::filesystem::path& path) { check_format(File::open(path), path); }

bool is_sampled(const std::filesystem::path& path) { return read_trace_record(File::open(path), path).is_sampled(); }

TraceCells read_cell_ids(const std::filesystem::path& path) {
  const File file = File::open(path);
  TraceCells all{read_trace_record(file, path), {}};
  for (const std::string& id : file.group("cells").names()) all.cells.push_back({.id = id});
  return all;
}

TraceCells read_trace_cells(const std::filesystem::path& path) {
  const File file = File::open(path);
  TraceCells all;
  all.trace = read_trace_record(file, path);
  const Group values = file.group("values"), seconds = file.group("seconds");
  all.trace.values = read_values(values.group("trace"), all.trace);
  all.trace.observable_seconds = read_shaped<double>(seconds, "observables", {all.trace.treated.size()});
  for (const std::string& id : file.group("cells").names()) {
    const Group of_cell = values.group(id);
    CellRecord cell = read_cell_facts(of_cell, id);
    cell.values = read_values(of_cell, all.trace);
    if (all.trace.samples_queries())
      cell.by_query = read_by_unit(file.group("by_query").group(id), index(all.trace.n_queries));
    if (all.trace.samples_heads())
      cell.by_head =
          read_by_unit(file.group("by_head").group(id), all.trace.treated.size() * index(all.trace.sampled_heads));
    if (all.trace.samples_layers())
      cell.by_layer = read_by_unit(file.group("by_layer").group(id), all.trace.treated.size());
    cell.find_half_widths(all.trace);
    cell.seconds = read_seconds(seconds, id, all.trace);
    all.cells.push_back(std::move(cell));
  }
  return all;
}

std::vector<LayerSelection> read_selections(const std::filesystem::path& path, const std::string& id,
                                            const TraceRecord& trace) {
  const File file = File::open(path);
  const Group group = file.group("cells").group(id);
  const Heads finest = read_heads(group);
  const std::size_t rows = index(trace.most_rows(finest)), tokens = index(trace.tokens);
  const hsize_t layers = extent(trace.layers);
  const auto numbers = [&](const char* name, const Shape& shape) {
    return read_shaped<std::int32_t>(group, name, shape);
  };
  const auto optional_numbers = [&](const char* name, const Shape& shape) {
    return group.member(name) == Group::Member::dataset ? numbers(name, shape) : std::vector<std::int32_t>();
  };
  const auto sources = numbers("layer_source", {layers});
  const auto granted = numbers("budget", {layers, rows});
  const auto sinks = numbers("sinks", {layers, rows}), recent = numbers("recent", {layers, rows});
  const auto offsets = read_shaped<std::int64_t>(group, "offsets", {layers * rows + 1});
  const auto positions = group.dataset("positions").values<std::int32_t>();
  check_positions(group, offsets, positions, trace.boundary);
  const auto slots = optional_numbers("slots", {positions.size()});
  const auto gone = optional_numbers("evicted_at", {layers, rows, tokens});
  const bool keeps_all = group.has_attribute("sets") && group.string_attribute("sets") == "all";

  std::vector<LayerSelection> selections;
  for (const Heads heads : read_layer_heads(group, finest, trace)) {
    const int layer = trace.treated[selections.size()];
    const std::size_t rows_here = index(trace.rows(finest, layer));
    LayerSelection& selection = selections.emplace_back(
        LayerSelection{KeptSet(heads, trace.rows(heads, layer), trace.boundary), {}, {}, {}, 0, {}, {}});
    const auto refuse = [&](const char* dataset, const std::string& what, const std::string& expected,
                            const auto& found) {
      throw Error{Refusal::input, group.where() + "/" + dataset, fmt::format("{} of layer {}", what, layer), expected,
                  fmt::format("{}", found)};
    };
    const auto source = std::ranges::find(trace.treated, sources[index(layer)]);
    if (source == trace.treated.end()) refuse("layer_source", "source", "a treated layer", sources[index(layer)]);
    selection.source = static_cast<int>(source - trace.treated.begin());
    for (int row = 0; row < selection.set.rows(); ++row) {
      // Rows of the finest granularity that share a set are equal.
      const std::size_t r = index(layer) * rows + index(row) * rows_here / index(selection.set.rows());
      const auto of_row = [&](const std::vector<std::int32_t>& all) {
        return std::span(all).subspan(index64(offsets[r]), index64(offsets[r + 1] - offsets[r]));
      };
      for (const std::int32_t position : of_row(positions)) selection.set.keep(row, position);
      for (int token = 0; keeps_all && token < trace.boundary; ++token) selection.set.keep(row, token);
      if (!slots.empty()) {
        std::vector<std::int32_t> ascending(of_row(slots).begin(), of_row(slots).end());
        std::ranges::sort(ascending);
        if (!std::ranges::equal(ascending, of_row(positions)))
          refuse("slots", "slots", "the kept positions in another order", "others");
        std::ranges::copy(of_row(slots), std::back_inserter(selection.slots));
      }
      if (granted[r] < 0) refuse("budget", "budget", "at least 0", granted[r]);
      if (sinks[r] < 0 || sinks[r] > trace.boundary)
        refuse("sinks", "sinks", fmt::format("0..{}", trace.boundary), sinks[r]);
      if (recent[r] < 0 || recent[r] > trace.boundary - sinks[r])
        refuse("recent", "recent tokens", fmt::format("0..{}", trace.boundary - sinks[r]), recent[r]);
      selection.granted.push_back(granted[r]);
      selection.sinks.push_back(sinks[r]);
      selection.recent.push_back(recent[r]);
      for (std::size_t token = 0; !gone.empty() && token < tokens; ++token) {
        const std::int32_t at = selection.evicted_at.emplace_back(gone[r * tokens + token]);
        if (at != -1 && (at < static_cast<std::int32_t>(token) || at >= trace.tokens))
          refuse("evicted_at", "query", fmt::format("-1, or {}..{}", token, trace.tokens - 1), at);
      }
    }
    if (std::ranges::all_of(selection.evicted_at, [](std::int32_t at) { return at < 0; })) selection.evicted_at.clear();
  }
  return selections;
}

void make_trace_cells(const TraceRecord& trace, const TraceResult& result, const std::vector<CellToWrite>& cells,
                      const std::optional<std::filesystem::path>& earlier, const TraceHeader* tokens_and_spans,
                      const std::function<void(std::span<const std::byte>)>& keep) {
  NewFile made(trace);
  std::optional<File> old;
  if (earlier) old = File::open(*earlier);
  write_trace_arrays(made.of_trace, old ? std::optional(old->group("traces").group(trace.name)) : std::nullopt, trace,
                     result);
  if (tokens_and_spans != nullptr) write_tokens_and_spans(*tokens_and_spans, made.of_trace);
  for (const auto& [cell, result_of_cell] : cells) {
    if (result_of_cell != nullptr)
      write_selection(made.cells.create_group(cell.id), cell, *result_of_cell, trace);
    else
      copy(old->group("cells"), cell.id, made.cells);
    made.describe(cell);
  }
  keep(made.file.image());
}

void write_joined_cells(const std::filesystem::path& path, const TraceCells& joined,
                        const std::vector<std::filesystem::path>& files) {
  NewFile made(joined.trace);
  Holders holders;
  for (const std::filesystem::path& of : files) {
    const File from = File::open(of);
    join(from.group("traces").group(joined.trace.name), of, made.of_trace, of, holders);
    join(from.group("cells"), of, made.cells, of, holders);
  }
  for (const CellRecord& cell : joined.cells) made.describe(cell);
  replace_file(path, made.file.image());
}

}  // namespace kvreplay
