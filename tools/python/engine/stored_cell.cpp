#include "analysis/stored_cell.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "interpreter_lock.h"
#include "stored_cell.h"
#include "trace.h"

namespace kvreplay::python {
namespace {

namespace nb = nanobind;

using Rows = std::vector<std::vector<std::int32_t>>;

nb::list as_list(Rows rows) {
  nb::list all;
  for (std::vector<std::int32_t>& row : rows) {
    const std::size_t size = row.size();
    all.append(as_array(std::move(row), {size}));
  }
  return all;
}

/// Python's cell: one layer at a time, whatever the number of threads that ask.
class PythonCell {
 public:
  PythonCell(const std::filesystem::path& folder, const std::string& name, const std::string& id, nb::handle trace)
      : trace_(opened_trace(trace)) {
    const Unlocked unlocked;
    cell_.emplace(folder, name, id, trace_);
  }

  /// keys, values, positions, stands_at, bytes
  nb::tuple layer(int stored_layer) {
    StoredCellLayer found;
    {
      const Unlocked unlocked;
      const std::scoped_lock alone(mutex_);
      found = cell_->layer(stored_layer);
    }
    const LayerShape shape = trace_->header().shape(stored_layer);
    const auto tokens = static_cast<std::size_t>(trace_->header().tokens());
    return nb::make_tuple(as_array(std::move(found.keys), {static_cast<std::size_t>(found.key_heads), tokens,
                                                           static_cast<std::size_t>(shape.key_dim)}),
                          as_array(std::move(found.values), {static_cast<std::size_t>(shape.kv_heads), tokens,
                                                             static_cast<std::size_t>(shape.value_dim)}),
                          as_list(std::move(found.positions)), as_list(std::move(found.stands_at)), found.bytes);
  }

 private:
  std::shared_ptr<const Trace> trace_;
  std::mutex mutex_;
  std::optional<StoredCell> cell_;
};

}  // namespace

void bind_stored_cell(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<PythonCell>(module, "StoredCell", "A cell of a finished run, whose store is asked layer by layer.")
      .def(nb::init<const std::filesystem::path&, const std::string&, const std::string&, nb::handle>(), "folder"_a,
           "name"_a, "cell"_a, "trace"_a)
      .def("layer", &PythonCell::layer, "layer"_a);
}

}  // namespace kvreplay::python
