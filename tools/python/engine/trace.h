// An open trace in Python: tensors as they lie in the file, and layers to measure by hand.
#pragma once

#include <nanobind/nanobind.h>

namespace kvreplay::python {

void bind_trace(nanobind::module_& module);

}  // namespace kvreplay::python
