#include "trace/staging.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "nearest.h"
#include "trace/header.h"
#include "trace/safetensors.h"
#include "trace/schema.h"

namespace kvreplay {
namespace {

using nlohmann::json;
using Shape = std::vector<std::uint64_t>;

constexpr const char* metadata_key = "kvtrace";
constexpr const char* version_key = "kvtrace_staging";
constexpr const char* version = "1";
constexpr std::string_view extension = ".safetensors";
constexpr std::uint64_t largest = std::numeric_limits<std::int32_t>::max();

constexpr std::pair<std::string_view, DType> stored_types[] = {
    {"F16", DType::float16}, {"BF16", DType::bfloat16}, {"F32", DType::float32}};

/// Some rows of a tensor of a layer.
struct Piece {
  const SafetensorsFile* file = nullptr;
  const SafeTensor* stored = nullptr;
  std::uint64_t begin = 0;  // first row: a position, if the rows belong to tokens

  std::string where() const { return file->path().string() + ":" + stored->name; }
};

/// A tensor of a layer in the order of its rows.
struct Staged {
  const SchemaEntry* entry = nullptr;
  std::vector<Piece> pieces;

  /// The dimension that pieces divide: tokens of [H, T, d], the first of others.
  std::size_t row_axis() const { return entry->shape.size() == 3 ? 1 : 0; }
  std::uint64_t rows(const Piece& piece) const { return piece.stored->shape[row_axis()]; }
  const Shape& first_shape() const { return pieces.front().stored->shape; }
  DType dtype() const { return std::ranges::find(stored_types, pieces.front().stored->dtype, first_of)->second; }

