// An open trace in Python: of a file or of arrays in memory, with tensors as they lie there and layers to measure by
// hand.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "trace/trace.h"

namespace kvreplay::python {

/// What Python's Trace holds open.
std::shared_ptr<const Trace> opened_trace(nanobind::handle trace);

void bind_trace(nanobind::module_& module);

}  // namespace kvreplay::python
