#include "trace/trace.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "error.h"
#include "hash.h"
#include "hdf5/hdf5.h"
#include "hdf5/mapping.h"
#include "open_file.h"
#include "trace/header.h"
#include "trace/remedy.h"
#include "trace/schema.h"
#include "trace/trace_name.h"
#include "trace/validate.h"

namespace kvreplay {
namespace {

/// Where a tensor lies: at an offset of the mapped file, in memory, or in chunks that HDF5 puts together.
struct TensorPlace {
  std::string path;
  DType dtype = DType::float32;
  std::vector<std::uint64_t> shape = {};
  std::optional<std::uint64_t> offset = {};
  std::string xxh3 = {};
  std::shared_ptr<const std::byte> memory = {};

  std::uint64_t bytes() const { return hdf5::bytes({shape.begin(), shape.end()}, size_of(dtype)); }
};

struct LayerPlaces {
  std::vector<std::int32_t> query_positions;
  std::vector<std::int32_t> visible;  // [Hkv, Tq, u], or empty
  std::vector<TensorPlace> tensors;   // q, k, and the others that are stored

  /// Of a dataset of integers; of another, none.
  const std::vector<std::int32_t>& numbers(const SchemaEntry& entry) const {
    static const std::vector<std::int32_t> none;
    return entry.name == "q_positions" ? query_positions : entry.name == "visible" ? visible : none;
  }
};

struct Contents {
  TraceHeader header;
  std::vector<LayerPlaces> layers;
  std::vector<Error> violations;  // of the format, each with its remedy
};

/// Queries of layers that read the same keys must have one type and the same positions.
std::vector<Error> different_queries(const std::string& file, const TraceHeader& header,
                                     const std::vector<LayerPlaces>& layers) {
  std::vector<Error> differing;
  for (int l = 0; l < header.layers; ++l) {
    const int source = header.source(l);
    const LayerPlaces& own = layers[static_cast<std::size_t>(l)];
    const LayerPlaces& of_source = layers[static_cast<std::size_t>(source)];
    const std::string expected = fmt::format("those of layer {}, whose keys it reads", source);
    if (own.tensors.front().dtype != of_source.tensors.front().dtype)
      differing.emplace_back(Refusal::input, fmt::format("{}:/layers/{:03}/q", file, l), "type", expected,
                             name_of(own.tensors.front().dtype));
    if (own.query_positions != of_source.query_positions)
      differing.emplace_back(Refusal::input, fmt::format("{}:/layers/{:03}/q_positions", file, l), "value", expected,
                             "others");
  }
  return differing;
}

/// Walks the schema through one file, and notes every violation.
class Reader {
 public:
  Reader(const hdf5::File& file, std::string path, std::uint64_t length)
      : file_(file), length_(length), path_(std::move(path)), rules_(path_) {}

  Contents read() {
    read_attributes("/", file_);
    if (!has_other_rules_) read_objects();
    if (!variable_length_strings_.empty()) keep_only_variable_length_strings();
    return std::move(contents_);
  }

 private:
  void read_objects() {
    for (const SchemaGroup& group : schema().groups) {
      if (group.path.ends_with("{layer}")) continue;
      if (const auto found = group_at(group.path, group.required)) read_attributes(group.path, *found);
    }
    std::vector<const SchemaEntry*> alone;
    for (const SchemaEntry& entry : schema().datasets)
      if (!entry.per_layer() && !attempt([&] { read_header_dataset(entry); }) && !entry.with.empty())
        alone.push_back(&schema().entry(entry.with));
    // The other object of a pair violates no rule of its own.
    for (const SchemaEntry* entry : alone) drop_header_value(contents_.header, *entry);
    contents_.header.rope_pairs = static_cast<int>(rules_.known("r").value_or(0));
    for (const Error& broken : rules_.broken_relations(contents_.header)) note(broken);
    if (const std::int64_t lowest = version_of(contents_.header); version_ > 0 && version_ != lowest)
      note({Refusal::input, rules_.where("/@version"), "value",
            fmt::format("{}, the lowest version that has every object of the file", lowest),
            fmt::format("{}", version_)});
    // Without n_layers a dataset's shape says how many there are: as many as it likes.
    const double most = schema().entry("/model@n_layers").max.value_or(0);
    const auto layers = std::min(rules_.known("L").value_or(0), static_cast<std::int64_t>(most));
    for (int l = 0; l < layers; ++l) read_layer(l);
    if (contents_.violations.empty())
      for (const Error& broken : different_queries(path_, contents_.header, contents_.layers)) note(broken);
  }

  /// Takes a step. A violation is noted, and ends the step; false.
  template <class Step>
  bool attempt(Step step) {
    try {
      step();
      return true;
    } catch (const Error& error) {
      if (error.refusal() != Refusal::input) throw;
      note(error);
      return false;
    }
  }

