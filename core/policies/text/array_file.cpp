#include "policies/text/array_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <span>
#include <sstream>
#include <utility>

#include "float_types.h"
#include "hash.h"

namespace kvreplay {
namespace {

/// Larger ones are no tables of heads.
constexpr std::uintmax_t most_bytes = std::uintmax_t{256} << 20;
constexpr std::size_t most_header_bytes = 1024;

std::string shape_text(std::span<const int> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::vector<std::byte> bytes_of(const std::string& path) {
  std::error_code problem;
  const std::uintmax_t size = std::filesystem::file_size(path, problem);
  if (problem) throw Error{Refusal::input, path, "cannot be read", "an .npy file", problem.message()};
  if (size > most_bytes)
    throw Error{Refusal::input, path, "size", fmt::format("at most {} bytes", most_bytes),
                fmt::format("{} bytes", size)};
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  std::ifstream file(path, std::ios::binary);
  if (!file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size())))
    throw Error{Refusal::input, path, "truncated", fmt::format("{} bytes", size), "fewer"};
  return bytes;
}

/// The header is a Python dictionary as NumPy writes it, {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
/// What it says where `pattern` has its parentheses.
std::string value_in(const std::string& path, const std::string& header, const char* pattern,
                     const std::string& expected) {
  std::smatch match;
  if (!std::regex_search(header, match, std::regex(pattern)))
    throw Error{Refusal::input, path, "unsupported array", expected,
                header.substr(0, header.find_last_not_of(" \n") + 1)};
  return match[1];
}

/// Bytes of a number: 4 or 8.
std::size_t number_bytes(const std::string& path, const std::string& header) {
  value_in(path, header, "'fortran_order': *(False)", "C order, fortran_order False");
  return value_in(path, header, "'descr': *'<f([48])'", "numbers of type '<f4' or '<f8'") == "4" ? 4 : 8;
}

std::vector<int> shape_in(const std::string& path, const std::string& header) {
  constexpr const char* sizes = R"('shape': *\(((?:[0-9]{1,9}(?:, *[0-9]{1,9}){0,7},?)?)\))";
  std::istringstream list(value_in(path, header, sizes, "a shape of at most 8 sizes below 1000000000"));
  std::vector<int> shape;
  for (int size; list >> size; list.ignore()) shape.push_back(size);
  return shape;
}

/// The header, and where the numbers begin: "\x93NUMPY", two bytes of version, the header's length in 2 bytes or, from
/// version 2 on, in 4.
std::pair<std::string, std::size_t> header_of(const std::string& path, std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with("\x93NUMPY") || text.size() < 12 || text[6] < 1 || text[6] > 3)
    throw Error{Refusal::input, path, "not an .npy file", "an .npy file of version 1 to 3", "another file format"};
  const std::size_t width = text[6] == 1 ? 2 : 4, begin = 8 + width;
  std::size_t length = 0;
  for (std::size_t i = 0; i < width; ++i) length |= std::to_integer<std::size_t>(bytes[8 + i]) << (8 * i);
  if (length > text.size() - begin)
    throw Error{Refusal::input, path, "truncated", fmt::format("a header of {} bytes", length),
                fmt::format("{} bytes", text.size() - begin)};
  if (length > most_header_bytes)
    throw Error{Refusal::input, path, "size of the header", fmt::format("at most {} bytes", most_header_bytes),
                fmt::format("{} bytes", length)};
  return {std::string(text.substr(begin, length)), begin + length};
}

double number_at(const std::byte* data, std::size_t bytes) {
  if (bytes == 4) return static_cast<double>(load(data, DType::float32, 0));
  double number;
  std::memcpy(&number, data, sizeof(number));
  return number;
}

}  // namespace

Array read_array(const std::string& path) {
  const std::vector<std::byte> bytes = bytes_of(path);
  const auto [header, begin] = header_of(path, bytes);
  Array array{.shape = shape_in(path, header), .numbers = {}, .source = {path, hash_of(bytes)}};
  const std::size_t width = number_bytes(path, header), held = bytes.size() - begin;
  double count = 1;  // exact wherever a file can hold as many
  for (const int size : array.shape) count *= size;
  if (count * static_cast<double>(width) != static_cast<double>(held))
    throw Error{Refusal::input, path, "size", "the numbers of shape " + shape_text(array.shape),
                fmt::format("{} bytes after the header", held)};
  for (std::size_t i = 0; i < held / width; ++i) {
    const double number = array.numbers.emplace_back(number_at(bytes.data() + begin + i * width, width));
    if (!std::isfinite(number))
      throw Error{Refusal::input, path, fmt::format("number {}", i), "a finite number", fmt::format("{}", number)};
  }
  return array;
}

void ArrayFile::parameter(Parameters& p, std::string name, std::string help) {
  const auto normal = [this](std::string_view text) {
    array_ = text == word_ ? nullptr : std::make_shared<const Array>(read_array(std::string(text)));
    return std::string(text);
  };
  p.add(std::move(name), text_, word_ + " | FILE.npy", normal, std::move(help));
}

std::vector<Source> ArrayFile::sources() const {
  return array_ ? std::vector<Source>{array_->source} : std::vector<Source>{};
}

const Array& ArrayFile::of_shape(const std::string& who, const std::vector<int>& sizes, std::string_view shape) const {
  const std::string expected = fmt::format("an .npy file of shape {} = {}", shape, shape_text(sizes));
  if (!array_) throw Error{Refusal::input, who, "missing table", expected, text_};
  if (array_->shape != sizes)
    throw Error{Refusal::input, array_->source.path, "shape for " + who, expected, shape_text(array_->shape)};
  return *array_;
}

}  // namespace kvreplay
