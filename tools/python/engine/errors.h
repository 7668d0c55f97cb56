// Errors on their way between C++ and Python: the same four pieces and the same exit code on both sides.
#pragma once

#include <nanobind/nanobind.h>

#include "error.h"

namespace kvreplay::python {

/// What was raised in Python, as an error of the engine: kvreplay.Error as itself, KeyboardInterrupt as an
/// interruption, others by their type and message. The caller holds the interpreter's lock.
Error as_error(nanobind::python_error& raised);

/// From here on Error reaches Python as kvreplay.Error, an interruption as KeyboardInterrupt.
void translate_errors();

}  // namespace kvreplay::python
