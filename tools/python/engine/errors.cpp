#include "errors.h"

#include <nanobind/stl/string.h>

#include <string>

namespace kvreplay::python {
namespace {

namespace nb = nanobind;

nb::object error_type() { return nb::module_::import_("kvreplay.errors").attr("Error"); }

Refusal refusal_of(int exit_code) {
  for (const Refusal refusal : {Refusal::usage, Refusal::input, Refusal::capability, Refusal::resources,
                                Refusal::internal, Refusal::interrupted})
    if (static_cast<int>(refusal) == exit_code) return refusal;
  return Refusal::internal;
}

}  // namespace

Error as_error(nb::python_error& raised) {
  if (raised.matches(PyExc_KeyboardInterrupt)) return {Refusal::interrupted, "Python", "interrupted"};
  const nb::object value = nb::borrow(raised.value());
  if (!nb::isinstance(value, error_type())) {
    const std::string type = nb::cast<std::string>(nb::borrow(raised.type()).attr("__name__"));
    return {Refusal::usage, "Python", type + ": " + nb::cast<std::string>(nb::str(value))};
  }
  const auto text = [&value](const char* piece) { return nb::cast<std::string>(value.attr(piece)); };
  return {refusal_of(nb::cast<int>(value.attr("exit_code"))), text("where"), text("what"), text("expected"),
          text("found")};
}

void translate_errors() {
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void*) {
        try {
          std::rethrow_exception(thrown);
        } catch (const Error& error) {
          if (error.refusal() == Refusal::interrupted) {
            PyErr_SetString(PyExc_KeyboardInterrupt, error.what());
            return;
          }
          // Names in files and of files need not be UTF-8.
          const auto text = [](const std::string& piece) {
            return nb::steal(
                PyUnicode_DecodeUTF8(piece.data(), static_cast<Py_ssize_t>(piece.size()), "backslashreplace"));
          };
          const nb::object value = error_type()(text(error.where()), text(error.problem()), text(error.expected()),
                                                text(error.found()), error.exit_code());
          PyErr_SetObject(error_type().ptr(), value.ptr());
        }
      },
      nullptr);
}

}  // namespace kvreplay::python
