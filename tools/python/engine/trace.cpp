#include "trace/trace.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "arrays.h"
#include "error.h"
#include "interpreter_lock.h"
#include "machine.h"
#include "replay/replay.h"
#include "trace.h"
#include "view.h"

namespace kvreplay::python {
namespace {

namespace nb = nanobind;

using SharedTrace = std::shared_ptr<Trace>;

/// One layer, held open with all that it is measured by.
struct OpenLayer {
  SharedTrace trace;
  std::unique_ptr<Backend> backend;
  std::vector<std::int32_t> eval_queries;
  std::unique_ptr<LayerView> view;
};

/// Python's Trace.
class Traced {
 public:
  explicit Traced(const std::filesystem::path& path) : trace_(std::make_shared<Trace>(Trace::open(path))) {}

  const Trace& trace() const { return *trace_; }
  const TraceHeader& header() const { return trace_->header(); }

  std::span<const std::int32_t> query_positions(int layer) const { return trace_->query_positions(checked(layer)); }

  /// The bytes of q, k or v of a stored layer, and what they are: mapped, or a copy where the file is an archive.
  nb::tuple tensor(const std::string& name, int layer) const {
    const LayerTensors tensors = trace_->layer(checked(layer));
    const TensorView& tensor = name == "q" ? tensors.q : name == "k" ? tensors.k : tensors.v;
    std::shared_ptr<const std::byte> bytes(trace_, tensor.data);
    if (trace_->archived_bytes(layer) > 0) {
      const auto copy = std::make_shared<std::vector<std::byte>>(tensor.data, tensor.data + tensor.bytes());
      bytes = {copy, copy->data()};
    }
    auto* held = new std::shared_ptr<const std::byte>(std::move(bytes));
    const nb::capsule owner(held,
                            [](void* kept) noexcept { delete static_cast<std::shared_ptr<const std::byte>*>(kept); });
    const Array<const std::uint8_t> array(reinterpret_cast<const std::uint8_t*>(held->get()), {tensor.bytes()}, owner);
    return nb::make_tuple(array, name_of(tensor.dtype), nb::make_tuple(tensor.heads, tensor.tokens, tensor.dim));
  }

  View layer(int layer, const std::string& boundary_text, const std::string& eval, const std::string& device) const {
    const Device chosen = find_device(device);
    auto open = std::make_shared<OpenLayer>();
    open->trace = trace_;
    open->backend = make_backend(chosen.backend, 0, {.number = chosen.number});
    if (eval != "continuation" || header().continuation() > 0) open->eval_queries = eval_queries(*trace_, eval);
    const int boundary = kvreplay::boundary(*trace_, boundary_text);
    const LayerPlace place{checked(layer), header().layers, layer, boundary, marked_question(*trace_, boundary)};
    open->view = std::make_unique<LayerView>(*open->backend, trace_->layer(layer), place, open->eval_queries);
    const LayerView& view = *open->view;
    return View(view, std::move(open));
  }

 private:
  int checked(int layer) const {
    if (layer < 0 || layer >= header().layers)
      throw Error{Refusal::usage, trace_->path().string(), "layer", "0.." + std::to_string(header().layers - 1),
                  std::to_string(layer)};
    return layer;
  }

  SharedTrace trace_;
};

}  // namespace

void bind_trace(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Traced>(module, "Trace")
      .def(nb::init<const std::filesystem::path&>(), "path"_a, nb::call_guard<Unlocked>())
      .def_prop_ro("path", [](const Traced& of) { return of.trace().path(); })
      .def_prop_ro("name", [](const Traced& of) { return of.trace().name(); })
      .def_prop_ro("hash", [](const Traced& of) { return of.trace().hash(); })
      .def_prop_ro("model", [](const Traced& of) { return of.header().model; })
      .def_prop_ro("synthetic", [](const Traced& of) { return of.header().synthetic; })
      .def_prop_ro("dtype", [](const Traced& of) { return name_of(of.header().dtype); })
      .def_prop_ro("layers", [](const Traced& of) { return of.header().layers; })
      .def_prop_ro("query_heads", [](const Traced& of) { return of.header().query_heads; })
      .def_prop_ro("kv_heads", [](const Traced& of) { return of.header().kv_heads; })
      .def_prop_ro("head_dim", [](const Traced& of) { return of.header().head_dim; })
      .def_prop_ro("prompt", [](const Traced& of) { return of.header().prefill; })
      .def_prop_ro("tokens", [](const Traced& of) { return of.header().tokens(); })
      .def_prop_ro("text", [](const Traced& of) { return nb::bytes(of.header().text.data(), of.header().text.size()); })
      .def_prop_ro(
          "ids", [](const Traced& of) { return as_array(of.header().ids, {of.header().ids.size()}); },
          nb::rv_policy::move)
      .def_prop_ro(
          "offsets",
          [](const Traced& of) {
            return as_array(of.header().offsets, {of.header().offsets.size() / 2, std::size_t{2}});
          },
          nb::rv_policy::move)
      .def_prop_ro("spans",
                   [](const Traced& of) {
                     nb::list all;
                     for (const Span& span : of.header().spans)
                       all.append(nb::make_tuple(span.name, span.kind, span.begin, span.end));
                     return all;
                   })
      .def(
          "query_positions",
          [](const Traced& of, int layer) {
            const auto found = of.query_positions(layer);
            return as_array(std::vector<std::int32_t>(found.begin(), found.end()), {found.size()});
          },
          "layer"_a)
      .def(
          "treated_layers", [](const Traced& of, bool sliding) { return treated_layers(of.trace(), sliding); },
          "sliding"_a)
      .def("tensor", &Traced::tensor, "name"_a, "layer"_a)
      .def("layer", &Traced::layer, "layer"_a, "boundary"_a, "eval"_a, "device"_a);
}

}  // namespace kvreplay::python