  /// The same violation may be met twice, as a group that is missing from several paths.
  void note(const Error& violation) {
    if (!noted_.insert(violation.what()).second) return;
    if (violation.found() == hdf5::variable_length_string) variable_length_strings_.push_back(violation);
    contents_.violations.push_back(with_remedy(violation, path_));
  }

  /// The file that is made of this one is checked again.
  void keep_only_variable_length_strings() {
    const Error& first = variable_length_strings_.front();
    const std::string found = fmt::format("{} of variable length, the first at {}", variable_length_strings_.size(),
                                          first.where().substr(path_.size() + 1));
    contents_.violations = {
        Error{Refusal::input, path_, "strings", "strings of fixed length", found + "; run " + conversion_of(path_)}};
  }

  std::optional<hdf5::Group> group_at(const std::string& path, bool required) {
    std::optional<hdf5::Group> found;
    attempt([&] { found = find_group(path, required); });
    return found;
  }

  [[noreturn]] void refuse(const std::string& object, const std::string& what, const std::string& expected,
                           const std::string& found) const {
    throw Error{Refusal::input, rules_.where(object), what, expected, found};
  }

  void require_kind(const std::string& object, hdf5::Group::Member found, hdf5::Group::Member expected) const {
    if (found == expected) return;
    const auto name = [](hdf5::Group::Member member) {
      return member == hdf5::Group::Member::group     ? "a group"
             : member == hdf5::Group::Member::dataset ? "a dataset"
             : member == hdf5::Group::Member::none    ? "none"
                                                      : "a named type";
    };
    refuse(object, found == hdf5::Group::Member::none ? "missing" : "kind", name(expected), name(found));
  }

  /// The group, step by step from the root; none: it is optional and not there.
  std::optional<hdf5::Group> find_group(const std::string& path, bool required) const {
    std::optional<hdf5::Group> group;
    for (std::size_t begin = 1; begin < path.size();) {
      const std::size_t end = std::min(path.find('/', begin), path.size());
      const std::string name = path.substr(begin, end - begin);
      const hdf5::Group& parent = group ? *group : static_cast<const hdf5::Group&>(file_);
      const hdf5::Group::Member found = parent.member(name);
      if (found == hdf5::Group::Member::none && !required) return std::nullopt;
      require_kind(path.substr(0, end), found, hdf5::Group::Member::group);
      group = parent.group(name);
      begin = end + 1;
    }
    return group;
  }

  void read_attributes(const std::string& group, const hdf5::Object& object) {
    if (group == "/model/rope") contents_.header.has_rope = true;
    for (const SchemaEntry& entry : schema().attributes)
      if (entry.group == group && !has_other_rules_ && (entry.required || object.has_attribute(entry.name)))
        attempt([&] { read_attribute(entry, object); });
  }

  void read_attribute(const SchemaEntry& entry, const hdf5::Object& object) {
    Value value;
    if (entry.type == "string") value = object.string_attribute(entry.name);
    if (entry.type == "int") value = object.integer_attribute(entry.name);
    if (entry.type == "float") value = object.float_attribute(entry.name);
    if (entry.object == "/@format") has_other_rules_ = std::get<std::string>(value) != schema().format;
    if (entry.object == "/@version") has_other_rules_ = std::get<std::int64_t>(value) > schema().version;
    if (entry.object == "/@version" && has_other_rules_)
      refuse(entry.object, "format version is newer than this program supports",
             fmt::format("at most {}", schema().version), fmt::format("{}", std::get<std::int64_t>(value)));
    rules_.check_value(entry.object, entry, value);
    if (entry.object == "/@version") version_ = std::get<std::int64_t>(value);
    set_header_value(contents_.header, entry, std::move(value));
  }

  /// The dataset, if it is there or has to be, as far as storage goes.
  std::optional<hdf5::Dataset> find_dataset(const hdf5::Group& parent, const SchemaEntry& entry,
                                            const std::string& object, int layer = 0) const {
    const hdf5::Group::Member found = parent.member(entry.name);
    const std::string left_out_by = kvreplay::left_out_by(entry, contents_.header, layer);
    if (!left_out_by.empty() && found != hdf5::Group::Member::none)
      refuse(object, "beside " + left_out_by, "none", "a dataset");
    const SchemaEntry* const other = entry.per_layer() && !entry.with.empty() ? &schema().entry(entry.with) : nullptr;
    if (other != nullptr && found != hdf5::Group::Member::none && !find_group(other->group, false))
      refuse(object, "alone", other->object + " beside it", "none");
    const bool wanted = entry.required || (other != nullptr && header_value(contents_.header, *other));
    if (found == hdf5::Group::Member::none && (!left_out_by.empty() || !wanted)) return std::nullopt;
    require_kind(object, found, hdf5::Group::Member::dataset);
    hdf5::Dataset dataset = parent.dataset(entry.name);
    dataset.require_plain_storage();
    return dataset;
  }

