// A trace's header as the schema sees it: values by object, and the rules that hold for them, whoever brings them: the
// reader from a file, the writer from a program.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "error.h"
#include "hash.h"
#include "trace/schema.h"
#include "trace/trace.h"

namespace kvreplay {

using Value =
    std::variant<std::string, std::int64_t, double, std::vector<std::int32_t>, std::vector<double>, std::vector<Span>>;

/// Whether a header has an optional group.
bool has_group(const TraceHeader& header, std::string_view group);

/// The lowest version of the format that has every object of `header`.
std::int64_t version_of(const TraceHeader& header);

/// Throws nlohmann::json::exception where the text of a file is something else.
std::vector<OtherState> other_states(const TraceHeader& header);

/// What the object's value is in `header`; none: an optional object that is left out.
std::optional<Value> header_value(const TraceHeader& header, const SchemaEntry& entry);

/// The object of `header` that says that this one is absent, in layer `layer` if it is of layers; empty: none does.
std::string left_out_by(const SchemaEntry& entry, const TraceHeader& header, int layer);

/// The shape of the dataset that a value of `header` becomes; {}: a scalar.
std::vector<std::uint64_t> dataset_shape(const TraceHeader& header, const SchemaEntry& entry, const Value& value);

/// The opposite. `format`, `version` and `complete` have no place in the header and are dropped.
void set_header_value(TraceHeader& header, const SchemaEntry& entry, Value value);

/// As if an optional object were not there.
void drop_header_value(TraceHeader& header, const SchemaEntry& entry);

/// "/layers/{layer}/k" for layer 3: "/layers/003/k"; four digits and more where needed.
std::string object_in_layer(const SchemaEntry& entry, int layer);

/// The rules of the format for one file. Everything refused is an Error{input} whose where is "FILE:/object/path".
class Rules {
 public:
  explicit Rules(std::string file) : file_(std::move(file)) {}

  std::string where(const std::string& object) const { return file_ + ":" + object; }

  /// A dimension that is known from now on: from an attribute, or from the first shape that has it.
  void bind(const std::string& dimension, std::int64_t size) { sizes_[dimension] = size; }
  std::int64_t size(const std::string& dimension) const { return known(dimension).value(); }
  /// The sizes of a layer's tensors, where those of the layers differ.
  void bind_layer(const TraceHeader& header, int layer);
  /// By name, number, product or difference; none: it is not bound.
  std::optional<std::int64_t> known(const std::string& dimension) const;

  void check_shape(const std::string& object, const SchemaEntry& entry, const std::vector<std::uint64_t>& found);
  /// Binds the dimension that the value is, if it is one.
  void check_value(const std::string& object, const SchemaEntry& entry, const Value& value);
  /// The units of /layers/{layer}/visible, whose shape was checked; `positions`: of the stored queries, empty: all.
  void check_units(const std::string& object, const TraceHeader& header, const std::vector<std::int32_t>& units,
                   const std::vector<std::int32_t>& positions) const;
  /// Which rules between objects are broken, once all have been seen. Objects whose own value broke a rule are left out
  /// of `header`, and their dimensions unbound.
  std::vector<Error> broken_relations(const TraceHeader& header) const;
  /// All of it, of a header that is not in a file yet.
  void check_header(const TraceHeader& header);

 private:
  using Note = std::function<void(const std::string& object, const std::string& what, const std::string& expected,
                                  const std::string& found)>;

  std::string expected_shape(const SchemaEntry& entry) const;
  void note_shapes_of_layers(const TraceHeader& header, const Note& note) const;
  void note_sources(const TraceHeader& header, const Note& note) const;
  void note_passes(const TraceHeader& header, const Note& note) const;

  std::string file_;
  std::map<std::string, std::int64_t> sizes_;
};

/// Into a trace hash: object, NUL, length of the value in bytes (64 bits), value; traces/FORMAT.md has the values.
void hash_value(Hash& hash, const std::string& object, const Value& value);
void hash_header(Hash& hash, const TraceHeader& header);

}  // namespace kvreplay
