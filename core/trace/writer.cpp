#include "trace/writer.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cstring>
#include <ctime>
#include <optional>
#include <utility>
#include <vector>

#include "error.h"
#include "hash.h"
#include "hdf5/hdf5.h"
#include "hdf5/partial_file.h"
#include "trace/header.h"
#include "trace/schema.h"

namespace kvreplay {
namespace {

std::string now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

/// A tensor on its way into the file: its bytes go straight to where HDF5 put it.
struct Growing {
  std::string object;
  hdf5::Dataset dataset;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t row_bytes = 0;
  std::uint64_t written = 0;
  Hash hash = {};
};

void write_attributes(const TraceHeader& header, const std::string& group, hdf5::Object& object) {
  for (const SchemaEntry& entry : schema().attributes) {
    if (entry.group != group || entry.object == "/@complete") continue;
    const auto value = header_value(header, entry);
    if (!value) continue;
    if (const auto* text = std::get_if<std::string>(&*value)) object.set_attribute(entry.name, std::string_view(*text));
    if (const auto* integer = std::get_if<std::int64_t>(&*value)) object.set_attribute(entry.name, *integer);
    if (const auto* number = std::get_if<double>(&*value)) object.set_attribute(entry.name, *number);
  }
}

template <class Element>
void write_vector(const SchemaEntry& entry, int rows, const std::vector<Element>& elements, hdf5::Group& root) {
  hdf5::Shape shape{elements.size()};
  if (entry.shape.size() == 2) shape = {static_cast<hsize_t>(rows), elements.size() / static_cast<std::size_t>(rows)};
  root.write<Element>(entry.object.substr(1), elements, shape);
}

void write_spans(const std::string& dataset, const std::vector<Span>& spans, hdf5::Group& root) {
  std::size_t name_bytes = 1, kind_bytes = 1;
  for (const Span& span : spans) {
    name_bytes = std::max(name_bytes, span.name.size());
    kind_bytes = std::max(kind_bytes, span.kind.size());
  }
  const std::size_t begin_at = name_bytes + kind_bytes, end_at = begin_at + 4, size = end_at + 4;
  hdf5::Type type = hdf5::Type::compound(size);
  type.insert("name", 0, hdf5::Type::utf8(name_bytes));
  type.insert("kind", name_bytes, hdf5::Type::utf8(kind_bytes));
  type.insert("begin", begin_at, hdf5::Type::int32());
  type.insert("end", end_at, hdf5::Type::int32());
  std::string rows(size * spans.size(), '\0');
  for (std::size_t s = 0; s < spans.size(); ++s) {
    char* row = rows.data() + s * size;
    spans[s].name.copy(row, name_bytes);
    spans[s].kind.copy(row + name_bytes, kind_bytes);
    const std::int32_t begin = spans[s].begin, end = spans[s].end;
    std::memcpy(row + begin_at, &begin, 4);
    std::memcpy(row + end_at, &end, 4);
  }
  root.create_dataset(dataset, type, {spans.size()}).write(type, rows.data());
}

/// A dataset of a header, where it has it; its group exists.
void write_dataset(const TraceHeader& header, const SchemaEntry& entry, hdf5::Group& root) {
  const auto value = header_value(header, entry);
  if (!value) return;
  const std::string name = entry.object.substr(1);
  const std::string first = entry.shape.empty() ? "" : entry.shape[0];
  const int rows = first == "T" ? header.tokens() : first == "T-P" ? header.continuation() : header.layers;
  if (const auto* text = std::get_if<std::string>(&*value)) root.write_text(name, *text);
  if (const auto* spans = std::get_if<std::vector<Span>>(&*value)) write_spans(name, *spans, root);
  if (const auto* integers = std::get_if<std::vector<std::int32_t>>(&*value))
    write_vector(entry, rows, *integers, root);
  if (const auto* numbers = std::get_if<std::vector<double>>(&*value)) write_vector(entry, rows, *numbers, root);
}

}  // namespace

void write_tokens_and_spans(const TraceHeader& header, hdf5::Group& to) {
  hdf5::Group tokens = to.create_group("tokens");
  write_attributes(header, "/tokens", tokens);
  for (const SchemaEntry& entry : schema().datasets)
    if (entry.group == "/tokens" || entry.group == "/") write_dataset(header, entry, to);
}

struct TraceWriter::State {
  State(std::filesystem::path name, const TraceHeader& with, Existing existing)
      : path(std::move(name)), header(with), rules(path.string()) {
    if (header.created.empty()) header.created = now();
    rules.check_header(header);
    if (existing == Existing::refuse && std::filesystem::exists(path))
      throw Error{Refusal::input, path.string(), "exists", "a new name, or --force to replace it", "a file"};
    partial.emplace(path);
  }
  ~State() {
    growing.clear();
    layer_group.reset();
    if (file) {
      try {
        file->close();
      } catch (const Error&) {
        // The file is thrown away; why it cannot be closed has been said, or is said by whoever destroys the writer.
      }
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void flush() {
    file->flush();
    partial->reserve_again();
  }

  std::uint64_t header_bytes() const {
    return header.text.size() + 4 * (header.ids.size() + header.offsets.size()) + 8 * header.inv_freq.size() +
           16 * header.sliding_window.size() + 1024 * header.spans.size();
  }

  void write_header() {
    partial->reserve(header_bytes());
    file.emplace(hdf5::File::create(partial->path()));
    partial->reserve_again();
    partial->reserve(header_bytes());
    write_attributes(header, "/", *file);
    for (const SchemaGroup& group : schema().groups) {
      if (group.path.ends_with("{layer}") || !has_group(header, group.path)) continue;
      hdf5::Group made = file->create_group(group.path.substr(1));
      write_attributes(header, group.path, made);
    }
    for (const SchemaEntry& entry : schema().datasets)
      if (!entry.per_layer()) write_dataset(header, entry, *file);
    flush();
  }

  void begin_layer(DType stored, std::span<const std::int32_t> positions) {
    end_layer();
    if (layer == header.layers)
      throw Error{Refusal::input, rules.where("/layers"), "layers", fmt::format("{}", header.layers), "one more"};
    layer_group.emplace(file->create_group(fmt::format("layers/{:03}", layer)));
    rules.bind("Tq", header.tokens());
    if (!positions.empty()) {
      const SchemaEntry& entry = schema().entry("/layers/{layer}/q_positions");
      const std::vector<std::int32_t> values(positions.begin(), positions.end());
      rules.bind("Tq", static_cast<std::int64_t>(values.size()));
      rules.check_value(object_in_layer(entry, layer), entry, values);
      layer_group->write(entry.name, values);
    }
    for (const char* name : {"q", "k", "v"}) begin_tensor(name, stored);
    ++layer;
  }

  /// The dataset is made and its place in the file reserved, so that a full disk shows here.
  void begin_tensor(const std::string& name, DType stored) {
    const SchemaEntry& entry = schema().entry("/layers/{layer}/" + name);
    hdf5::Shape shape;
    for (const std::string& dimension : entry.shape) shape.push_back(static_cast<hsize_t>(rules.size(dimension)));
    hdf5::Dataset dataset = layer_group->create_dataset(name, hdf5::Type::of(stored), shape);
    const std::uint64_t bytes = hdf5::bytes(shape, size_of(stored));
    const std::uint64_t offset = place(dataset, bytes);
    growing.push_back({.object = object_in_layer(entry, layer),
                       .dataset = std::move(dataset),
                       .offset = offset,
                       .bytes = bytes,
                       .row_bytes = shape.back() * size_of(stored)});
  }

  std::uint64_t place(const hdf5::Dataset& dataset, std::uint64_t bytes) {
    const auto offset = dataset.offset();
    if (!offset) throw Error{Refusal::internal, dataset.where(), "has no place in the file"};
    partial->reserve(*offset + bytes);
    return *offset;
  }

  void append(std::size_t tensor, std::span<const std::byte> rows) {
    if (growing.empty()) throw Error{Refusal::input, rules.where("/layers"), "rows", "a layer that was begun", "none"};
    Growing& to = growing[tensor];
    if (rows.size() % to.row_bytes != 0 || rows.size() > to.bytes - to.written)
      throw Error{Refusal::input, rules.where(to.object), "rows",
                  fmt::format("at most {} rows of {} bytes", (to.bytes - to.written) / to.row_bytes, to.row_bytes),
                  fmt::format("{} bytes", rows.size())};
    partial->write(to.offset + to.written, rows);
    to.hash.update(rows);
    to.written += rows.size();
  }

  void write_output_projection(DType stored, int hidden, std::span<const std::byte> elements) {
    const SchemaEntry& entry = schema().entry("/layers/{layer}/wo");
    const std::string object = object_in_layer(entry, layer - 1);
    if (growing.empty()) throw Error{Refusal::input, rules.where("/layers"), "rows", "a layer that was begun", "none"};
    const std::uint64_t width =
        static_cast<std::uint64_t>(header.query_heads) * static_cast<std::uint64_t>(header.head_dim);
    const std::uint64_t rows = hidden > 0 ? static_cast<std::uint64_t>(hidden) : 0;
    rules.check_shape(object, entry, {rows, width});
    if (elements.size() != rows * width * size_of(stored))
      throw Error{Refusal::input, rules.where(object), "length",
                  fmt::format("{} bytes", rows * width * size_of(stored)), fmt::format("{} bytes", elements.size())};
    hdf5::Dataset dataset = layer_group->create_dataset(entry.name, hdf5::Type::of(stored), {rows, width});
    partial->write(place(dataset, elements.size()), elements);
    dataset.set_attribute("xxh3", std::string_view(hash_of(elements)));
  }

  void end_layer() {
    for (Growing& tensor : growing) {
      if (tensor.written != tensor.bytes)
        throw Error{Refusal::input, rules.where(tensor.object), "rows",
                    fmt::format("{}", tensor.bytes / tensor.row_bytes),
                    fmt::format("{}", tensor.written / tensor.row_bytes)};
      tensor.dataset.set_attribute("xxh3", std::string_view(tensor.hash.digits()));
    }
    growing.clear();
    layer_group.reset();
  }

  void finish() {
    end_layer();
    if (layer != header.layers)
      throw Error{Refusal::input, rules.where("/layers"), "layers", fmt::format("{}", header.layers),
                  fmt::format("{}", layer)};
    flush();
    partial->sync();
    file->set_attribute("complete", std::int64_t{1});
    file->close();
    file.reset();
    partial->trim();
    Trace::open(partial->path());  // what gets the name is a trace
    partial->finish();
  }

  std::filesystem::path path;
  TraceHeader header;
  Rules rules;
  std::optional<PartialFile> partial;  // made once the header has been checked
  std::optional<hdf5::File> file;
  std::optional<hdf5::Group> layer_group;
  std::vector<Growing> growing;  // q, k, v of the layer that was begun
  int layer = 0;                 // layers begun
};

TraceWriter::TraceWriter(std::filesystem::path path, const TraceHeader& header, Existing existing)
    : state_(std::make_unique<State>(std::move(path), header, existing)) {
  state_->write_header();
}
TraceWriter::TraceWriter(TraceWriter&&) noexcept = default;
TraceWriter& TraceWriter::operator=(TraceWriter&&) noexcept = default;
TraceWriter::~TraceWriter() = default;

void TraceWriter::begin_layer(DType stored, std::span<const std::int32_t> query_positions) {
  state_->begin_layer(stored, query_positions);
}
void TraceWriter::append_q(std::span<const std::byte> rows) { state_->append(0, rows); }
void TraceWriter::append_k(std::span<const std::byte> rows) { state_->append(1, rows); }
void TraceWriter::append_v(std::span<const std::byte> rows) { state_->append(2, rows); }
void TraceWriter::write_output_projection(DType stored, int hidden, std::span<const std::byte> elements) {
  state_->write_output_projection(stored, hidden, elements);
}
void TraceWriter::finish() { state_->finish(); }

}  // namespace kvreplay