  /// Its elements lie in the file, and no more of them than a file of this length can hold.
  void check_storage(const std::string& object, const hdf5::Dataset& dataset, std::uint64_t bytes) const {
    if (bytes == 0) return;
    if (dataset.chunked()) dataset.stored_elements();
    dataset.require_written();
    if (dataset.chunked() || dataset.compact()) return;
    const auto offset = dataset.offset();
    if (*offset > length_ || bytes > length_ - *offset)
      refuse(object, "storage", fmt::format("{} bytes before the file's end at {}", bytes, length_),
             fmt::format("them at {}", *offset));
  }

  void require_type(const std::string& object, const hdf5::Dataset& dataset, const hdf5::Type& expected,
                    const hdf5::Type& also) const {
    const hdf5::Type found = dataset.type();
    if (!(found == expected) && !(found == also))
      refuse(object, "type", expected.name() + " or " + also.name(), found.name());
  }

  std::int32_t narrowed(const std::string& object, std::int64_t number, std::size_t element) const {
    if (std::in_range<std::int32_t>(number)) return static_cast<std::int32_t>(number);
    refuse(object, "value", fmt::format("at most {}", std::numeric_limits<std::int32_t>::max()),
           fmt::format("{} at element {}", number, element));
  }

  /// int64 where its numbers are those of an int32.
  std::vector<std::int32_t> integers(const hdf5::Dataset& dataset, const std::string& object) const {
    if (dataset.type() == hdf5::Type::int32()) return dataset.values<std::int32_t>();
    std::vector<std::int32_t> numbers;
    for (const std::int64_t number : dataset.values<std::int64_t>())
      numbers.push_back(narrowed(object, number, numbers.size()));
    return numbers;
  }

  static std::vector<double> floats(const hdf5::Dataset& dataset) {
    if (dataset.type() == hdf5::Type::float64()) return dataset.values<double>();
    const std::vector<float> numbers = dataset.values<float>();
    return {numbers.begin(), numbers.end()};
  }

  Value read_value(const hdf5::Dataset& dataset, const SchemaEntry& entry, const std::string& object) {
    if (entry.type == "int32") require_type(object, dataset, hdf5::Type::int32(), hdf5::Type::int64());
    if (entry.type == "float64") require_type(object, dataset, hdf5::Type::float64(), hdf5::Type::float32());
    if (entry.type == "span") require_span_type(object, dataset.type());
    if (entry.type == "string") require_string(object, "", dataset.type());
    const hdf5::Shape shape = dataset.shape();
    rules_.check_shape(object, entry, {shape.begin(), shape.end()});
    check_storage(object, dataset, hdf5::bytes(shape, dataset.type().bytes()));
    if (entry.type == "int32") return integers(dataset, object);
    if (entry.type == "float64") return floats(dataset);
    if (entry.type == "span") return read_spans(dataset, object);
    return dataset.text();
  }

  void read_header_dataset(const SchemaEntry& entry) {
    if (entry.group == "/model/rope" && !contents_.header.has_rope) return;
    const auto parent = entry.group == "/" ? std::nullopt : find_group(entry.group, false);
    if (entry.group != "/" && !parent) return;
    const auto dataset = find_dataset(parent ? *parent : static_cast<const hdf5::Group&>(file_), entry, entry.object);
    if (!dataset) return;
    Value value = read_value(*dataset, entry, entry.object);
    rules_.check_value(entry.object, entry, value);
    set_header_value(contents_.header, entry, std::move(value));
  }

  void require_string(const std::string& object, const std::string& member, const hdf5::Type& type) const {
    if (!type.is_fixed_string()) refuse(object, "type" + member, "fixed-length string", type.name());
  }

  void require_span_type(const std::string& object, const hdf5::Type& type) const {
    if (!type.is_compound()) refuse(object, "type", "compound of name, kind, begin, end", type.name());
    for (const char* name : {"name", "kind", "begin", "end"}) {
      const auto member = type.member(name);
      const std::string of_member = std::string(" of member \"") + name + "\"";
      if (!member) refuse(object, "missing" + of_member, "compound of name, kind, begin, end", "none");
      const std::size_t end = type.member_offset(name) + member->bytes();
      if (end > type.bytes())
        refuse(object, "size" + of_member, fmt::format("its end before byte {}", type.bytes()), std::to_string(end));
      const bool word = name[0] == 'n' || name[0] == 'k';
      if (word) require_string(object, of_member, *member);
      if (!word && !(*member == hdf5::Type::int32()) && !(*member == hdf5::Type::int64()))
        refuse(object, "type" + of_member, "int32 or int64", member->name());
    }
  }