  static std::string_view first_of(const std::pair<std::string_view, DType>& type) { return type.first; }
};

/// By layer and by the tensor's name.
using StagedLayers = std::vector<std::map<std::string, Staged, std::less<>>>;

template <class Number>
bool read_number(std::string_view digits, Number& number) {
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return problem == std::errc() && end == digits.data() + digits.size();
}

/// Files of a folder by name, and all others as they are.
std::vector<SafetensorsFile> files_of(std::span<const std::filesystem::path> inputs) {
  std::vector<SafetensorsFile> files;
  for (const std::filesystem::path& input : inputs) {
    if (!std::filesystem::is_directory(input)) {
      files.emplace_back(input);
      continue;
    }
    std::set<std::filesystem::path> in_folder;
    std::error_code problem;
    for (const auto& entry : std::filesystem::directory_iterator(input, problem))
      if (entry.path().extension() == extension) in_folder.insert(entry.path());
    if (problem) throw Error{Refusal::input, input.string(), "cannot be opened: " + problem.message()};
    if (in_folder.empty())
      throw Error{Refusal::input, input.string(), "folder", fmt::format("files NAME{}", extension), "none"};
    for (const std::filesystem::path& path : in_folder) files.emplace_back(path);
  }
  return files;
}

const SchemaEntry* tensor_entry(std::string_view name) {
  for (const SchemaEntry& entry : schema().datasets)
    if (entry.is_tensor() && entry.name == name) return &entry;
  return nullptr;
}

/// Puts the piece into its layer.
void add_piece(StagedLayers& layers, const SafetensorsFile& file, const SafeTensor& stored) {
  Piece piece{&file, &stored};
  const std::string_view name = stored.name;
  const std::size_t dot = name.rfind('.'), at = name.rfind('@');
  std::uint64_t layer = 0;
  const bool named = name.starts_with("layers.") && dot > 6 && at != name.npos && at > dot &&
                     read_number(name.substr(7, dot - std::min<std::size_t>(dot, 7)), layer) &&
                     read_number(name.substr(at + 1), piece.begin);
  const SchemaEntry* entry = named ? tensor_entry(name.substr(dot + 1, at - dot - 1)) : nullptr;
  const auto most = static_cast<std::uint64_t>(schema().entry("/model@n_layers").max.value());
  if (entry == nullptr || layer >= most || piece.begin > largest)
    throw Error{Refusal::input, piece.where(), "name of a tensor", "layers.LAYER.q@BEGIN, or k, v, wo, input_norm, x",
                stored.name};
  const auto type = std::ranges::find(stored_types, stored.dtype, Staged::first_of);
  if (type == std::end(stored_types) || (entry->type != "real" && entry->type != name_of(type->second)))
    throw Error{Refusal::input, piece.where(), "dtype", entry->type == "real" ? "F16, BF16 or F32" : "F32",
                stored.dtype};
  if (stored.shape.size() != entry->shape.size() ||
      std::ranges::any_of(stored.shape, [](std::uint64_t size) { return size == 0 || size > largest; }))
    throw Error{Refusal::input, piece.where(), "shape", fmt::format("[{}]", fmt::join(entry->shape, ", ")),
                fmt::format("[{}]", fmt::join(stored.shape, ", "))};
  if (layers.size() <= layer) layers.resize(layer + 1);
  Staged& staged = layers[layer][entry->name];
  staged.entry = entry;
  staged.pieces.push_back(piece);
}

/// Pieces by their first rows, all of one type and of one shape but for the rows.
void sort_pieces(Staged& staged) {
  std::ranges::sort(staged.pieces, {}, [](const Piece& piece) { return std::pair(piece.begin, piece.where()); });
  for (const Piece& piece : staged.pieces) {
    Shape expected = staged.first_shape();
    expected[staged.row_axis()] = staged.rows(piece);
    if (piece.stored->shape != expected)
      throw Error{Refusal::input, piece.where(), "shape",
                  fmt::format("[{}], as {}", fmt::join(expected, ", "), staged.pieces.front().stored->name),
                  fmt::format("[{}]", fmt::join(piece.stored->shape, ", "))};
    if (const SafeTensor& first = *staged.pieces.front().stored; piece.stored->dtype != first.dtype)
      throw Error{Refusal::input, piece.where(), "dtype", fmt::format("{}, as {}", first.dtype, first.name),
                  piece.stored->dtype};
  }
}

StagedLayers layers_of(const std::vector<SafetensorsFile>& files, const std::string& where) {
  StagedLayers layers;
  for (const SafetensorsFile& file : files)
    for (const SafeTensor& tensor : file.tensors()) add_piece(layers, file, tensor);
  if (layers.empty()) throw Error{Refusal::input, where, "tensors", "layers.0.q@0 and others", "none"};
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (!layers[l].contains("q"))
      throw Error{Refusal::input, where, "missing", fmt::format("layers.{}.q@0", l), "none"};
    for (auto& [name, staged] : layers[l]) sort_pieces(staged);
  }
  return layers;
}

/// The metadata of all files together. Several files may have the same object.
json metadata_of(const std::vector<SafetensorsFile>& files, const std::string& where) {
  json all = json::object();
  bool is_present = false;
  for (const SafetensorsFile& file : files) {
    const auto text = file.metadata().find(metadata_key);
    if (text == file.metadata().end()) continue;
    is_present = true;
    const std::string in_file = file.path().string() + ":__metadata__";
    const auto found = file.metadata().find(version_key);
    if (found == file.metadata().end() || found->second != version)
      throw Error{Refusal::input, in_file, version_key, version,
                  found == file.metadata().end() ? "none" : found->second};
    const json objects = json::parse(text->second, nullptr, false);
    if (!objects.is_object()) throw Error{Refusal::input, in_file, metadata_key, "a JSON object", "other text"};
    for (const auto& [object, value] : objects.items())
      if (!all.emplace(object, value).second && all[object] != value)
        throw Error{Refusal::input, in_file, object, "the value that another file has", "another value"};
  }
  if (!is_present)
    throw Error{Refusal::input, where, "no metadata", fmt::format("{} in a file; it is written last", metadata_key),
                "none"};
  return all;
}

/// The layer whose keys and values layer l reads.
std::size_t source_of(const json& metadata, std::size_t l) {
  const auto sources = metadata.find("/model/kv_source");
  if (sources == metadata.end() || !sources->is_array() || l >= sources->size()) return l;
  const json& source = (*sources)[l];
  return source.is_number_unsigned() ? source.get<std::size_t>() : l;
}

/// Adds the objects that follow from the tensors' shapes, unless the metadata has them.
void add_counts(json& metadata, const StagedLayers& layers) {
  json numbers = json::array(), heads = json::array(), dims = json::array();
  std::uint64_t most_queries = 0, most_keys = 0, widest_key = 0, widest_value = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::size_t source = std::min(source_of(metadata, l), layers.size() - 1);
    const auto k = layers[source].find("k"), v = layers[source].find("v");
    const Shape& queries = layers[l].at("q").first_shape();
    const std::uint64_t kv_heads = k == layers[source].end() ? queries[0] : k->second.first_shape()[0];
    const std::uint64_t value_dim = v == layers[source].end() ? queries[2] : v->second.first_shape()[2];
    numbers.push_back(l);
    heads.push_back({queries[0], kv_heads});
    dims.push_back({queries[2], value_dim});
    most_queries = std::max(most_queries, queries[0]);
    most_keys = std::max(most_keys, kv_heads);
    widest_key = std::max(widest_key, queries[2]);
    widest_value = std::max(widest_value, value_dim);
  }
  const auto differ = [](const json& rows) {
    return std::ranges::adjacent_find(rows, std::not_equal_to<>()) != rows.end();
  };
  metadata.emplace("/model@n_layers", layers.size());
  metadata.emplace("/model@n_query_heads", most_queries);
  metadata.emplace("/model@n_kv_heads", most_keys);
  metadata.emplace("/model@head_dim", widest_key);
  metadata.emplace("/model/layer_index", std::move(numbers));
  metadata.emplace("/@synthetic", 0);
  if (differ(heads)) metadata.emplace("/model/heads", std::move(heads));
  if (metadata.contains("/model@value_is_key")) return;
  if (differ(dims)) metadata.emplace("/model/head_dims", std::move(dims));
  if (widest_value != widest_key) metadata.emplace("/model@value_dim", widest_value);
}

