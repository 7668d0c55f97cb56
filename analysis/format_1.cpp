#include "analysis/format_1.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "analysis/replaced_file.h"
#include "hdf5/hdf5.h"
#include "hdf5/hdf5_copy.h"
#include "policies/text/configured.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;
using hdf5::File;
using hdf5::Group;

/// Bits of the treated layers become positions of all layers. A cell that keeps every token has empty rows.
void write_positions(Group& cell, const hdf5::Dataset& set) {
  const auto sources = cell.dataset("layer_source").values<std::int32_t>();  // -1: a layer that is not treated
  const auto treated = static_cast<hsize_t>(std::ranges::count_if(sources, [](auto source) { return source >= 0; }));
  const hdf5::Shape shape = set.shape();
  if (shape.size() != 3 || shape[0] != treated || set.stored_elements() == 0 ||
      cell.dataset("sinks").stored_elements() != sources.size() * shape[1])
    throw Error{Refusal::input, set.where(), "shape", "[" + std::to_string(treated) + ", heads, words]",
                hdf5::to_string(shape)};
  const auto words = set.values<std::int64_t>();
  auto next = words.begin();
  std::vector<std::int64_t> offsets{0};
  std::vector<std::int32_t> positions;
  for (const std::int32_t source : sources)
    for (hsize_t row = 0; row < shape[1]; ++row) {
      for (hsize_t word = 0; source >= 0 && word < shape[2]; ++word, ++next)
        for (auto bits = static_cast<std::uint64_t>(*next); bits != 0; bits &= bits - 1)
          positions.push_back(static_cast<std::int32_t>(64 * word) + std::countr_zero(bits));
      if (cell.has_attribute("sets")) positions.clear();
      offsets.push_back(static_cast<std::int64_t>(positions.size()));
    }
  cell.write("offsets", offsets);
  cell.write("positions", positions);
}

/// Whether the policy ignores the budget; cells of format 1 do not record it.
bool has_own_memory(const Group& facts, int layers) {
  try {
    return !have_budget(ConfiguredPolicy::parse(facts.string_attribute("label")).plans(layers));
  } catch (const Error&) {
    return false;  // another program's: a plug-in, or in Python
  }
}

void convert(const fs::path& part, const fs::path& cells_file) {
  const File from = File::open(part);
  if (!from.has_attribute("format") || from.string_attribute("format") != "kvpart" ||
      from.integer_attribute("version") != 4)
    throw Error{Refusal::input, part.string(), "format", "kvpart, version 4", "another format"};
  File to = File::create_in_memory(cells_file.string());
  to.set_attribute("format", "kvcells");
  to.set_attribute("version", std::int64_t{1});
  for (const char* name : {"traces", "cells", "values", "seconds"}) copy(from, name, to);
  const Group cells = to.group("cells"), values = to.group("values"), sets = from.group("sets");
  for (const std::string& id : cells.names()) {
    Group cell = cells.group(id), facts = values.group(id);
    const hdf5::Dataset set = sets.dataset(id);
    write_positions(cell, set);
    facts.set_attribute("own_memory", std::int64_t{has_own_memory(facts, static_cast<int>(set.shape().front()))});
  }
  replace_file(cells_file, to.image());
}

}  // namespace

bool is_format_1(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder / "parts", ignored) || fs::exists(folder / "cells", ignored)) return false;
  return std::ranges::any_of(fs::directory_iterator(folder / "parts"),
                             [](const fs::directory_entry& entry) { return entry.path().extension() == ".h5"; });
}

void refuse_format_1(const fs::path& folder) {
  if (is_format_1(folder))
    throw Error{Refusal::input, folder.string(), "results of format 1; convert them with kvreplay merge NEW OLD"};
}

std::vector<fs::path> convert_format_1(const fs::path& folder, const fs::path& target) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder / "parts"))
    if (entry.path().extension() == ".h5") {
      fs::create_directories(target);
      convert(entry.path(), files.emplace_back(target / entry.path().filename()));
    }
  return files;
}

}  // namespace kvreplay
