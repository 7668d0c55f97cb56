#include "policies/text/array_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <utility>

#include "float_types.h"
#include "hash.h"

namespace kvreplay {
namespace {

/// Larger ones are no tables of heads.
constexpr std::uintmax_t most_bytes = std::uintmax_t{256} << 20;
constexpr std::size_t most_dimensions = 8;

std::string shape_text(std::span<const int> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::vector<std::byte> bytes_of(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw Error{Refusal::input, path, "cannot be read", "an .npy file", "none"};
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error || size > most_bytes)
    throw Error{Refusal::input, path, "size", fmt::format("at most {} bytes", most_bytes),
                error ? error.message() : fmt::format("{} bytes", size)};
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  std::ifstream file(path, std::ios::binary);
  if (!file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size())))
    throw Error{Refusal::input, path, "cannot be read", fmt::format("{} bytes", size), "fewer"};
  return bytes;
}

/// The header: a Python dictionary as NumPy writes it, {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
class Header {
 public:
  Header(const std::string& path, std::string_view text) : path_(path), text_(text) {}

  /// What stands behind 'key': up to the comma or brace, or the parentheses and what is in them.
  std::string_view value(std::string_view key) const {
    const std::string quoted = fmt::format("'{}':", key);
    const std::size_t found = text_.find(quoted);
    if (found == std::string_view::npos) refuse(fmt::format("'{}' in the header", key), "none");
    std::string_view rest = text_.substr(found + quoted.size());
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    const bool list = rest.starts_with('(');
    const std::size_t end = list ? rest.find(')') : rest.find_first_of(",}");
    if (end == std::string_view::npos) refuse("an end of the header's " + quoted, "none");
    return rest.substr(0, end + (list ? 1 : 0));
  }

  std::vector<int> shape() const {
    std::string_view list = value("shape");
    if (list.size() < 2 || !list.starts_with('(')) refuse("a shape in parentheses", std::string(list));
    list = list.substr(1, list.size() - 2);
    std::vector<int> sizes;
    while (!list.empty()) {
      const std::size_t comma = std::min(list.find(','), list.size());
      std::string_view piece = list.substr(0, comma);
      list.remove_prefix(std::min(comma + 1, list.size()));
      piece.remove_prefix(std::min(piece.find_first_not_of(' '), piece.size()));
      if (piece.empty()) continue;  // behind the last comma
      if (sizes.size() == most_dimensions) refuse(fmt::format("at most {} dimensions", most_dimensions), "more");
      const bool digits = piece.find_first_not_of("0123456789") == std::string_view::npos && piece.size() < 10;
      if (!digits) refuse("sizes below 1000000000", std::string(piece));
      sizes.push_back(std::stoi(std::string(piece)));
    }
    return sizes;
  }

  /// Bytes of a number: 4 or 8.
  std::size_t number_bytes() const {
    const std::string_view type = value("descr"), order = value("fortran_order");
    if (type != "'<f4'" && type != "'<f8'") refuse("numbers of type '<f4' or '<f8'", std::string(type));
    if (order != "False") refuse("C order, fortran_order False", std::string(order));
    return type == "'<f4'" ? 4 : 8;
  }

 private:
  [[noreturn]] void refuse(const std::string& expected, const std::string& found) const {
    throw Error{Refusal::input, path_, "not an array that is read", expected, found};
  }

  const std::string& path_;
  std::string_view text_;
};

/// The header, and where the numbers begin: "\x93NUMPY", two bytes of version, the header's length in 2 bytes or, from
/// version 2 on, in 4.
std::pair<std::string_view, std::size_t> header_of(const std::string& path, std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with("\x93NUMPY") || text.size() < 12 || text[6] < 1 || text[6] > 3)
    throw Error{Refusal::input, path, "not an array that is read", "an .npy file of version 1 to 3", "another file"};
  const std::size_t width = text[6] == 1 ? 2 : 4, begin = 8 + width;
  std::size_t length = 0;
  for (std::size_t i = 0; i < width; ++i) length |= std::to_integer<std::size_t>(bytes[8 + i]) << (8 * i);
  if (length > text.size() - begin)
    throw Error{Refusal::input, path, "cut off", fmt::format("a header of {} bytes", length),
                fmt::format("{} bytes", text.size() - begin)};
  return {text.substr(begin, length), begin + length};
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
  const auto [text, begin] = header_of(path, bytes);
  const Header header(path, text);
  Array array{.shape = header.shape(), .numbers = {}, .source = {path, hash_of(bytes)}};
  const std::size_t width = header.number_bytes(), held = (bytes.size() - begin) / width;
  std::size_t count = 1;
  for (const int size : array.shape) {
    // One more than there are says enough, and does not overflow.
    count =
        size != 0 && count > held / static_cast<std::size_t>(size) ? held + 1 : count * static_cast<std::size_t>(size);
  }
  if (count * width != bytes.size() - begin)
    throw Error{Refusal::input, path, "size", "the numbers of shape " + shape_text(array.shape),
                fmt::format("{} bytes behind the header", bytes.size() - begin)};
  for (std::size_t i = 0; i < count; ++i) {
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
  if (!array_) throw Error{Refusal::input, who, "no table", expected, text_};
  if (array_->shape != sizes)
    throw Error{Refusal::input, array_->source.path, "shape for " + who, expected, shape_text(array_->shape)};
  return *array_;
}

}  // namespace kvreplay
