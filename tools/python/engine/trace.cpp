#include "trace/trace.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "arrays.h"
#include "error.h"
#include "interpreter_lock.h"
#include "machine.h"
#include "replay/replay.h"
#include "trace.h"
#include "trace/header.h"
#include "trace/schema.h"
#include "trace/validate.h"
#include "trace/writer.h"
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

/// A value of a header in Python: numbers of a dataset as an array of its shape.
struct AsPython {
  std::vector<std::uint64_t> shape;

  nb::object operator()(const std::vector<Span>& spans) const {
    nb::list all;
    for (const Span& span : spans) all.append(nb::make_tuple(span.name, span.kind, span.begin, span.end));
    return all;
  }
  template <class Number>
  nb::object operator()(const std::vector<Number>& numbers) const {
    return nb::cast(shape.size() == 2 ? as_array(numbers, {shape[0], shape[1]}) : as_array(numbers, {shape.at(0)}));
  }
  template <class Scalar>
  nb::object operator()(const Scalar& one) const {
    return nb::cast(one);
  }

  static nb::object numbers(std::span<const std::int32_t> numbers) {
    return AsPython{{numbers.size()}}(std::vector<std::int32_t>(numbers.begin(), numbers.end()));
  }
};

/// Python's Trace.
class Traced {
 public:
  explicit Traced(Trace&& trace) : trace_(std::make_shared<Trace>(std::move(trace))) {}

  const Trace& trace() const { return *trace_; }
  const SharedTrace& shared() const { return trace_; }
  const TraceHeader& header() const { return trace_->header(); }

  int checked(int layer) const {
    if (layer < 0 || layer >= header().layers)
      throw Error{Refusal::usage, trace_->path().string(), "layer", "0.." + std::to_string(header().layers - 1),
                  std::to_string(layer)};
    return layer;
  }

  /// The bytes of a tensor of a stored layer, and what they are: mapped, or a copy where the file is an archive; None:
  /// the layer has no such tensor.
  nb::object tensor(const std::string& name, int layer) const {
    const std::vector<StoredTensor> tensors = trace_->tensors(checked(layer));
    const auto found =
        std::ranges::find_if(tensors, [&](const StoredTensor& one) { return one.path.ends_with("/" + name); });
    if (found == tensors.end()) return nb::none();
    const TensorView& tensor = found->view;
    std::shared_ptr<const std::byte> bytes(trace_, tensor.data);
    if (found->is_archived) {
      const auto copy = std::make_shared<std::vector<std::byte>>(tensor.data, tensor.data + tensor.bytes());
      bytes = {copy, copy->data()};
    }
    auto* held = new std::shared_ptr<const std::byte>(std::move(bytes));
    const nb::capsule owner(held,
                            [](void* kept) noexcept { delete static_cast<std::shared_ptr<const std::byte>*>(kept); });
    const Array<const std::uint8_t> array(reinterpret_cast<const std::uint8_t*>(held->get()), {tensor.bytes()}, owner);
    return nb::make_tuple(array, name_of(tensor.dtype), found->shape);
  }

  /// An attribute or dataset of the header ("/model@n_layers"); None: the trace has none.
  nb::object value(const std::string& object) const {
    const SchemaEntry* const entry = schema().find(object);
    const auto found = entry != nullptr ? header_value(header(), *entry) : std::nullopt;
    if (!found) return nb::none();
    return std::visit(AsPython{dataset_shape(header(), *entry, *found)}, *found);
  }

  std::vector<std::string> problems() const {
    std::vector<std::string> found;
    for (const Error& one : validate_deep(*trace_).problems) found.emplace_back(one.what());
    return found;
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
  SharedTrace trace_;
};

DType dtype_of(const std::string& name) {
  for (const DType known : {DType::float16, DType::bfloat16, DType::float32})
    if (name == name_of(known)) return known;
  throw Error{Refusal::input, "tensor", "type", "float16, bfloat16 or float32", name};
}

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// (bytes, type, shape) as kvreplay.memory gives it; the array lives as long as the trace.
TensorInMemory tensor_in_memory(nb::handle given) {
  TensorInMemory tensor;
  tensor.dtype = dtype_of(nb::cast<std::string>(given[1]));
  tensor.shape = nb::cast<std::vector<std::uint64_t>>(given[2]);
  const std::shared_ptr<Bytes> held(new Bytes(nb::cast<Bytes>(given[0])), [](Bytes* kept) {
    const Locked locked;
    delete kept;
  });
  tensor.elements = {held, reinterpret_cast<const std::byte*>(held->data())};
  return tensor;
}

LayerInMemory layer_in_memory(nb::handle given) {
  LayerInMemory layer{.q = tensor_in_memory(given[0])};
  if (!given[1].is_none()) layer.k = tensor_in_memory(given[1]);
  if (!given[2].is_none()) layer.v = tensor_in_memory(given[2]);
  if (!given[3].is_none()) layer.wo = tensor_in_memory(given[3]);
  layer.query_positions = nb::cast<std::vector<std::int32_t>>(given[4]);
  if (!given[5].is_none()) {
    layer.visible = nb::cast<std::vector<std::int32_t>>(given[5][0]);
    layer.visible_shape = nb::cast<std::vector<std::uint64_t>>(given[5][1]);
  }
  return layer;
}

Value value_of(const SchemaEntry& entry, nb::handle given) {
  if (entry.type == "string") {
    const auto text = nb::cast<nb::bytes>(given);
    return std::string(text.c_str(), text.size());
  }
  if (entry.type == "int") return nb::cast<std::int64_t>(given);
  if (entry.type == "float") return nb::cast<double>(given);
  if (entry.type == "int32") return nb::cast<std::vector<std::int32_t>>(given);
  if (entry.type == "float64") return nb::cast<std::vector<double>>(given);
  std::vector<Span> spans;
  for (const nb::handle span : given) {
    const auto name = nb::cast<nb::bytes>(span[0]), kind = nb::cast<nb::bytes>(span[1]);
    spans.push_back(
        {{name.c_str(), name.size()}, {kind.c_str(), kind.size()}, nb::cast<int>(span[2]), nb::cast<int>(span[3])});
  }
  return spans;
}

Value header_value(const SchemaEntry& entry, nb::handle given) {
  try {
    return value_of(entry, given);
  } catch (const std::bad_cast&) {
    throw Error{Refusal::input, entry.object, "type", entry.type, nb::cast<std::string>(nb::str(given.type()))};
  }
}

/// Values by the objects of the schema that they are in a file.
TraceHeader header_of(const std::string& path, const nb::dict& values) {
  TraceHeader header;
  Rules rules(path);
  for (const std::vector<SchemaEntry>* entries : {&schema().attributes, &schema().datasets})
    for (const SchemaEntry& entry : *entries) {
      if (entry.per_layer() || !values.contains(entry.object.c_str())) continue;
      Value value = header_value(entry, values[entry.object.c_str()]);
      rules.check_value(entry.object, entry, value);
      set_header_value(header, entry, std::move(value));
    }
  header.has_rope = !header.inv_freq.empty();
  if (header.has_rope) header.rope_pairs = static_cast<int>(header.inv_freq.size()) / header.layers;
  return header;
}

/// A trace that `kvreplay validate` would find nothing wrong with, its hash known.
Traced trace_of_arrays(const std::filesystem::path& path, const nb::dict& values, const nb::list& tensors) {
  TraceHeader header = header_of(path.string(), values);
  std::vector<LayerInMemory> layers;
  for (const nb::handle layer : tensors) layers.push_back(layer_in_memory(layer));
  const Unlocked unlocked;
  Trace trace = Trace::of_arrays(path, std::move(header), std::move(layers));
  const DeepReport report = validate_deep(trace);
  if (!report.problems.empty()) throw report.problems.front();
  trace.hash();  // several threads may ask for it
  return Traced(std::move(trace));
}

}  // namespace

