// What the store of a finished cell gives back, in Python.
#pragma once

#include <nanobind/nanobind.h>

namespace kvreplay::python {

void bind_stored_cell(nanobind::module_& module);

}  // namespace kvreplay::python
