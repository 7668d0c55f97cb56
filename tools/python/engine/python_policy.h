// Policies written in Python, in the registry beside all others.
#pragma once

#include <nanobind/nanobind.h>

namespace kvreplay::python {

void bind_python_policies(nanobind::module_& module);

}  // namespace kvreplay::python