  std::vector<Span> read_spans(const hdf5::Dataset& dataset, const std::string& object) const {
    const hdf5::Type type = dataset.type();
    const auto count = static_cast<std::size_t>(hdf5::elements(dataset.shape()));
    std::string bytes(count * type.bytes(), '\0');
    if (count > 0) dataset.read(type, bytes.data());
    const auto text = [&](std::string_view row, const char* name) {
      const hdf5::Type member = *type.member(name);
      return hdf5::unpadded(member, row.substr(type.member_offset(name), member.bytes()));
    };
    std::vector<Span> spans;
    const auto number = [&](std::string_view row, const char* name) {
      const char* stored = row.data() + type.member_offset(name);
      std::int32_t narrow = 0;
      std::int64_t wide = 0;
      if (type.member(name)->bytes() == sizeof wide) {
        std::memcpy(&wide, stored, sizeof wide);
        return narrowed(object, wide, spans.size());
      }
      std::memcpy(&narrow, stored, sizeof narrow);
      return narrow;
    };
    for (std::size_t s = 0; s < count; ++s) {
      const std::string_view row = std::string_view(bytes).substr(s * type.bytes(), type.bytes());
      spans.push_back({text(row, "name"), text(row, "kind"), number(row, "begin"), number(row, "end")});
    }
    return spans;
  }

  void read_layer(int l) {
    const std::string path = fmt::format("/layers/{:03}", l);
    const auto group = group_at(path, true);
    if (!group) return;
    LayerPlaces& layer = contents_.layers.emplace_back();
    rules_.bind_layer(contents_.header, l);
    // The positions first: they say how many queries there are.
    if (const auto tokens = rules_.known("T")) rules_.bind("Tq", *tokens);
    attempt([&] { read_query_positions(*group, l, layer); });
    attempt([&] { read_visible(*group, l, layer); });
    for (const SchemaEntry& entry : schema().datasets)
      if (entry.is_tensor())
        attempt([&] {
          if (auto tensor = find_tensor(*group, entry, l)) layer.tensors.push_back(std::move(*tensor));
        });
  }

  void read_query_positions(const hdf5::Group& group, int l, LayerPlaces& layer) {
    const SchemaEntry& positions = schema().entry("/layers/{layer}/q_positions");
    const std::string positions_object = object_in_layer(positions, l);
    const auto dataset = find_dataset(group, positions, positions_object);
    if (!dataset) return;
    if (const hdf5::Shape shape = dataset->shape(); shape.size() == 1 && shape[0] > 0 && shape[0] <= INT32_MAX)
      rules_.bind("Tq", static_cast<std::int64_t>(shape[0]));
    const Value value = read_value(*dataset, positions, positions_object);
    rules_.check_value(positions_object, positions, value);
    layer.query_positions = std::get<std::vector<std::int32_t>>(value);
  }

  void read_visible(const hdf5::Group& group, int l, LayerPlaces& layer) {
    const SchemaEntry& entry = schema().entry("/layers/{layer}/visible");
    const std::string object = object_in_layer(entry, l);
    const auto dataset = find_dataset(group, entry, object, l);
    if (!dataset) return;
    const Value value = read_value(*dataset, entry, object);
    rules_.check_value(object, entry, value);
    layer.visible = std::get<std::vector<std::int32_t>>(value);
    rules_.check_units(object, contents_.header, layer.visible, layer.query_positions);
  }

  std::optional<TensorPlace> find_tensor(const hdf5::Group& group, const SchemaEntry& entry, int l) {
    const std::string object = object_in_layer(entry, l);
    const auto dataset = find_dataset(group, entry, object, l);
    if (!dataset) return std::nullopt;
    TensorPlace place{.path = object};
    const hdf5::Type type = dataset->type();
    const auto dtype = std::ranges::find_if(all_dtypes, [&](DType known) { return type == hdf5::Type::of(known); });
    if (dtype == std::end(all_dtypes) || (entry.type == "float32" && *dtype != DType::float32))
      refuse(object, "type", entry.type == "float32" ? entry.type : "float16, bfloat16 or float32", type.name());
    place.dtype = *dtype;
    const hdf5::Shape shape = dataset->shape();
    place.shape.assign(shape.begin(), shape.end());
    rules_.check_shape(object, entry, place.shape);
    if (dataset->compact()) refuse(object, "layout", "contiguous or chunked", "compact");
    check_storage(object, *dataset, place.bytes());
    if (!dataset->chunked()) place.offset = dataset->offset();
    for (const SchemaEntry& attribute : schema().tensor_attributes)
      if (dataset->has_attribute(attribute.name)) place.xxh3 = tensor_hash(*dataset, attribute, object);
    return place;
  }