/// A value of the metadata as the schema types it.
class StagedValue {
 public:
  StagedValue(std::string where, const SchemaEntry& entry, const json& value)
      : where_(std::move(where)), entry_(entry) {
    if (entry.type == "string") value_ = scalar<std::string>(value, value.is_string());
    if (entry.type == "int") value_ = scalar<std::int64_t>(value, value.is_number_integer());
    if (entry.type == "float") value_ = scalar<double>(value, value.is_number());
    if (entry.type == "int32") value_ = list<std::int32_t>(value);
    if (entry.type == "float64") value_ = list<double>(value);
    if (entry.type == "span") value_ = spans(value);
  }

  const Value& value() const { return value_; }
  const Shape& shape() const { return shape_; }

 private:
  [[noreturn]] void refuse(const std::string& expected, const json& found) const {
    throw Error{Refusal::input, where_, "type", expected, found.dump(-1, ' ', true).substr(0, 60)};
  }

  template <class Scalar>
  Scalar scalar(const json& value, bool fits) const {
    if (!fits) refuse(entry_.type, value);
    return value.get<Scalar>();
  }

  /// -infinity has no number in JSON: null.
  template <class Number>
  Number element(const json& value) const {
    if constexpr (std::is_same_v<Number, double>) {
      if (value.is_null() && entry_.minus_infinity) return -HUGE_VAL;
      if (value.is_number()) return value.get<double>();
    } else {
      if (value.is_number_integer() && value >= std::numeric_limits<Number>::min() &&
          value <= std::numeric_limits<Number>::max())
        return value.get<Number>();
    }
    refuse(entry_.type, value);
  }

  template <class Number>
  std::vector<Number> list(const json& value) {
    std::vector<Number> numbers;
    const bool has_rows = entry_.shape.size() == 2;
    if (!value.is_array()) refuse("a list", value);
    shape_ = {value.size()};
    if (has_rows) shape_.push_back(value.empty() || !value.front().is_array() ? 0 : value.front().size());
    for (const json& row : value) {
      if (!has_rows) {
        numbers.push_back(element<Number>(row));
        continue;
      }
      if (!row.is_array() || row.size() != shape_.back()) refuse("rows of one length", row);
      for (const json& number : row) numbers.push_back(element<Number>(number));
    }
    return numbers;
  }

  std::vector<Span> spans(const json& value) {
    std::vector<Span> all;
    if (!value.is_array()) refuse("a list", value);
    for (const json& span : value) {
      const auto is_number = [&](const char* key) { return span.contains(key) && span[key].is_number_integer(); };
      const auto is_text = [&](const char* key) { return span.contains(key) && span[key].is_string(); };
      if (!span.is_object() || !is_text("name") || !is_text("kind") || !is_number("begin") || !is_number("end"))
        refuse("name, kind, begin and end of a span", span);
      all.push_back({span["name"], span["kind"], element_of_span(span["begin"]), element_of_span(span["end"])});
    }
    shape_ = {all.size()};
    return all;
  }

