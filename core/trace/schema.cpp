#include "trace/schema.h"

#include <nlohmann/json.hpp>

#include "error.h"
#include "trace/schema_text.h"

namespace kvreplay {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SchemaGroup, path, required)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(SchemaEntry, type, required, hashed, ascending, equals, one_of,
                                                dimension, at_most, below, divides, with, unless, of_source, since,
                                                minus_infinity, help)

namespace {

std::optional<double> number(const nlohmann::json& entry, const char* key) {
  if (!entry.contains(key)) return std::nullopt;
  return entry.at(key).get<double>();
}

/// What attributes and datasets have in common.
SchemaEntry entry_from(const nlohmann::json& json) {
  SchemaEntry entry = json;
  entry.min = number(json, "min");
  entry.max = number(json, "max");
  entry.above = number(json, "above");
  return entry;
}

SchemaEntry attribute_from(const nlohmann::json& json) {
  SchemaEntry entry = entry_from(json);
  entry.attribute = true;
  entry.group = json.at("object");
  entry.name = json.at("name");
  entry.object = entry.group + "@" + entry.name;
  return entry;
}

SchemaEntry dataset_from(const nlohmann::json& json) {
  SchemaEntry entry = entry_from(json);
  entry.object = json.at("path");
  const std::size_t slash = entry.object.rfind('/');
  entry.group = slash == 0 ? "/" : entry.object.substr(0, slash);
  entry.name = entry.object.substr(slash + 1);
  for (const nlohmann::json& dimension : json.at("shape"))
    entry.shape.push_back(dimension.is_string() ? dimension.get<std::string>() : dimension.dump());
  return entry;
}

Schema parsed() {
  const nlohmann::json json = nlohmann::json::parse(schema_text);
  Schema result;
  result.format = json.at("format");
  result.version = json.at("version");
  result.groups = json.at("groups");
  for (const nlohmann::json& attribute : json.at("attributes")) {
    SchemaEntry entry = attribute_from(attribute);
    const bool of_tensor = entry.group.ends_with("{tensor}");
    (of_tensor ? result.tensor_attributes : result.attributes).push_back(std::move(entry));
  }
  for (const nlohmann::json& dataset : json.at("datasets")) result.datasets.push_back(dataset_from(dataset));
  return result;
}

}  // namespace

const SchemaEntry* Schema::find(std::string_view object) const {
  for (const std::vector<SchemaEntry>* list : {&attributes, &datasets})
    for (const SchemaEntry& entry : *list)
      if (entry.object == object) return &entry;
  return nullptr;
}

const SchemaEntry& Schema::entry(std::string_view object) const {
  if (const SchemaEntry* found = find(object)) return *found;
  throw Error{Refusal::internal, std::string(object), "not in the schema"};
}

const SchemaEntry& Schema::rule(const std::string& object) const {
  if (!object.starts_with("/layers/")) return entry(object);
  return entry("/layers/{layer}" + object.substr(object.rfind('/')));
}

const Schema& schema() {
  static const Schema only = parsed();
  return only;
}

}  // namespace kvreplay