  std::string tensor_hash(const hdf5::Dataset& dataset, const SchemaEntry& attribute, const std::string& object) const {
    const std::string digits = dataset.string_attribute(attribute.name);
    if (digits.size() != 32 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
      refuse(object + "@" + attribute.name, "value", "32 lower-case hexadecimal digits", fmt::format("\"{}\"", digits));
    return digits;
  }

  static constexpr DType all_dtypes[] = {DType::float16, DType::bfloat16, DType::float32};

  const hdf5::File& file_;
  std::uint64_t length_;
  std::string path_;
  Rules rules_;
  Contents contents_;
  bool has_other_rules_ = false;  // another format, or a newer version
  std::int64_t version_ = 0;      // 0: none that can be read
  std::vector<Error> variable_length_strings_;
  std::set<std::string> noted_;
};

/// The contents of a file of this length. Throws Error{input} where HDF5 cannot or should not read it.
Contents contents_of(const FileDescriptor& file, std::uint64_t length, const std::filesystem::path& path) {
  const auto open = [&] {
    try {
      return hdf5::File::open(path, file, length);
    } catch (const Error& error) {
      throw with_remedy(error, path.string());
    }
  };
  return Reader(open(), path.string(), length).read();
}

/// Tensors in memory, held against the rules for a file of this header. Throws Error{input}.
std::vector<LayerPlaces> places_in_memory(const std::string& file, const TraceHeader& header,
                                          std::vector<LayerInMemory> layers) {
  Rules rules(file);
  rules.check_header(header);
  if (layers.size() != static_cast<std::size_t>(header.layers))
    throw Error{Refusal::input, rules.where("/layers"), "layers", std::to_string(header.layers),
                std::to_string(layers.size())};
  std::vector<LayerPlaces> all;
  for (LayerInMemory& layer : layers) {
    const int number = static_cast<int>(all.size());
    LayerPlaces& places = all.emplace_back();
    rules.bind_layer(header, number);
    rules.bind("Tq", header.tokens());
    if (!layer.query_positions.empty()) {
      const SchemaEntry& entry = schema().entry("/layers/{layer}/q_positions");
      rules.bind("Tq", static_cast<std::int64_t>(layer.query_positions.size()));
      rules.check_value(object_in_layer(entry, number), entry, layer.query_positions);
    }
    places.query_positions = std::move(layer.query_positions);
    if (!layer.visible.empty()) {
      const SchemaEntry& entry = schema().entry("/layers/{layer}/visible");
      const std::string object = object_in_layer(entry, number);
      rules.check_shape(object, entry, layer.visible_shape);
      rules.check_value(object, entry, layer.visible);
      rules.check_units(object, header, layer.visible, places.query_positions);
      places.visible = std::move(layer.visible);
    }
    const auto add = [&](const char* name, TensorInMemory& tensor) {
      const SchemaEntry& entry = schema().entry(std::string("/layers/{layer}/") + name);
      const std::string object = object_in_layer(entry, number);
      rules.check_shape(object, entry, tensor.shape);
      places.tensors.push_back({.path = object,
                                .dtype = tensor.dtype,
                                .shape = std::move(tensor.shape),
                                .memory = std::move(tensor.elements)});
    };
    add("q", layer.q);
    if (header.has_keys(number)) add("k", layer.k);
    if (header.has_keys(number) && header.stores_values()) add("v", layer.v);
    if (layer.wo) add("wo", *layer.wo);
  }
  if (const std::vector<Error> differing = different_queries(file, header, all); !differing.empty())
    throw differing.front();
  return all;
}

}  // namespace

class Trace::State {
 public:
  State(const std::filesystem::path& path, TraceHeader header, std::vector<LayerInMemory> layers)
      : path_(path),
        name_(trace_name(path)),
        header_(std::move(header)),
        layers_(places_in_memory(path_.string(), header_, std::move(layers))) {}

  explicit State(const std::filesystem::path& path) : path_(path), name_(trace_name(path)) {
    std::uint64_t length = 0;
    FileDescriptor file = open_file(path_.string(), length);
    Contents contents = contents_of(file, length, path_);
    if (!contents.violations.empty()) throw contents.violations.front();
    header_ = std::move(contents.header);
    layers_ = std::move(contents.layers);
    // HDF5 has opened the path once more.
    if (identity_at(path_) != identity_of(file, path_.string()))
      throw Error{Refusal::input, path_.string(), "replaced while it was opened", "the same file", "another file"};
    mapping_ = Mapping(std::move(file), length, path_.string());
  }

  void limit_mapped(std::size_t bytes) {
    limit_ = bytes;
    watch_.reset();
    if (largest_layer() > bytes) watch_.emplace(mapping_, std::max(bytes, least_mapped));
  }

  /// What can be read ahead beside a layer in use.
  std::size_t room() const { return limit_ - std::min(limit_, largest_layer()); }

  std::size_t largest_layer() const {
    std::size_t largest = 0;
    for (int l = 0; l < header_.layers; ++l) largest = std::max(largest, bytes(l, true));
    return largest;
  }

  /// Of the tensors of layer l in a file, with the queries of its readers: of those that are mapped, or of the others.
  std::size_t bytes(int l, bool mapped) const {
    std::size_t sum = 0;
    for (const TensorPlace* place : places_read(l))
      if (!place->memory && place->offset.has_value() == mapped) sum += place->bytes();
    return sum;
  }