  int element_of_span(const json& value) const {
    if (value < 0 || value > largest) refuse("tokens of the trace", value);
    return value.get<int>();
  }

  std::string where_;
  const SchemaEntry& entry_;
  Value value_;
  Shape shape_;  // {}: a scalar
};

/// The objects of a header that staging metadata may have. Passes that repeat the prompt are not among them.
bool is_staged_object(const SchemaEntry& entry) {
  return !entry.per_layer() && !entry.object.starts_with("/reconstruction") && entry.object != "/@format" &&
         entry.object != "/@version" && entry.object != "/@complete";
}

class Joined {
 public:
  Joined(std::string where, StagedLayers layers, json metadata)
      : rules_(where), layers_(std::move(layers)), metadata_(std::move(metadata)) {
    require_known_objects();
    add_counts(metadata_, layers_);
    read(schema().attributes);
    if (static_cast<std::size_t>(header_.layers) != layers_.size())
      throw Error{Refusal::input, rules_.where("/model@n_layers"), "value",
                  fmt::format("{}, the layers of the tensors", layers_.size()), fmt::format("{}", header_.layers)};
    read(schema().datasets);
    if (header_.has_rope) header_.rope_pairs = static_cast<int>(header_.inv_freq.size()) / header_.layers;
    rules_.check_header(header_);
    for (std::size_t l = 0; l < layers_.size(); ++l) check_layer(static_cast<int>(l));
  }

