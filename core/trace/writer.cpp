#include "trace/writer.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "error.h"
#include "hash.h"
#include "hdf5/hdf5.h"
#include "hdf5/mapping.h"
#include "hdf5/partial_file.h"
#include "open_file.h"
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
  std::uint64_t heads = 0;
  std::uint64_t row_bytes = 0;
  std::uint64_t written = 0;
  bool in_order = true;  // the hash is that of all that was written
  Hash hash = {};
};

void write_attribute(const SchemaEntry& entry, const Value& value, hdf5::Object& object) {
  if (const auto* text = std::get_if<std::string>(&value)) object.set_attribute(entry.name, std::string_view(*text));
  if (const auto* integer = std::get_if<std::int64_t>(&value)) object.set_attribute(entry.name, *integer);
  if (const auto* number = std::get_if<double>(&value)) object.set_attribute(entry.name, *number);
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

/// A dataset of any group that exists. `object`: "/tokens/ids".
void write_dataset(const std::string& object, const Value& value, const std::vector<std::uint64_t>& size,
                   hdf5::Group& root) {
  const std::string name = object.substr(1);
  const hdf5::Shape shape(size.begin(), size.end());
  if (const auto* text = std::get_if<std::string>(&value)) root.write_text(name, *text);
  if (const auto* spans = std::get_if<std::vector<Span>>(&value)) write_spans(name, *spans, root);
  if (const auto* integers = std::get_if<std::vector<std::int32_t>>(&value))
    root.write<std::int32_t>(name, *integers, shape);
  if (const auto* numbers = std::get_if<std::vector<double>>(&value)) root.write<double>(name, *numbers, shape);
}

}  // namespace

void write_tokens_and_spans(const TraceHeader& header, hdf5::Group& to) {
  hdf5::Group tokens = to.create_group("tokens");
  for (const SchemaEntry& entry : schema().attributes)
    if (entry.group == "/tokens") write_attribute(entry, *header_value(header, entry), tokens);
  for (const SchemaEntry& entry : schema().datasets)
    if (entry.group == "/tokens" || entry.group == "/")
      if (const auto value = header_value(header, entry))
        write_dataset(entry.object, *value, dataset_shape(header, entry, *value), to);
}

void refuse_existing(const std::filesystem::path& path, Existing existing) {
  if (existing == Existing::refuse && std::filesystem::exists(path))
    throw Error{Refusal::input, path.string(), "exists", "another name, or --force to overwrite", "a file"};
}

struct TraceWriter::State {
  explicit State(const std::filesystem::path& path) : rules(path.string()), partial(path) {
    partial.reserve(0);
    file.emplace(hdf5::File::create(partial.path()));
    partial.reserve_again();
  }
  ~State() {
    growing.clear();
    if (file) {
      try {
        file->close();
      } catch (const Error&) {
        // The file is thrown away; why it cannot be closed has been said, or is said by whoever destroys the writer.
      }
    }
  }

  void flush() {
    file->flush();
    partial.reserve_again();
  }

  /// Room for the header as it is known now, behind all that was written.
  void reserve_header() {
    const hdf5::Lock lock;
    hsize_t end = 0;
    if (H5Fget_filesize(file->id(), &end) < 0) throw hdf5::failure(file->where(), "has no length");
    partial.reserve(end + header.text.size() + 4 * (header.ids.size() + header.offsets.size()) +
                    8 * (header.inv_freq.size() + header.sinks.size()) + 48 * header.sliding_window.size() +
                    1024 * header.spans.size() + 20 * header.reference_ids.size() + 8 * header.reference_tail.size() +
                    4 * (header.reconstruction_ids.size() + header.reconstruction_passes.size()));
  }

  void write_header(const TraceHeader& all) {
    write_entries(schema().attributes, all);
    for (const SchemaGroup& group : schema().groups)
      if (!group.path.ends_with("{layer}") && has_group(all, group.path)) group_at(group.path);
    write_entries(schema().datasets, all);
    flush();
  }

  void write_entries(const std::vector<SchemaEntry>& entries, const TraceHeader& all) {
    for (const SchemaEntry& entry : entries) {
      if (entry.per_layer() || entry.object == "/@complete" || entry.object == "/@version") continue;
      if (const auto value = header_value(all, entry)) write(entry.object, *value, dataset_shape(all, entry, *value));
    }
  }