  /// All tensors of layer l, and the queries of the layers that read its keys.
  std::vector<const TensorPlace*> places_read(int l) const {
    std::vector<const TensorPlace*> all;
    for (const TensorPlace& place : places(l).tensors) all.push_back(&place);
    const std::vector<int> readers = header_.readers(l);
    for (const int reader : std::span(readers).subspan(1)) all.push_back(&places(reader).tensors.front());
    return all;
  }

  /// Whether the queries of layer l are put together in memory: those of several layers, or those of a layer that reads
  /// another's keys, since an archive keeps one layer at a time.
  bool stacks_queries(int l) const { return !header_.has_keys(l) || header_.readers(l).size() > 1; }

  /// The queries of layer l in the order of its KV heads, and their sink logits.
  struct Stack {
    std::vector<std::byte> queries;
    std::vector<double> sinks;
  };
  const Stack& stack(int l) const {
    if (stacked_layer_ == l) return stack_;
    stacked_layer_ = -1;
    const std::vector<TraceHeader::QueryHead> heads = header_.query_heads_of(l);
    const auto most = static_cast<std::size_t>(header_.query_heads);
    const TensorPlace& shape = places(l).tensors.front();
    const std::size_t head_bytes = shape.bytes() / shape.shape.front();
    stack_.queries.resize(heads.size() * head_bytes);
    stack_.sinks.resize(header_.sinks.empty() ? 0 : heads.size());
    for (const int reader : header_.readers(l)) {  // one by one, since an archive keeps one layer at a time
      const TensorView queries = view(reader, 0);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        if (heads[h].layer != reader) continue;
        std::memcpy(stack_.queries.data() + h * head_bytes, queries.row(heads[h].head, 0), head_bytes);
        if (!header_.sinks.empty())
          stack_.sinks[h] =
              header_.sinks[static_cast<std::size_t>(reader) * most + static_cast<std::size_t>(heads[h].head)];
      }
    }
    stacked_layer_ = l;
    return stack_;
  }

  const LayerPlaces& places(int l) const { return layers_.at(static_cast<std::size_t>(l)); }

  /// The values of layer l, which has keys.
  TensorView values(int l) const {
    if (header_.stores_values()) return view(l, 2);
    TensorView components = view(l, 1);
    components.stride = components.dim;
    components.dim = header_.value_is_key;
    return components;
  }

  TensorView view(int l, std::size_t t) const {
    const TensorPlace& place = places(l).tensors[t];
    const std::byte* data = place.memory   ? place.memory.get()
                            : place.offset ? mapping_.at(*place.offset)
                                           : archived(l)[t].data();
    const auto size = [&](std::size_t i) { return static_cast<int>(place.shape[i]); };
    if (place.shape.size() == 1) return {data, place.dtype, 1, size(0), 1};
    if (place.shape.size() == 2) return {data, place.dtype, 1, size(0), size(1)};
    return {data, place.dtype, size(0), size(1), size(2)};
  }

  std::string make_hash(const Trace& trace) const {
    Hash hash;
    hash_header(hash, header_);
    for (int l = 0; l < header_.layers; ++l) {
      const std::vector<StoredTensor> tensors = trace.tensors(l);
      for (const SchemaEntry& entry : schema().datasets) {
        if (!entry.per_layer()) continue;
        const std::string object = object_in_layer(entry, l);
        if (const std::vector<std::int32_t>& numbers = places(l).numbers(entry); !numbers.empty())
          hash_value(hash, object, numbers);
        for (const StoredTensor& tensor : tensors) {
          if (tensor.path != object) continue;
          const std::string digits = tensor.xxh3.empty() ? hash_in_pieces(tensor) : tensor.xxh3;
          hash_value(hash, object,
                     fmt::format("{} [{}] {}", name_of(tensor.view.dtype), fmt::join(tensor.shape, ", "), digits));
        }
      }
      if (!trace.states_hashes()) trace.release(l);
    }
    trace.require_unchanged();
    return hash.digits();
  }

  std::filesystem::path path_;
  std::string name_;
  TraceHeader header_;
  std::vector<LayerPlaces> layers_;
  Mapping mapping_;
  mutable std::string hash_;

 private:
  /// The chunked tensors of layer l, put together; those of the last layer asked for are kept.
  const std::vector<std::vector<std::byte>>& archived(int l) const {
    if (archived_layer_ == l) return archived_;
    archived_layer_ = -1;
    archived_.clear();
    const hdf5::File file = hdf5::File::open(path_);
    for (const TensorPlace& place : places(l).tensors) {
      std::vector<std::byte>& bytes = archived_.emplace_back();
      if (place.offset) continue;
      bytes.resize(place.bytes());
      file.dataset(place.path.substr(1)).read(hdf5::Type::of(place.dtype), bytes.data());
    }
    archived_layer_ = l;
    return archived_;
  }