  void write(const std::filesystem::path& made, Existing existing, const std::function<bool()>& interrupted) const {
    TraceWriter writer(made, header_, existing);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const std::vector<std::int32_t>& positions = positions_[l];
      if (!positions.empty()) writer.write(positions_object(l), positions, {positions.size()});
      for (const auto& [name, staged] : layers_[l])
        write_tensor(writer, object_in_layer(*staged.entry, static_cast<int>(l)), staged, interrupted);
    }
    writer.finish();
  }

 private:
  std::string positions_object(std::size_t l) const {
    return object_in_layer(schema().entry("/layers/{layer}/q_positions"), static_cast<int>(l));
  }

  void require_known_objects() const {
    std::vector<std::string> known;
    for (const std::vector<SchemaEntry>* entries : {&schema().attributes, &schema().datasets})
      for (const SchemaEntry& entry : *entries)
        if (is_staged_object(entry)) known.push_back(entry.object);
    for (std::size_t l = 0; l < layers_.size(); ++l) known.push_back(positions_object(l));
    for (const auto& [object, value] : metadata_.items())
      if (std::ranges::find(known, object) == known.end())
        throw Error{Refusal::input, rules_.where("__metadata__"), "unknown object", nearest(object, known), object};
  }

  bool has_group(const std::string& group) const {
    if (group != "/model/rope" && group != "/reference") return true;
    return std::ranges::any_of(metadata_.items(), [&](const auto& item) { return item.key().starts_with(group); });
  }

  void read(const std::vector<SchemaEntry>& entries) {
    for (const SchemaEntry& entry : entries)
      if (is_staged_object(entry)) read(entry);
  }

  void read(const SchemaEntry& entry) {
    if (!has_group(entry.group)) return;
    if (entry.group == "/model/rope") header_.has_rope = true;
    const auto found = metadata_.find(entry.object);
    if (found == metadata_.end()) {
      if (entry.required && entry.name != "created")
        throw Error{Refusal::input, rules_.where(entry.object), "missing in the metadata",
                    fmt::format("{} ({})", entry.type, entry.help), "none"};
      return;
    }
    const StagedValue staged(rules_.where(entry.object), entry, *found);
    if (!entry.attribute) rules_.check_shape(entry.object, entry, staged.shape());
    rules_.check_value(entry.object, entry, staged.value());
    set_header_value(header_, entry, staged.value());
  }

  /// Its tensors have the shapes of the header, and their rows follow each other.
  void check_layer(int layer) {
    const auto l = static_cast<std::size_t>(layer);
    rules_.bind_layer(header_, layer);
    rules_.bind("Tq", header_.tokens());
    positions_.emplace_back();
    if (const auto found = metadata_.find(positions_object(l)); found != metadata_.end()) {
      const SchemaEntry& entry = schema().entry("/layers/{layer}/q_positions");
      const StagedValue staged(rules_.where(positions_object(l)), entry, *found);
      rules_.bind("Tq", static_cast<std::int64_t>(staged.shape().front()));
      rules_.check_shape(positions_object(l), entry, staged.shape());
      rules_.check_value(positions_object(l), entry, staged.value());
      positions_.back() = std::get<std::vector<std::int32_t>>(staged.value());
    }
    for (const SchemaEntry& entry : schema().datasets) {
      if (!entry.is_tensor()) continue;
      const auto staged = layers_[l].find(entry.name);
      const std::string absent_by = left_out_by(entry, header_, layer);
      const std::string name = fmt::format("layers.{}.{}", layer, entry.name);
      if (staged == layers_[l].end()) {
        if (entry.required && absent_by.empty())
          throw Error{Refusal::input, rules_.where(name), "missing", fmt::format("{}@0", name), "none"};
        continue;
      }
      if (!absent_by.empty())
        throw Error{Refusal::input, rules_.where(name), "present", fmt::format("none, because of {}", absent_by),
                    staged->second.pieces.front().stored->name};
      check_rows(name, staged->second, layer);
    }
  }

  /// Position of a stored row of `staged`, counted from 0; a number past all positions after the last.
  std::uint64_t position(const Staged& staged, int layer, std::uint64_t row) const {
    const std::vector<std::int32_t>& positions = positions_[static_cast<std::size_t>(layer)];
    if (staged.entry->name != "q" || positions.empty()) return row;
    return row < positions.size() ? static_cast<std::uint64_t>(positions[row]) : largest + 1;
  }

  void check_rows(const std::string& name, const Staged& staged, int layer) {
    std::uint64_t row = 0;
    for (const Piece& piece : staged.pieces) {
      for (std::uint64_t i = 0; i < staged.rows(piece); ++i, ++row) {
        const std::uint64_t expected = position(staged, layer, row);
        if (piece.begin + i == expected) continue;
        if (expected > largest)
          throw Error{Refusal::input, piece.where(), "rows", fmt::format("{} positions of q_positions", row),
                      fmt::format("position {}", piece.begin + i)};
        throw Error{Refusal::input, piece.where(), piece.begin + i < expected ? "overlap" : "gap",
                    fmt::format("position {} after the piece before it", expected),
                    fmt::format("position {}", piece.begin + i)};
      }
    }
    const std::string& dimension = staged.entry->shape[staged.row_axis()];
    if (const auto all = rules_.known(dimension); all && row < static_cast<std::uint64_t>(*all))
      throw Error{Refusal::input, rules_.where(name), "missing at the end",
                  fmt::format("{} rows ({})", *all, dimension), fmt::format("{}", row)};
    Shape shape = staged.first_shape();
    shape[staged.row_axis()] = row;
    rules_.check_shape(name, *staged.entry, shape);
  }

  static void write_tensor(TraceWriter& writer, const std::string& object, const Staged& staged,
                           const std::function<bool()>& interrupted) {
    Shape shape = staged.first_shape();
    shape[staged.row_axis()] = 0;
    for (const Piece& piece : staged.pieces) shape[staged.row_axis()] += staged.rows(piece);
    writer.begin_tensor(object, staged.dtype(), shape);
    std::uint64_t row = 0;
    for (const Piece& piece : staged.pieces) {
      if (interrupted()) throw Error{Refusal::interrupted, piece.file->path().string(), "interrupted"};
      const Mapping bytes = piece.file->map();
      writer.write_tokens(object, row, {bytes.at(piece.stored->offset), piece.stored->bytes});
      bytes.require_unchanged();
      row += staged.rows(piece);
    }
  }

  Rules rules_;
  StagedLayers layers_;
  json metadata_;
  TraceHeader header_;
  std::vector<std::vector<std::int32_t>> positions_ = {};  // of the layers' queries; empty: all T
};

}  // namespace

bool is_staged(const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) return true;
  char first[9] = {};
  std::ifstream(path, std::ios::binary).read(first, sizeof first);
  return first[8] == '{' && first[0] != '\x89';
}

void join_staged(std::span<const std::filesystem::path> inputs, const std::filesystem::path& made, Existing existing,
                 const std::function<bool()>& interrupted) {
  const std::string where = inputs.front().string();
  refuse_existing(made, existing);
  const std::vector<SafetensorsFile> files = files_of(inputs);
  Joined(where, layers_of(files, where), metadata_of(files, where)).write(made, existing, interrupted);
}

}  // namespace kvreplay
