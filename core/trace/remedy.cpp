#include "trace/remedy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "hdf5/hdf5.h"
#include "trace/schema.h"

namespace kvreplay {
namespace {

/// Problems of storage, which no rule of the schema is about.
constexpr std::pair<std::string_view, std::string_view> remedies[] = {
    {"newer than this program reads", "use a newer kvreplay"},
    {"signature", "give a trace (.h5); copy it again if it is damaged"},
    {"superblock version", "write it with HDF5's version bounds 1.8 to 1.10 (h5py: libver=(\"v108\", \"v110\"))"},
    {"filter", "write it without filters, or with shuffle and deflate (gzip) only"},
    {"layout", "write it contiguous or chunked into this file"},
    {"link", "write the object itself under this name"},
    {"storage", "write all of its elements"},
    {"chunks", "write all of its elements"},
};

/// "/layers/007/k" and "/layers/007/k@xxh3" as the schema names them.
std::string name_in_schema(const std::string& object) {
  constexpr std::string_view layers = "/layers/";
  if (!object.starts_with(layers)) return object;
  const std::size_t end = std::min(object.find('/', layers.size()), object.size());
  return fmt::format("{}{{layer}}{}", layers, object.substr(end));
}

const SchemaEntry* entry_of(const std::string& object) {
  if (const SchemaEntry* entry = schema().find(name_in_schema(object))) return entry;
  for (const SchemaEntry& entry : schema().tensor_attributes)
    if (object.ends_with("@" + entry.name)) return &entry;
  return nullptr;
}

/// "int32 [L]", "a float", or the one value.
std::string form_of(const SchemaEntry& entry) {
  if (!entry.equals.empty()) return entry.equals;
  if (!entry.one_of.empty()) return fmt::format("{}", fmt::join(entry.one_of, " or "));
  if (entry.min && entry.max && *entry.min == *entry.max) return fmt::format("{}", *entry.min);
  if (entry.type == "string") return "a string of fixed length";
  if (entry.type == "int") return "an integer";
  if (entry.type == "float") return "a float";
  const std::string type = entry.type == "real"   ? "float16, bfloat16 or float32"
                           : entry.type == "span" ? "a compound of name, kind, begin, end"
                                                  : entry.type;
  return fmt::format("{} [{}]", type, fmt::join(entry.shape, ", "));
}

std::string remedy_of(const Error& violation, const std::string& object, const std::string& file) {
  if (violation.found() == "\"kvcells\"") return "give the trace: this file has results of a replay";
  const bool is_old = violation.found() == "0" || violation.found() == "1";
  if (violation.found() == hdf5::variable_length_string || (violation.problem() == "superblock version" && is_old))
    return "run " + conversion_of(file);
  const auto known =
      std::ranges::find(remedies, violation.problem(), &std::pair<std::string_view, std::string_view>::first);
  if (known != std::end(remedies)) return std::string(known->second);
  if (const SchemaEntry* entry = entry_of(object)) return fmt::format("write {} ({})", form_of(*entry), entry->help);
  if (violation.expected() == "a group") return "write the group and its members (traces/FORMAT.md)";
  return "write or copy the file again";
}

}  // namespace

std::string conversion_of(const std::string& file) { return fmt::format("kvreplay convert {} -o NEW.h5", file); }

Error with_remedy(const Error& violation, const std::string& file) {
  const std::string object = violation.where().substr(std::min(file.size() + 1, violation.where().size()));
  const std::string remedy = "; " + remedy_of(violation, object, file);
  if (violation.found().empty())
    return {violation.refusal(), violation.where(), violation.problem() + remedy, violation.expected()};
  return {violation.refusal(), violation.where(), violation.problem(), violation.expected(),
          violation.found() + remedy};
}

}  // namespace kvreplay