  /// Of a tensor that is read for this alone.
  std::string hash_in_pieces(const StoredTensor& tensor) const {
    constexpr std::size_t piece = std::size_t{16} << 20;
    Hash hash;
    std::span<const std::byte> rest{tensor.view.data, tensor.view.bytes()};
    while (!rest.empty()) {
      const std::span<const std::byte> next = rest.first(std::min(piece, rest.size()));
      hash.update(next);
      if (mapping_.holds(next)) mapping_.let_go(mapping_.offset_of(next), next.size());
      rest = rest.subspan(next.size());
    }
    return hash.digits();
  }

  std::size_t limit_ = std::numeric_limits<std::size_t>::max();
  std::optional<MappedLimit> watch_;
  mutable int stacked_layer_ = -1;
  mutable Stack stack_;
  mutable int archived_layer_ = -1;
  mutable std::vector<std::vector<std::byte>> archived_;
};

std::vector<int> TraceHeader::readers(int l) const {
  std::vector<int> all{l};
  for (int reader = l + 1; has_keys(l) && !kv_source.empty() && reader < layers; ++reader)
    if (source(reader) == l) all.push_back(reader);
  return all;
}

std::vector<ReconstructionPass> TraceHeader::passes() const {
  std::vector<ReconstructionPass> all;
  for (std::size_t i = 0; i + 2 < reconstruction_passes.size(); i += 3)
    all.push_back({all.empty() ? 0 : all.back().end, reconstruction_passes[i], reconstruction_passes[i + 1],
                   reconstruction_passes[i + 2]});
  return all;
}

std::vector<TraceHeader::QueryHead> TraceHeader::query_heads_of(int l) const {
  std::vector<QueryHead> all;
  const std::vector<int> of_keys = readers(l);
  const int kv_heads_here = heads.empty() ? kv_heads : heads[2 * static_cast<std::size_t>(l) + 1];
  for (int kv_head = 0; kv_head < kv_heads_here; ++kv_head)
    for (const int reader : of_keys) {
      const int group = own_query_heads(reader) / kv_heads_here;
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) all.push_back({reader, head});
    }
  return all;
}

LayerShape TraceHeader::shape(int l) const {
  const auto at = 2 * static_cast<std::size_t>(l);
  LayerShape shape{0, kv_heads, head_dim, value_components()};
  for (const int reader : readers(l)) shape.query_heads += own_query_heads(reader);
  if (!heads.empty()) shape.kv_heads = heads[at + 1];
  if (!head_dims.empty()) shape.key_dim = head_dims[at], shape.value_dim = head_dims[at + 1];
  return shape;
}

LayerShape TraceHeader::largest_shape(std::span<const int> some_layers) const {
  LayerShape largest;
  for (const int l : some_layers) {
    const LayerShape of_layer = shape(l);
    for (int LayerShape::* size :
         {&LayerShape::query_heads, &LayerShape::kv_heads, &LayerShape::key_dim, &LayerShape::value_dim})
      largest.*size = std::max(largest.*size, of_layer.*size);
  }
  return largest;
}

std::span<const double> TraceHeader::frequencies(int l) const {
  const auto at = static_cast<std::size_t>(l), most = static_cast<std::size_t>(rope_pairs);
  return std::span(inv_freq).subspan(at * most, layer_pairs.empty() ? most : static_cast<std::size_t>(layer_pairs[at]));
}

Trace::Trace(std::unique_ptr<State> state) : state_(std::move(state)) {}
Trace::Trace(Trace&&) noexcept = default;
Trace& Trace::operator=(Trace&&) noexcept = default;
Trace::~Trace() = default;

void require_file(const std::filesystem::path& path) {
  std::uint64_t length = 0;
  open_file(path.string(), length);
}

std::vector<Error> violations(const std::filesystem::path& path) {
  std::uint64_t length = 0;
  const FileDescriptor file = open_file(path.string(), length);
  try {
    return contents_of(file, length, path).violations;
  } catch (const Error& error) {
    if (error.refusal() != Refusal::input) throw;
    return {error};
  }
}

Trace Trace::open(const std::filesystem::path& path) { return Trace(std::make_unique<State>(path)); }

Trace Trace::of_arrays(const std::filesystem::path& path, TraceHeader header, std::vector<LayerInMemory> layers) {
  return Trace(std::make_unique<State>(path, std::move(header), std::move(layers)));
}

const std::filesystem::path& Trace::path() const { return state_->path_; }
const std::string& Trace::name() const { return state_->name_; }
const TraceHeader& Trace::header() const { return state_->header_; }

const std::string& Trace::hash() const {
  if (state_->hash_.empty()) state_->hash_ = state_->make_hash(*this);
  return state_->hash_;
}

