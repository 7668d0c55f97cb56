// The format of a trace as data: schema.json, compiled in. Reader, writer, validator and documentation know no other
// list of objects.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvreplay {

/// One attribute or dataset and the rules of its value.
struct SchemaEntry {
  std::string group;               // "/model": what must exist for the entry to matter
  std::string name;                // "n_layers"
  std::string object;              // "/model@n_layers", "/tokens/ids": as messages and tables name it
  std::string type;                // string int float | int32 float32 float64 real span string
  std::vector<std::string> shape;  // datasets: dimensions by name, number, product ("Hq*d") or difference ("T-P")
  bool attribute = false;
  bool required = false;
  bool hashed = true;      // part of the trace hash
  bool ascending = false;  // strictly
  std::optional<double> min, max, above;
  std::string equals;               // strings: the one value
  std::vector<std::string> one_of;  // strings: the values, in the order of the enumeration behind them
  std::string dimension;            // the dimension that this attribute's value is
  std::string at_most, below;       // dimensions that bound each value
  std::string divides;              // a dimension that is a multiple of the value
  std::string with;                 // a dataset that is present exactly when this one is
  std::string unless;               // an attribute of a number above 0, in whose presence this dataset is absent
  bool of_source = false;           // absent in layers that read the keys and values of another
  int since = 1;                    // version of the format
  bool minus_infinity = false;      // allowed among its numbers
  std::string help;                 // its meaning
  bool per_layer() const { return group.starts_with("/layers/"); }
  /// Whether it holds floating-point numbers of a layer; these have hashes of their own.
  bool is_tensor() const { return per_layer() && (type == "real" || type == "float32"); }
};

struct SchemaGroup {
  std::string path;
  bool required = false;
};

struct Schema {
  std::string format;
  std::int64_t version = 0;
  std::vector<SchemaGroup> groups;
  std::vector<SchemaEntry> attributes;  // of groups; those of tensors are `tensor_attributes`
  std::vector<SchemaEntry> tensor_attributes;
  std::vector<SchemaEntry> datasets;

  /// Null: there is no such attribute or dataset.
  const SchemaEntry* find(std::string_view object) const;
  /// The same of one that there is.
  const SchemaEntry& entry(std::string_view object) const;
  /// The same of an object of a file: "/layers/003/k" has the entry of every layer.
  const SchemaEntry& rule(const std::string& object) const;
};

/// Parsed once. A schema that does not parse is a bug of ours: the program stops.
const Schema& schema();

}  // namespace kvreplay