  /// The group, made with those above it where it is not there yet.
  hdf5::Group group_at(const std::string& name) {
    if (!groups.insert(name).second) return file->group(name.substr(1));
    const std::string above = name.substr(0, name.rfind('/'));
    if (!above.empty()) group_at(above);
    if (above == "/layers") {
      rules.bind("Tq", header.tokens());
      ++layers;
    }
    return file->create_group(name.substr(1));
  }

  void write(const std::string& object, Value value, const std::vector<std::uint64_t>& shape) {
    const SchemaEntry& entry = schema().rule(object);
    if (entry.group == "/model/rope") header.has_rope = true;
    std::optional<hdf5::Group> group;
    if (entry.group != "/") group.emplace(group_at(object.substr(0, object.find_last_of("/@"))));
    if (entry.name == "q_positions") rules.bind("Tq", static_cast<std::int64_t>(shape.at(0)));
    if (!entry.attribute) rules.check_shape(object, entry, shape);
    rules.check_value(object, entry, value);
    if (!entry.per_layer()) set_header_value(header, entry, value);
    reserve_header();
    if (entry.attribute)
      write_attribute(entry, value, group ? static_cast<hdf5::Object&>(*group) : *file);
    else
      write_dataset(object, value, shape, *file);
  }

  void begin_layer(DType stored, std::span<const std::int32_t> positions) {
    end_tensors();
    if (layers == header.layers)
      throw Error{Refusal::input, rules.where("/layers"), "layers", fmt::format("{}", header.layers), "more"};
    const auto object = [layer = layers](const char* name) { return fmt::format("/layers/{:03}/{}", layer, name); };
    rules.bind_layer(header, layers);
    group_at(fmt::format("/layers/{:03}", layers));
    if (!positions.empty())
      write(object("q_positions"), std::vector<std::int32_t>(positions.begin(), positions.end()), {positions.size()});
    for (const char* name : {"q", "k", "v"}) {
      if (!left_out_by(schema().rule(object(name)), header, layers - 1).empty()) continue;
      std::vector<std::uint64_t> shape;
      for (const std::string& dimension : schema().rule(object(name)).shape)
        shape.push_back(static_cast<std::uint64_t>(rules.size(dimension)));
      begin_tensor(object(name), stored, shape);
    }
  }

  /// The dataset is made and its place in the file reserved, so that a full disk shows here.
  std::uint64_t begin_tensor(const std::string& object, DType stored, const std::vector<std::uint64_t>& shape) {
    const SchemaEntry& entry = schema().rule(object);
    if (entry.type != "real" && entry.type != name_of(stored))
      throw Error{Refusal::input, rules.where(object), "type", entry.type, name_of(stored)};
    hdf5::Group group = group_at(object.substr(0, object.rfind('/')));
    rules.bind_layer(header, std::stoi(object.substr(std::string_view("/layers/").size())));
    rules.check_shape(object, entry, shape);
    hdf5::Dataset dataset = group.create_dataset(entry.name, hdf5::Type::of(stored), {shape.begin(), shape.end()});
    const auto offset = dataset.offset();
    if (!offset) throw Error{Refusal::internal, dataset.where(), "has no place in the file"};
    const std::uint64_t bytes = hdf5::bytes({shape.begin(), shape.end()}, size_of(stored));
    partial.reserve(*offset + bytes);
    growing.push_back({.object = object,
                       .dataset = std::move(dataset),
                       .offset = *offset,
                       .bytes = bytes,
                       .heads = shape.size() == 3 ? shape[0] : 1,
                       .row_bytes = (shape.size() > 1 ? shape.back() : 1) * size_of(stored)});
    return *offset;
  }

  void write_rows(Growing& to, std::uint64_t at, std::span<const std::byte> rows) {
    if (rows.size() % to.row_bytes != 0 || rows.size() > to.bytes - to.written || at > to.bytes - rows.size())
      throw Error{Refusal::input, rules.where(to.object), "rows",
                  fmt::format("at most {} rows of {} bytes", (to.bytes - to.written) / to.row_bytes, to.row_bytes),
                  fmt::format("{} bytes", rows.size())};
    partial.write(to.offset + at, rows);
    to.in_order = to.in_order && at == to.written;
    if (to.in_order) to.hash.update(rows);
    to.written += rows.size();
  }