std::shared_ptr<const Trace> opened_trace(nb::handle trace) { return nb::cast<const Traced&>(trace).shared(); }

void bind_trace(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Traced>(module, "Trace")
      .def(
          "__init__", [](Traced* made, const std::filesystem::path& path) { new (made) Traced(Trace::open(path)); },
          "path"_a, nb::call_guard<Unlocked>())
      .def_prop_ro("in_memory", [](const Traced& of) { return of.trace().is_in_memory(); })
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
      .def_prop_ro("value_dim", [](const Traced& of) { return of.header().value_components(); })
      .def_prop_ro("prompt", [](const Traced& of) { return of.header().prefill; })
      .def_prop_ro("tokens", [](const Traced& of) { return of.header().tokens(); })
      .def_prop_ro("text", [](const Traced& of) { return of.header().text; })
      .def_prop_ro("ids", [](const Traced& of) { return of.value("/tokens/ids"); })
      .def_prop_ro("offsets",
                   [](const Traced& of) { return AsPython{{of.header().offsets.size() / 2, 2}}(of.header().offsets); })
      .def_prop_ro("spans", [](const Traced& of) { return AsPython{}(of.header().spans); })
      .def(
          "query_positions",
          [](const Traced& of, int layer) { return AsPython::numbers(of.trace().query_positions(of.checked(layer))); },
          "layer"_a)
      .def(
          "visible_units",
          [](const Traced& of, int layer) { return AsPython::numbers(of.trace().visible_units(of.checked(layer))); },
          "layer"_a)
      .def(
          "treated_layers", [](const Traced& of, bool sliding) { return treated_layers(of.trace(), sliding); },
          "sliding"_a)
      .def("tensor", &Traced::tensor, "name"_a, "layer"_a)
      .def("value", &Traced::value, "object"_a)
      .def("problems", &Traced::problems, nb::call_guard<Unlocked>())
      .def("layer", &Traced::layer, "layer"_a, "boundary"_a, "eval"_a, "device"_a);
  nb::class_<TraceWriter>(module, "TraceWriter")
      .def(nb::init<const std::filesystem::path&>(), "path"_a, nb::call_guard<Unlocked>())
      .def(
          "write",
          [](TraceWriter& to, const std::string& object, nb::handle value, const std::vector<std::uint64_t>& shape) {
            to.write(object, header_value(schema().rule(object), value), shape);
          },
          "object"_a, "value"_a, "shape"_a)
      .def(
          "begin_tensor",
          [](TraceWriter& to, const std::string& object, const std::string& type,
             const std::vector<std::uint64_t>& shape) { return to.begin_tensor(object, dtype_of(type), shape); },
          "object"_a, "type"_a, "shape"_a, nb::call_guard<Unlocked>())
      .def(
          "write_tokens",
          [](TraceWriter& to, const std::string& object, std::uint64_t begin, const Bytes& piece) {
            to.write_tokens(object, begin, std::as_bytes(std::span(piece.data(), piece.size())));
          },
          "object"_a, "begin"_a, "piece"_a, nb::call_guard<Unlocked>())
      .def("finish", &TraceWriter::finish, nb::call_guard<Unlocked>());
  module.def(
      "trace_of_arrays", trace_of_arrays, "path"_a, "values"_a, "tensors"_a,
      "A trace of arrays in memory: values by the schema's objects; of each layer q, k, v and wo, or None, as (bytes,\n"
      "type, shape), the positions of its queries, and the visible units, or None, as (numbers, shape).");
}

}  // namespace kvreplay::python