bool Trace::states_hashes() const {
  return std::ranges::all_of(state_->layers_, [](const LayerPlaces& layer) {
    return std::ranges::none_of(layer.tensors, [](const TensorPlace& tensor) { return tensor.xxh3.empty(); });
  });
}

bool Trace::is_in_memory() const { return state_->layers_.front().tensors.front().memory != nullptr; }

const FileIdentity& Trace::identity() const { return state_->mapping_.identity(); }

void Trace::require_unchanged() const { state_->mapping_.require_unchanged(); }

LayerTensors Trace::layer(int l) const {
  require_unchanged();
  const TraceHeader& header = state_->header_;
  const auto at = static_cast<std::size_t>(l);
  LayerTensors tensors;
  // An archived layer is put together in place of the one before it: the queries of other layers come first.
  const bool stacked = state_->stacks_queries(l);
  if (stacked) state_->stack(l);
  const int source = header.source(l);
  if (!stacked) tensors.q = state_->view(l, 0);
  tensors.k = state_->view(source, 1);
  tensors.v = state_->values(source);
  if (stacked) {
    const TensorPlace& queries = state_->places(l).tensors.front();
    tensors.q = {state_->stack(l).queries.data(), queries.dtype, header.shape(l).query_heads,
                 static_cast<int>(queries.shape[1]), static_cast<int>(queries.shape[2])};
  }
  tensors.value_is_key = !header.stores_values();
  tensors.query_positions = query_positions(l);
  tensors.visible = {visible_units(l), header.visible_block};
  tensors.softmax_scale = static_cast<float>(header.softmax_scale);
  tensors.logit_softcap = static_cast<float>(header.logit_softcap);
  tensors.sliding_window = header.sliding_window[at];
  if (!header.chunk.empty()) tensors.chunk = header.chunk[at];
  if (!header.sinks.empty()) {
    const auto most = static_cast<std::size_t>(header.query_heads);
    tensors.sinks = stacked ? std::span<const double>(state_->stack(l).sinks)
                            : std::span(header.sinks).subspan(at * most, static_cast<std::size_t>(tensors.q.heads));
  }
  if (header.has_rope)
    tensors.rope = {header.frequencies(l), header.attention_scaling[at], header.rope_interleaved, header.rope_offset};
  return tensors;
}

std::vector<StoredTensor> Trace::tensors(int l) const {
  require_unchanged();
  std::vector<StoredTensor> all;
  const LayerPlaces& places = state_->places(l);
  for (std::size_t t = 0; t < places.tensors.size(); ++t) {
    const TensorPlace& place = places.tensors[t];
    StoredTensor& tensor =
        all.emplace_back(StoredTensor{place.path, state_->view(l, t), {}, place.xxh3, !place.memory && !place.offset});
    for (const std::uint64_t size : place.shape) tensor.shape.push_back(static_cast<int>(size));
  }
  return all;
}

std::span<const std::int32_t> Trace::query_positions(int l) const { return state_->places(l).query_positions; }

std::span<const std::int32_t> Trace::visible_units(int l) const { return state_->places(l).visible; }

bool Trace::prefetch(int l, bool queries) const {
  // Keys first: everything begins with them.
  std::uint64_t room = state_->room();
  bool all = true;
  const TraceHeader& header = state_->header_;
  const auto read_ahead = [&](const TensorPlace& place) {
    if (!place.offset) return;
    const std::uint64_t bytes = std::min(place.bytes(), room);
    if (bytes > 0) state_->mapping_.read_ahead(*place.offset, bytes);
    all = all && bytes == place.bytes();
    room -= bytes;
  };
  for (const std::size_t t : {std::size_t{1}, std::size_t{2}})
    if (t == 1 || header.stores_values()) read_ahead(state_->places(header.source(l)).tensors[t]);
  // Queries of several layers are read as a whole.
  for (const int reader : header.readers(l))
    if (queries || state_->stacks_queries(l)) read_ahead(state_->places(reader).tensors.front());
  return all;
}

void Trace::release(int l) const {
  for (const TensorPlace* place : state_->places_read(l))
    if (place->offset) state_->mapping_.let_go(*place->offset, place->bytes());
}

std::size_t Trace::mapped_bytes(int l) const { return state_->bytes(l, true); }

std::size_t Trace::archived_bytes(int l) const {
  std::size_t stacked = 0;
  if (state_->stacks_queries(l))
    for (const int reader : state_->header_.readers(l)) stacked += state_->places(reader).tensors.front().bytes();
  return state_->bytes(l, false) + stacked;
}

void Trace::limit_mapped(std::size_t bytes) const { state_->limit_mapped(bytes); }

std::size_t Trace::tensor_bytes() const {
  std::size_t bytes = 0;
  for (const LayerPlaces& layer : state_->layers_)
    for (const TensorPlace& place : layer.tensors) bytes += place.bytes();
  return bytes;
}

}  // namespace kvreplay