  void append(std::size_t tensor, std::span<const std::byte> rows) {
    if (growing.empty()) throw Error{Refusal::input, rules.where("/layers"), "rows", "a layer that was begun", "none"};
    if (tensor >= growing.size())
      throw Error{Refusal::input, rules.where("/layers"), "rows", "those of the layer's own tensors",
                  "those of a tensor that it does not have"};
    write_rows(growing[tensor], growing[tensor].written, rows);
  }

  void write_tokens(const std::string& object, std::uint64_t begin, std::span<const std::byte> piece) {
    const auto found = std::ranges::find(growing, object, &Growing::object);
    if (found == growing.end())
      throw Error{Refusal::input, rules.where(object), "rows", "a tensor that was begun", "none"};
    Growing& to = *found;
    const std::uint64_t in_head = piece.size() / to.heads, bytes_of_head = to.bytes / to.heads;
    for (std::uint64_t head = 0; head < to.heads; ++head)
      write_rows(to, head * bytes_of_head + begin * to.row_bytes, piece.subspan(head * in_head, in_head));
  }

  std::string hash_from_file(const Growing& tensor) const {
    std::uint64_t length = 0;
    FileDescriptor written = open_file(partial.path().string(), length);
    const Mapping mapping(std::move(written), length, partial.path().string());
    const std::string hash = hash_of({mapping.at(tensor.offset), tensor.bytes});
    mapping.require_unchanged();
    return hash;
  }

  void end_tensors() {
    for (Growing& tensor : growing) {
      if (tensor.written != tensor.bytes)
        throw Error{Refusal::input, rules.where(tensor.object), "rows",
                    fmt::format("{}", tensor.bytes / tensor.row_bytes),
                    fmt::format("{}", tensor.written / tensor.row_bytes)};
      const std::string digits = tensor.in_order ? tensor.hash.digits() : hash_from_file(tensor);
      tensor.dataset.set_attribute("xxh3", std::string_view(digits));
    }
    growing.clear();
  }

  void finish() {
    end_tensors();
    if (layers != header.layers)
      throw Error{Refusal::input, rules.where("/layers"), "layers", fmt::format("{}", header.layers),
                  fmt::format("{}", layers)};
    flush();
    partial.sync();
    file->set_attribute("version", version_of(header));
    file->set_attribute("complete", std::int64_t{1});
    file->close();
    file.reset();
    partial.trim();
    Trace::open(partial.path());  // what gets the name is a trace
    partial.finish();
  }

  TraceHeader header;  // as far as it is written
  Rules rules;
  PartialFile partial;
  std::optional<hdf5::File> file;
  std::set<std::string> groups;  // made so far
  std::vector<Growing> growing;  // q, k and v of the layer that was begun, or all that begin_tensor() has begun
  int layers = 0;                // begun
};

TraceWriter::TraceWriter(const std::filesystem::path& path) : state_(std::make_unique<State>(path)) {
  TraceHeader own;
  own.created = now();
  for (const char* object : {"/@format", "/@created"})
    state_->write(object, *header_value(own, schema().entry(object)), {});
}
TraceWriter::TraceWriter(const std::filesystem::path& path, TraceHeader header, Existing existing) {
  if (header.created.empty()) header.created = now();
  Rules(path.string()).check_header(header);
  refuse_existing(path, existing);
  state_ = std::make_unique<State>(path);
  state_->write_header(header);
}
TraceWriter::~TraceWriter() = default;

void TraceWriter::begin_layer(DType stored, std::span<const std::int32_t> query_positions) {
  state_->begin_layer(stored, query_positions);
}
void TraceWriter::append_q(std::span<const std::byte> rows) { state_->append(0, rows); }
void TraceWriter::append_k(std::span<const std::byte> rows) { state_->append(1, rows); }
void TraceWriter::append_v(std::span<const std::byte> rows) { state_->append(2, rows); }
void TraceWriter::write(const std::string& object, Value value, const std::vector<std::uint64_t>& shape) {
  state_->write(object, std::move(value), shape);
}
std::uint64_t TraceWriter::begin_tensor(const std::string& object, DType stored,
                                        const std::vector<std::uint64_t>& shape) {
  return state_->begin_tensor(object, stored, shape);
}
void TraceWriter::write_tokens(const std::string& object, std::uint64_t begin, std::span<const std::byte> piece) {
  state_->write_tokens(object, begin, piece);
}
void TraceWriter::finish() { state_->finish(); }

}  // namespace kvreplay
