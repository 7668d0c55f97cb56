#include "trace/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "error.h"

namespace kvreplay {
namespace {

using nlohmann::json;

constexpr std::uint64_t length_bytes = 8;
constexpr std::uint64_t largest_header = 100'000'000;  // bytes, the limit of the reference implementation

/// Bytes of an element; none: the format has no such type, or its elements are smaller than a byte.
std::optional<std::uint64_t> bytes_of_element(const std::string& dtype) {
  static const std::map<std::string, std::uint64_t> known = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2},
      {"BF16", 2}, {"U32", 4}, {"I32", 4}, {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8}};
  const auto found = known.find(dtype);
  return found == known.end() ? std::nullopt : std::optional(found->second);
}

/// The bytes of all elements; none: they do not fit into 64 bits.
std::optional<std::uint64_t> product(const std::vector<std::uint64_t>& shape, std::uint64_t element) {
  std::uint64_t bytes = element;
  for (const std::uint64_t size : shape)
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  return bytes;
}

std::optional<std::vector<std::uint64_t>> unsigned_numbers(const json& list) {
  if (!list.is_array()) return std::nullopt;
  std::vector<std::uint64_t> numbers;
  for (const json& number : list) {
    if (!number.is_number_unsigned()) return std::nullopt;
    numbers.push_back(number.get<std::uint64_t>());
  }
  return numbers;
}

/// One entry of the header; `data` and `end`: where the elements begin and the file ends.
SafeTensor tensor_of(const std::string& where, const std::string& name, const json& entry, std::uint64_t data,
                     std::uint64_t end) {
  const auto member = [&](const char* key) { return entry.is_object() && entry.contains(key) ? entry[key] : json(); };
  const json dtype = member("dtype");
  const auto shape = unsigned_numbers(member("shape")), range = unsigned_numbers(member("data_offsets"));
  if (!dtype.is_string() || !shape || !range || range->size() != 2)
    throw Error{Refusal::input, where, "header", "dtype, shape and data_offsets of the tensor",
                entry.dump(-1, ' ', true).substr(0, 100)};
  SafeTensor tensor{.name = name, .dtype = dtype.get<std::string>(), .shape = *shape};
  const auto element = bytes_of_element(tensor.dtype);
  if (!element) throw Error{Refusal::input, where, "dtype", "F16, BF16 or F32", tensor.dtype};
  const std::uint64_t first = range->front(), last = range->back();
  if (first > last || last > end - data)
    throw Error{Refusal::input, where, "data_offsets", fmt::format("ascending, at most {}", end - data),
                fmt::format("[{}, {}]", first, last)};
  if (product(tensor.shape, *element) != last - first)
    throw Error{Refusal::input, where, "data_offsets",
                fmt::format("the bytes of {} [{}]", tensor.dtype, fmt::join(tensor.shape, ", ")),
                fmt::format("{} bytes", last - first)};
  tensor.offset = data + first;
  tensor.bytes = last - first;
  return tensor;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::filesystem::path path) : path_(std::move(path)) {
  const std::string where = path_.string();
  std::uint64_t length = 0;
  FileDescriptor file = open_file(where, length);
  if (length < length_bytes)
    throw Error{Refusal::input, where, "file", "a safetensors file", fmt::format("{} bytes", length)};
  identity_ = identity_of(file, where);
  const Mapping mapping(std::move(file), length, where);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, mapping.at(0), length_bytes);
  if (header_bytes > largest_header || header_bytes > length - length_bytes)
    throw Error{Refusal::input, where, "length of the header",
                fmt::format("at most {} bytes", std::min(largest_header, length - length_bytes)),
                fmt::format("{}", header_bytes)};
  const std::string text(reinterpret_cast<const char*>(mapping.at(length_bytes)), header_bytes);
  mapping.require_unchanged();
  const json header = json::parse(text, nullptr, false);
  if (!header.is_object()) throw Error{Refusal::input, where, "header", "a JSON object", "other text"};

  const std::uint64_t data = length_bytes + header_bytes;
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      tensors_.push_back(tensor_of(where + ":" + name, name, entry, data, length));
      continue;
    }
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) throw Error{Refusal::input, where + ":__metadata__", key, "a text", value.type_name()};
      metadata_[key] = value.get<std::string>();
    }
  }
  std::ranges::sort(tensors_, {}, [](const SafeTensor& tensor) { return std::pair(tensor.offset, tensor.bytes); });
  std::uint64_t end = data;
  for (const SafeTensor& tensor : tensors_) {
    if (tensor.offset != end)
      throw Error{Refusal::input, where + ":" + tensor.name, "data_offsets",
                  fmt::format("{}, the end of the tensor before it", end - data),
                  fmt::format("{}", tensor.offset - data)};
    end += tensor.bytes;
  }
  if (end != length)
    throw Error{Refusal::input, where, "length", fmt::format("{} bytes", end), fmt::format("{} bytes", length)};
}

Mapping SafetensorsFile::map() const {
  std::uint64_t length = 0;
  FileDescriptor file = open_file(path_.string(), length);
  Mapping mapping(std::move(file), length, path_.string());
  if (mapping.identity() != identity_)
    throw Error{Refusal::input, path_.string(), "changed while it was read", "the file whose header was read",
                "another"};
  return mapping;
}

}  // namespace kvreplay
