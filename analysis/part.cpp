#include "analysis/part.h"

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
#include "hdf5/hdf5.h"
#include "hdf5/hdf5_copy.h"
#include "hdf5/mapped_image.h"
#include "parameters.h"
#include "trace/trace.h"
#include "trace/writer.h"

namespace kvreplay {
namespace {

using hdf5::File;
using hdf5::Group;
using hdf5::Shape;

constexpr const char* part_format = "kvpart";
constexpr std::int64_t part_version = 4;

std::size_t index(int i) { return static_cast<std::size_t>(i); }
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

std::vector<MetricExtent> read_metrics(const hdf5::Dataset& metrics, const PartTrace& trace) {
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
      throw Error{Refusal::input, metrics.where(), "metric", "one that there is, once", name.text()};
    const int rows = extent_of(metrics, fields[2], std::int64_t{trace.layers} + 1);
    if (rows != 1 && rows != trace.layers + 1)
      throw Error{Refusal::input, metrics.where(), "shape", fmt::format("1 or {} rows", trace.layers + 1), fields[2]};
    all.push_back({name, rows, extent_of(metrics, fields[3], std::int64_t{trace.query_heads} + 1)});
  }
  return all;
}

ValuesByMetric read_values(const Group& group, const PartTrace& trace) {
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

void write_conditions(Group& group, const PartTrace& trace) {
  group.set_attribute("trace_hash", trace.hash);
  group.set_attribute("model", trace.model);
  group.set_attribute("dtype", trace.dtype);
  group.set_attribute("synthetic", std::int64_t{trace.synthetic});
  const std::pair<const char*, int> sizes[] = {{"prompt", trace.prompt},     {"tokens", trace.tokens},
                                               {"layers", trace.layers},     {"query_heads", trace.query_heads},
                                               {"kv_heads", trace.kv_heads}, {"head_dim", trace.head_dim},
                                               {"boundary", trace.boundary}, {"n_queries", trace.n_queries}};
  for (const auto& [name, size] : sizes) group.set_attribute(name, std::int64_t{size});
  group.set_attribute("eval", trace.eval);
  group.set_attribute("backend", trace.backend);
  group.set_attribute("numerics", std::int64_t{trace.numerics});
  set_numbers(group, "treated", trace.treated);
  set_numbers(group, "layer_index", trace.layer_index);
}

/// What the rest of a part is read by.
void check_conditions(const Group& group, const PartTrace& trace) {
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
  if (trace.query_heads % trace.kv_heads != 0)
    throw Error{Refusal::input, group.where("query_heads"), "heads", fmt::format("a multiple of {}", trace.kv_heads),
                std::to_string(trace.query_heads)};
}

/// An array of the trace that need not be there.
bool has_array(const Group& group, const std::string& name, const Shape& shape) {
  if (group.member(name) != Group::Member::dataset) return false;
  require_shape(group.dataset(name), shape);
  return true;
}

PartTrace read_conditions(const Group& group, const std::string& name) {
  PartTrace trace;
  trace.name = name;
  trace.hash = group.string_attribute("trace_hash");
  trace.model = group.string_attribute("model");
  trace.dtype = group.string_attribute("dtype");
  trace.synthetic = group.integer_attribute("synthetic") != 0;
  const std::pair<const char*, int*> sizes[] = {{"prompt", &trace.prompt},     {"tokens", &trace.tokens},
                                                {"layers", &trace.layers},     {"query_heads", &trace.query_heads},
                                                {"kv_heads", &trace.kv_heads}, {"head_dim", &trace.head_dim},
                                                {"boundary", &trace.boundary}, {"n_queries", &trace.n_queries}};
  for (const auto& [attribute, size] : sizes) *size = count(group, attribute, 1);
  trace.eval = group.string_attribute("eval");
  trace.backend = group.string_attribute("backend");
  trace.numerics = count(group, "numerics", 0);
  trace.treated = numbers_of(group, "treated");
  trace.layer_index = numbers_of(group, "layer_index");
  check_conditions(group, trace);
  const hsize_t layers = extent(trace.layers), heads = extent(trace.query_heads), prompt = extent(trace.boundary);
  trace.has_eval_attention = has_array(group, "eval_attention", {layers, prompt});
  trace.has_eval_attention_by_head = has_array(group, "eval_attention_heads", {layers, heads, prompt});
  return trace;
}

using Words = std::pair<const char*, std::string PartCell::*>;
constexpr Words words[] = {{"role", &PartCell::role},   {"policy", &PartCell::policy}, {"params", &PartCell::params},
                           {"label", &PartCell::label}, {"paper", &PartCell::paper},   {"heads", &PartCell::heads},
                           {"agg", &PartCell::agg},     {"budget", &PartCell::budget}};

void write_cell_facts(Group& group, const PartCell& cell) {
  for (const auto& [name, member] : words) group.set_attribute(name, cell.*member);
  group.set_attribute("budget_tokens", std::int64_t{cell.budget_tokens});
  group.set_attribute("seed", std::to_string(cell.seed));
  if (!cell.source.empty()) group.set_attribute("source", cell.source);
  group.set_attribute("kept_tokens", cell.kept_tokens);
  group.set_attribute("scores", std::int64_t{cell.has_scores});
  group.set_attribute("sets", cell.keeps_all_changed ? "all" : "fixed");
}

PartCell read_cell_facts(const Group& group, const std::string& id) {
  PartCell cell;
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
  cell.has_scores = group.integer_attribute("scores") != 0;
  cell.keeps_all_changed = group.string_attribute("sets") == "all";
  return cell;
}

void write_seconds(Group& group, const std::string& id, const std::vector<CellSeconds>& seconds) {
  std::vector<double> flat;
  for (const CellSeconds& layer : seconds) flat.insert(flat.end(), {layer.score, layer.select});
  group.write(id, std::span<const double>(flat), {seconds.size(), 2});
}

std::vector<CellSeconds> read_seconds(const Group& group, const std::string& id, const PartTrace& trace) {
  const std::vector<double> flat = read_shaped<double>(group, id, {trace.treated.size(), 2});
  std::vector<CellSeconds> seconds;
  for (std::size_t i = 0; i + 1 < flat.size(); i += 2) seconds.push_back({flat[i], flat[i + 1]});
  return seconds;
}

/// [L, H] numbers of the sets of a cell, H the rows of the finest of them; `untreated` where a layer is left as it is.
class ByRow {
 public:
  ByRow(const CellResult& made, const PartTrace& trace) : made_(made), trace_(trace) {
    for (const LayerSelection& selection : made.selections)
      if (selection.set.rows() > rows_) {
        rows_ = selection.set.rows();
        heads_ = selection.set.heads();
      }
  }

  int rows() const { return rows_; }
  Heads heads() const { return heads_; }
  /// "layer,layer,kv": the granularity of each treated layer, empty where all have the finest.
  std::string coarser() const {
    std::string text;
    bool differ = false;
    for (const LayerSelection& selection : made_.selections) {
      text += (text.empty() ? "" : ",") + std::string(word(selection.set.heads()));
      differ = differ || selection.set.heads() != heads_;
    }
    return differ ? text : "";
  }
  /// The row of a treated layer's selection that stands for row `row` of the finest.
  int row_of(std::size_t treated, int row) const { return row / (rows_ / made_.selections[treated].set.rows()); }

  std::vector<std::int32_t> numbers(std::vector<int> LayerSelection::* member) const {
    std::vector<std::int32_t> all(index(trace_.layers) * index(rows_));
    for (std::size_t l = 0; l < trace_.treated.size(); ++l)
      for (int row = 0; row < rows_; ++row)
        all[index(trace_.treated[l]) * index(rows_) + index(row)] =
            (made_.selections[l].*member)[index(row_of(l, row))];
    return all;
  }

  /// [treated, H, words], a bit for each token.
  std::vector<std::int64_t> kept() const {
    std::vector<std::int64_t> all;
    for (std::size_t l = 0; l < made_.selections.size(); ++l)
      for (int row = 0; row < rows_; ++row)
        for (const std::uint64_t word : made_.selections[l].set.row_bits(row_of(l, row)))
          all.push_back(static_cast<std::int64_t>(word));
    return all;
  }

  /// Kept positions in the order of their slots, row after row; empty: all ascend.
  std::vector<std::int32_t> slots() const {
    std::vector<std::int32_t> all;
    bool ascend = true;
    if (std::ranges::all_of(made_.selections, &std::vector<std::int32_t>::empty, &LayerSelection::slots)) return all;
    for (std::size_t l = 0; l < made_.selections.size(); ++l)
      for (int row = 0; row < rows_; ++row) {
        const LayerSelection& selection = made_.selections[l];
        const std::vector<std::int32_t> kept = selection.set.positions(row_of(l, row));
        const std::span<const std::int32_t> own =
            selection.slots.empty() ? std::span(kept) : selection.slots_of(row_of(l, row));
        all.insert(all.end(), own.begin(), own.end());
        ascend = ascend && std::ranges::equal(own, kept);
      }
    return ascend ? std::vector<std::int32_t>() : all;
  }

  /// [L, H, T], -1 where a layer's sets do not change with time; empty: none do.
  std::vector<std::int32_t> evicted_at() const {
    std::vector<std::int32_t> all;
    const std::size_t tokens = index(trace_.tokens);
    for (std::size_t l = 0; l < trace_.treated.size(); ++l) {
      const LayerSelection& selection = made_.selections[l];
      if (!selection.changes_with_time()) continue;
      all.resize(index(trace_.layers) * index(rows_) * tokens, -1);
      for (int row = 0; row < rows_; ++row)
        std::ranges::copy(
            selection.evicted_of(row_of(l, row)),
            all.begin() + static_cast<std::ptrdiff_t>((index(trace_.treated[l]) * index(rows_) + index(row)) * tokens));
    }
    return all;
  }

 private:
  const CellResult& made_;
  const PartTrace& trace_;
  int rows_ = 0;
  Heads heads_ = Heads::kv;
};

/// All of a cell's group but the kept positions.
void write_selection(Group& group, const CellResult& made, const ByRow& by_row, const PartTrace& trace) {
  std::vector<std::int32_t> sources(index(trace.layers), -1);
  for (std::size_t l = 0; l < trace.treated.size(); ++l)
    sources[index(trace.treated[l])] = trace.treated[index(made.selections[l].source)];
  const hsize_t layers = extent(trace.layers), rows = extent(by_row.rows());
  if (const std::vector<std::int32_t> slots = by_row.slots(); !slots.empty()) group.write("slots", slots);
  group.write("layer_source", sources);
  const std::pair<const char*, std::vector<int> LayerSelection::*> columns[] = {
      {"budget", &LayerSelection::granted}, {"sinks", &LayerSelection::sinks}, {"recent", &LayerSelection::recent}};
  for (const auto& [name, member] : columns)
    group.write(name, std::span<const std::int32_t>(by_row.numbers(member)), {layers, rows});
  if (const std::vector<std::int32_t> gone = by_row.evicted_at(); !gone.empty())
    group.write("evicted_at", std::span<const std::int32_t>(gone), {layers, rows, extent(trace.tokens)});
  for (const auto& [variant, matrix] : made.matrices) write_matrix(group, "jaccard_" + variant, matrix);
  if (!made.scores.empty())
    group.write("scores", std::span<const float>(made.scores),
                {layers, made.scores.size() / index(trace.layers) / index(trace.boundary), extent(trace.boundary)});
  if (const std::string coarser = by_row.coarser(); !coarser.empty()) group.set_attribute("layer_heads", coarser);
}

void set_cell_attributes(Group& group, const PartCell& cell, const PartTrace& trace) {
  const std::pair<const char*, const std::string*> attributes[] = {
      {"trace", &trace.name},   {"trace_hash", &trace.hash}, {"policy", &cell.policy}, {"params", &cell.params},
      {"budget", &cell.budget}, {"heads", &cell.heads},      {"role", &cell.role}};
  for (const auto& [name, text] : attributes) group.set_attribute(name, *text);
  group.set_attribute("budget_tokens", std::int64_t{cell.budget_tokens});
  group.set_attribute("open_loop", std::int64_t{1});
  if (cell.keeps_all_changed) group.set_attribute("sets", "all");
}

/// Per-token arrays of the trace: what is new, and what the old part has of the rest.
void write_trace_arrays(Group& group, const std::optional<Group>& old, const PartTrace& trace,
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

std::vector<char> bytes_of(const hdf5::Dataset& dataset) {
  const hdf5::Type type = dataset.type();
  hdf5::require_fixed_size(type, dataset.where());
  std::vector<char> bytes(dataset.stored_elements() * type.bytes());
  if (!bytes.empty()) dataset.read(type, bytes.data());
  return bytes;
}

/// What several parts hold, in one group: what is not there yet is copied, what is must be equal.
class Joined {
 public:
  /// What is added from now on is of this part, which outlives this.
  void read(const std::filesystem::path& part) { part_ = &part; }

  void add(const Group& from, const std::string& name, Group& to) { add(from, name, to, *part_); }

 private:
  /// `holder` is the part that the group `to` was copied from.
  void add(const Group& from, const std::string& name, Group& to, const std::filesystem::path& holder) {
    const std::string key = to.where() + "/" + name;
    const Group::Member there = to.member(name);
    if (there == Group::Member::none) {
      copy(from, name, to);
      holders_[key] = part_;
      return;
    }
    const auto known = holders_.find(key);
    const std::filesystem::path& first = known == holders_.end() ? holder : *known->second;
    if (there == Group::Member::group) {
      const Group inner = from.group(name);
      Group joined = to.group(name);
      for (const std::string& member : inner.names()) add(inner, member, joined, first);
      return;
    }
    const hdf5::Dataset ours = to.dataset(name), theirs = from.dataset(name);
    if (ours.shape() != theirs.shape() || !(ours.type() == theirs.type()) || bytes_of(ours) != bytes_of(theirs))
      throw Error{Refusal::input, theirs.where(), "differs", "what " + first.string() + " has", "other numbers"};
  }

  const std::filesystem::path* part_ = nullptr;
  std::map<std::string, const std::filesystem::path*> holders_;
};

/// The image of a file in memory becomes the file.
void replace_file(const std::filesystem::path& path, File& file) {
  const std::span<const std::byte> image = file.image();
  kvreplay::replace_file(path, {reinterpret_cast<const char*>(image.data()), image.size()});
}

/// The granularity of each treated layer.
std::vector<Heads> read_layer_heads(const Group& group, Heads finest, const PartTrace& trace) {
  std::vector<Heads> of_layers(trace.treated.size(), finest);
  if (!group.has_attribute("layer_heads")) return of_layers;
  const std::string text = group.string_attribute("layer_heads");
  const std::vector<std::string_view> pieces = split_list(group.where("layer_heads"), text);
  if (pieces.size() != of_layers.size())
    throw Error{Refusal::input, group.where("layer_heads"), "layers", std::to_string(of_layers.size()),
                std::to_string(pieces.size())};
  for (std::size_t l = 0; l < pieces.size(); ++l) {
    of_layers[l] = heads_of(pieces[l]);
    if (pieces[l] != word(of_layers[l]) ||
        rows_of(of_layers[l], trace.query_heads, trace.kv_heads) > rows_of(finest, trace.query_heads, trace.kv_heads))
      throw Error{Refusal::input, group.where("layer_heads"), "heads", "kv, query or layer, no finer than heads", text};
  }
  return of_layers;
}

/// The kept positions of each treated layer, all in one granularity.
std::vector<KeptSet> read_sets(const Group& sets, const std::string& id, Heads heads, const PartTrace& trace) {
  constexpr int word_bits = 64;
  const int rows = rows_of(heads, trace.query_heads, trace.kv_heads);
  const std::size_t row_words = index((trace.boundary + word_bits - 1) / word_bits);
  const auto stored = read_shaped<std::int64_t>(sets, id, {trace.treated.size(), extent(rows), row_words});
  const std::vector<std::uint64_t> bits(stored.begin(), stored.end());
  std::vector<KeptSet> of_layers;
  for (std::size_t l = 0; l < trace.treated.size(); ++l) {
    KeptSet& set = of_layers.emplace_back(heads, rows, trace.boundary);
    for (int row = 0; row < rows; ++row) {
      const std::span<const std::uint64_t> of_row =
          std::span(bits).subspan((l * index(rows) + index(row)) * row_words, row_words);
      if (const int most = (trace.boundary - 1) % word_bits + 1; most < word_bits && of_row.back() >> most != 0)
        throw Error{Refusal::input, sets.where() + "/" + id, fmt::format("kept position of layer {}", trace.treated[l]),
                    fmt::format("0..{}", trace.boundary - 1), "one beyond"};
      set.keep(row, of_row);
    }
  }
  return of_layers;
}

/// The sets as selections.h5 has them: positions of all layers and rows, one after the other, and where each row
/// begins.
void write_positions(Group& group, std::span<const KeptSet> sets, const PartTrace& trace) {
  const bool without_rows = group.has_attribute("sets") && group.string_attribute("sets") == "all";
  std::vector<std::int64_t> offsets{0};
  std::vector<std::int32_t> positions;
  std::size_t kept_by_all = 0;
  for (const KeptSet& set : sets)
    for (int row = 0; row < set.rows(); ++row) kept_by_all += index(set.count(row));
  positions.reserve(kept_by_all);
  std::size_t next = 0;
  for (int layer = 0; layer < trace.layers; ++layer) {
    const bool treated = next < trace.treated.size() && trace.treated[next] == layer;
    for (int row = 0; row < sets.front().rows(); ++row) {
      if (treated && !without_rows) {
        const std::vector<std::int32_t> kept = sets[next].positions(row);
        positions.insert(positions.end(), kept.begin(), kept.end());
      }
      offsets.push_back(static_cast<std::int64_t>(positions.size()));
    }
    next += treated ? 1 : 0;
  }
  group.write("offsets", offsets);
  group.write("positions", positions);
}

/// One row of each that share a coarser granularity's set.
LayerSelection coarsened(const LayerSelection& fine, Heads heads, const PartTrace& trace) {
  if (fine.set.heads() == heads) return fine;
  const int rows = rows_of(heads, trace.query_heads, trace.kv_heads);
  const int shared = fine.set.rows() / rows;
  LayerSelection coarse{KeptSet(heads, rows, fine.set.tokens()), {}, {}, {}, fine.source, {}, {}};
  for (int row = 0; row < rows; ++row) {
    for (const std::int32_t position : fine.set.positions(row * shared)) coarse.set.keep(row, position);
    coarse.sinks.push_back(fine.sinks[index(row * shared)]);
    coarse.recent.push_back(fine.recent[index(row * shared)]);
    coarse.granted.push_back(fine.granted[index(row * shared)]);
    if (fine.changes_with_time())
      std::ranges::copy(fine.evicted_of(row * shared), std::back_inserter(coarse.evicted_at));
    if (!fine.slots.empty()) std::ranges::copy(fine.slots_of(row * shared), std::back_inserter(coarse.slots));
  }
  return coarse;
}

/// A row's slots must hold its kept positions, each once.
void add_slots(LayerSelection& selection, std::span<const std::int32_t> slots, int row, const Group& group) {
  std::vector<std::int32_t> ascending(slots.begin(), slots.end());
  std::ranges::sort(ascending);
  if (ascending != selection.set.positions(row))
    throw Error{Refusal::input, group.where() + "/slots", "slots", "the kept positions in another order", "others"};
  selection.slots.insert(selection.slots.end(), slots.begin(), slots.end());
}

}  // namespace

const PartCell* Part::find(const std::string& id) const {
  for (const PartCell& cell : cells)
    if (cell.id == id) return &cell;
  return nullptr;
}

std::optional<DifferingCondition> differing_condition(const PartTrace& expected, const PartTrace& found) {
  const auto list = [](const std::vector<int>& numbers) { return fmt::format("{}", fmt::join(numbers, ",")); };
  const auto sizes = [&](const PartTrace& of) {
    return list({of.prompt, of.tokens, of.query_heads, of.kv_heads, of.head_dim, of.n_queries});
  };
  const DifferingCondition all[] = {{"trace hash", expected.hash, found.hash},
                                    {"boundary", std::to_string(expected.boundary), std::to_string(found.boundary)},
                                    {"eval", expected.eval, found.eval},
                                    {"treated layers", list(expected.treated), list(found.treated)},
                                    {"backend", expected.backend, found.backend},
                                    {"numerics", std::to_string(expected.numerics), std::to_string(found.numerics)},
                                    // The rest follows from the hash, unless the part is damaged.
                                    {"trace name", expected.name, found.name},
                                    {"layers", list(expected.layer_index), list(found.layer_index)},
                                    {"prompt, tokens, heads and eval queries", sizes(expected), sizes(found)}};
  const auto* differing = std::ranges::find_if(all, [](const auto& one) { return one.expected != one.found; });
  return differing == std::end(all) ? std::nullopt : std::optional(*differing);
}

namespace {

void check_format(const File& file, const std::filesystem::path& path) {
  if (!file.has_attribute("format") || file.string_attribute("format") != part_format)
    throw Error{Refusal::input, path.string(), "format", part_format, "another file"};
  if (const auto version = file.integer_attribute("version"); version != part_version)
    throw Error{Refusal::input, path.string(), "part of another version of kvreplay", std::to_string(part_version),
                std::to_string(version)};
}

}  // namespace

void check_part_format(const std::filesystem::path& path) { check_format(File::open(path), path); }

Part read_part(const std::filesystem::path& path) {
  const File file = File::open(path);
  check_format(file, path);
  const Group traces = file.group("traces");
  const std::vector<std::string> names = traces.names();
  if (names.size() != 1)
    throw Error{Refusal::input, traces.where(), "traces of one part", "1", std::to_string(names.size())};
  Part part;
  part.trace = read_conditions(traces.group(names.front()), names.front());
  const Group values = file.group("values"), seconds = file.group("seconds");
  part.trace.values = read_values(values.group("trace"), part.trace);
  part.trace.observable_seconds = read_shaped<double>(seconds, "observables", {part.trace.treated.size()});
  for (const std::string& id : file.group("cells").names()) {
    const Group of_cell = values.group(id);
    PartCell cell = read_cell_facts(of_cell, id);
    cell.values = read_values(of_cell, part.trace);
    cell.seconds = read_seconds(seconds, id, part.trace);
    part.cells.push_back(std::move(cell));
  }
  return part;
}

std::vector<LayerSelection> read_selections(const std::filesystem::path& path, const std::string& id,
                                            const PartTrace& trace) {
  const File file = File::open(path);
  const Group group = file.group("cells").group(id);
  const Heads heads = read_heads(group);
  const int rows = rows_of(heads, trace.query_heads, trace.kv_heads);
  const hsize_t layers = extent(trace.layers);
  const auto sources = read_shaped<std::int32_t>(group, "layer_source", {layers});
  const auto granted = read_shaped<std::int32_t>(group, "budget", {layers, extent(rows)});
  const auto sinks = read_shaped<std::int32_t>(group, "sinks", {layers, extent(rows)});
  const auto recent = read_shaped<std::int32_t>(group, "recent", {layers, extent(rows)});
  const std::vector<KeptSet> sets = read_sets(file.group("sets"), id, heads, trace);
  const auto optional_numbers = [&](const char* name, const Shape& shape) {
    return group.member(name) == Group::Member::dataset ? read_shaped<std::int32_t>(group, name, shape)
                                                        : std::vector<std::int32_t>();
  };
  std::size_t kept = 0;
  for (const KeptSet& set : sets)
    for (int row = 0; row < rows; ++row) kept += index(set.count(row));
  const auto slots = optional_numbers("slots", {kept});
  const auto gone = optional_numbers("evicted_at", {layers, extent(rows), extent(trace.tokens)});
  const std::vector<Heads> of_layers = read_layer_heads(group, heads, trace);

  std::vector<LayerSelection> selections;
  std::size_t before = 0;  // slots of the layers and rows that have been read
  for (const int layer : trace.treated) {
    LayerSelection selection{sets[selections.size()], {}, {}, {}, 0, {}, {}};
    const auto refuse = [&](const char* dataset, const char* what, const std::string& expected, const auto& found) {
      throw Error{Refusal::input, group.where() + "/" + dataset, fmt::format("{} of layer {}", what, layer), expected,
                  fmt::format("{}", found)};
    };
    for (int row = 0; row < rows; ++row) {
      const std::size_t r = index(layer) * index(rows) + index(row);
      if (!slots.empty()) {
        const std::size_t count = index(selection.set.count(row));
        add_slots(selection, std::span(slots).subspan(before, count), row, group);
        before += count;
      }
      if (granted[r] < 0) refuse("budget", "budget", "at least 0", granted[r]);
      if (sinks[r] < 0 || sinks[r] > trace.boundary)
        refuse("sinks", "sinks", fmt::format("0..{}", trace.boundary), sinks[r]);
      if (recent[r] < 0 || recent[r] > trace.boundary - sinks[r])
        refuse("recent", "recent tokens", fmt::format("0..{}", trace.boundary - sinks[r]), recent[r]);
      selection.granted.push_back(granted[r]);
      selection.sinks.push_back(sinks[r]);
      selection.recent.push_back(recent[r]);
    }
    const auto source = std::ranges::find(trace.treated, sources[index(layer)]);
    if (source == trace.treated.end()) refuse("layer_source", "source", "a treated layer", sources[index(layer)]);
    selection.source = static_cast<int>(source - trace.treated.begin());
    if (!gone.empty()) {
      const std::size_t tokens = index(trace.tokens);
      const std::span<const std::int32_t> of_layer =
          std::span(gone).subspan(index(layer) * index(rows) * tokens, index(rows) * tokens);
      for (std::size_t i = 0; i < of_layer.size(); ++i)
        if (of_layer[i] != -1 && (of_layer[i] < static_cast<std::int32_t>(i % tokens) || of_layer[i] >= trace.tokens))
          refuse("evicted_at", "query", fmt::format("-1, or {}..{}", i % tokens, trace.tokens - 1), of_layer[i]);
      if (std::ranges::any_of(of_layer, [](std::int32_t at) { return at >= 0; }))
        selection.evicted_at.assign(of_layer.begin(), of_layer.end());
    }
    selections.push_back(coarsened(selection, of_layers[selections.size()], trace));
  }
  return selections;
}

void write_part(const std::filesystem::path& path, const PartTrace& trace, const TraceResult& result,
                const std::vector<CellToWrite>& cells, const std::optional<std::filesystem::path>& earlier,
                const TraceHeader* tokens_and_spans) {
  std::optional<File> old;
  if (earlier) old = File::open(*earlier);
  File file = File::create_in_memory(path.string());
  {
    file.set_attribute("format", part_format);
    file.set_attribute("version", part_version);
    Group traces = file.create_group("traces");
    Group of_trace = traces.create_group(trace.name);
    write_conditions(of_trace, trace);
    std::optional<Group> old_trace;
    if (old) old_trace = old->group("traces").group(trace.name);
    write_trace_arrays(of_trace, old_trace, trace, result);
    if (tokens_and_spans != nullptr) write_tokens_and_spans(*tokens_and_spans, of_trace);

    Group of_cells = file.create_group("cells"), sets = file.create_group("sets"), values = file.create_group("values"),
          seconds = file.create_group("seconds");
    Group of_trace_values = values.create_group("trace");
    write_values(of_trace_values, trace.values);
    seconds.write("observables", trace.observable_seconds);
    for (const auto& [cell, made] : cells) {
      if (made != nullptr) {
        Group group = of_cells.create_group(cell.id);
        set_numbers(group, "layers", trace.treated);
        const ByRow by_row(*made, trace);
        write_selection(group, *made, by_row, trace);
        const std::vector<std::int64_t> kept = by_row.kept();
        const hsize_t rows = extent(by_row.rows()), all_rows = trace.treated.size() * rows;
        sets.write(cell.id, std::span(kept), {trace.treated.size(), rows, kept.size() / all_rows});
      } else {
        copy(old->group("cells"), cell.id, of_cells);
        copy(old->group("sets"), cell.id, sets);
      }
      Group group = of_cells.group(cell.id);
      set_cell_attributes(group, cell, trace);
      Group of_cell = values.create_group(cell.id);
      write_cell_facts(of_cell, cell);
      write_values(of_cell, cell.values);
      write_seconds(seconds, cell.id, cell.seconds);
    }
  }
  replace_file(path, file);
}

void write_joined_part(const std::filesystem::path& path, const Part& joined,
                       const std::vector<std::filesystem::path>& parts) {
  File file = File::create_in_memory(path.string());
  {
    file.set_attribute("format", part_format);
    file.set_attribute("version", part_version);
    Group traces = file.create_group("traces"), of_cells = file.create_group("cells"), sets = file.create_group("sets"),
          values = file.create_group("values"), seconds = file.create_group("seconds");
    Joined content;
    for (const std::filesystem::path& part : parts) {
      content.read(part);
      const File from = File::open(part);
      content.add(from.group("traces"), joined.trace.name, traces);
      for (const auto& [name, to] : {std::pair{"cells", &of_cells}, std::pair{"sets", &sets}}) {
        const Group all = from.group(name);
        for (const std::string& id : all.names())
          if (joined.find(id) != nullptr) content.add(all, id, *to);
      }
    }
    Group of_trace_values = values.create_group("trace");
    write_values(of_trace_values, joined.trace.values);
    seconds.write("observables", joined.trace.observable_seconds);
    for (const PartCell& cell : joined.cells) {
      // A part may have been replaced since `joined` was read.
      for (const Group* of : {&of_cells, &sets})
        if (of->member(cell.id) == Group::Member::none)
          throw Error{Refusal::input, path.string(), cell.label + " at " + cell.budget + " is in no part any more"};
      Group group = of_cells.group(cell.id);
      set_cell_attributes(group, cell, joined.trace);
      Group of_cell = values.create_group(cell.id);
      write_cell_facts(of_cell, cell);
      write_values(of_cell, cell.values);
      write_seconds(seconds, cell.id, cell.seconds);
    }
  }
  replace_file(path, file);
}

struct SelectionsFile::Content {
  explicit Content(const std::filesystem::path& path) : image(path), file(File::create_in(image, path.string())) {}
  MappedImage image;
  File file;
};

SelectionsFile::SelectionsFile(const std::filesystem::path& path) : content_(std::make_unique<Content>(path)) {
  File& file = content_->file;
  file.set_attribute("format", "kvselections");
  file.set_attribute("version", std::int64_t{1});
  file.create_group("traces");
  file.create_group("cells");
}

SelectionsFile::~SelectionsFile() = default;

void SelectionsFile::add(const std::filesystem::path& part) {
  const File from = File::open(part);
  const Group from_traces = from.group("traces"), from_cells = from.group("cells"), sets = from.group("sets");
  Group traces = content_->file.group("traces"), cells = content_->file.group("cells");
  const std::string name = from_traces.names().front();
  const PartTrace trace = read_conditions(from_traces.group(name), name);
  copy(from_traces, name, traces);
  // A copy of a trace under another name has the same cells, number by number.
  for (const std::string& id : from_cells.names()) {
    if (cells.member(id) != Group::Member::none) continue;
    copy(from_cells, id, cells);
    Group cell = cells.group(id);
    write_positions(cell, read_sets(sets, id, read_heads(cell), trace), trace);
    content_->image.require_room();
  }
}

void SelectionsFile::complete() {
  content_->file.close();
  content_->image.complete();
}

void SelectionsFile::finish() { content_->image.finish(); }

}  // namespace kvreplay
