#include "trace/compare.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "float_types.h"
#include "trace/header.h"
#include "trace/schema.h"

namespace kvreplay {
namespace {

struct Words {
  std::string where, first, second;
};

std::string text_of(const Span& span) {
  return fmt::format("{} ({}) [{}, {})", span.name, span.kind, span.begin, span.end);
}
template <class Number>
std::string text_of(Number number) {
  return fmt::format("{}", number);
}

std::string quoted(const std::string& text) { return fmt::format("\"{}\"", text); }

/// The first element at which two lists part.
template <class Element>
std::optional<Words> first_difference(const std::vector<Element>& a, const std::vector<Element>& b) {
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    if (!(a[i] == b[i])) return Words{fmt::format("element {}", i), text_of(a[i]), text_of(b[i])};
  if (a.size() != b.size())
    return Words{"", fmt::format("{} elements", a.size()), fmt::format("{} elements", b.size())};
  return std::nullopt;
}

std::optional<Words> first_difference(const std::string& a, const std::string& b) {
  if (a == b) return std::nullopt;
  if (a.size() <= 80 && b.size() <= 80) return Words{"", quoted(a), quoted(b)};
  const auto at = static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
  return Words{fmt::format("byte {}", at), quoted(a.substr(at, 40)), quoted(b.substr(at, 40))};
}

template <class Number>
std::optional<Words> first_difference(Number a, Number b) {
  return a == b ? std::nullopt : std::optional(Words{"", text_of(a), text_of(b)});
}

void compare_values(const std::string& object, const std::optional<Value>& a, const std::optional<Value>& b,
                    std::vector<TraceDifference>& differences) {
  if (!a && !b) return;
  std::optional<Words> words;
  if (a && b)
    words = std::visit(
        [&](const auto& value) { return first_difference(value, std::get<std::decay_t<decltype(value)>>(*b)); }, *a);
  else
    words = Words{"", a ? "present" : "none", b ? "present" : "none"};
  if (words) differences.push_back({object, words->where, words->first, words->second});
}

/// "head 3, position 17, component 5" of flat element i.
std::string element_name(const TensorView& view, std::size_t i, std::span<const std::int32_t> positions) {
  const auto dim = static_cast<std::size_t>(view.dim), tokens = static_cast<std::size_t>(view.tokens);
  const std::size_t row = i / dim, token = row % tokens;
  return fmt::format("head {}, position {}, component {}", row / tokens,
                     positions.empty() ? static_cast<std::int32_t>(token) : positions[token], i % dim);
}

void compare_tensors(const StoredTensor& a, const StoredTensor& b, std::span<const std::int32_t> positions,
                     double tolerance, std::vector<TraceDifference>& differences) {
  if (a.shape != b.shape) {
    differences.push_back(
        {a.path, "", fmt::format("[{}]", fmt::join(a.shape, ", ")), fmt::format("[{}]", fmt::join(b.shape, ", "))});
    return;
  }
  if (a.view.dtype == b.view.dtype && std::memcmp(a.view.data, b.view.data, a.view.bytes()) == 0) return;
  std::optional<TraceDifference> difference;
  double largest = 0.0;
  const std::size_t elements = a.view.bytes() / size_of(a.view.dtype);
  for (std::size_t i = 0; i < elements; ++i) {
    const double x = load(a.view.data, a.view.dtype, i), y = load(b.view.data, b.view.dtype, i);
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    const double distance =
        std::isfinite(x) && std::isfinite(y) ? std::abs(x - y) : std::numeric_limits<double>::infinity();
    largest = std::max(largest, distance);
    if (distance > tolerance && !difference)
      difference = {a.path, element_name(a.view, i, positions), fmt::format("{}", x), fmt::format("{}", y)};
  }
  if (!difference) return;
  difference->largest = largest;
  differences.push_back(*difference);
}

}  // namespace

std::vector<TraceDifference> compare(const Trace& first, const Trace& second, double tolerance) {
  std::vector<TraceDifference> differences;
  for (const std::vector<SchemaEntry>* entries : {&schema().attributes, &schema().datasets})
    for (const SchemaEntry& entry : *entries)
      if (entry.hashed && !entry.per_layer())
        compare_values(entry.object, header_value(first.header(), entry), header_value(second.header(), entry),
                       differences);

  for (int l = 0; l < std::min(first.header().layers, second.header().layers); ++l) {
    const auto numbers_of = [l](const Trace& trace, const SchemaEntry& entry) -> std::optional<Value> {
      const std::span<const std::int32_t> numbers =
          entry.name == "visible" ? trace.visible_units(l) : trace.query_positions(l);
      if (numbers.empty()) return std::nullopt;
      return std::vector<std::int32_t>(numbers.begin(), numbers.end());
    };
    const std::vector<StoredTensor> a = first.tensors(l), b = second.tensors(l);
    for (const SchemaEntry& entry : schema().datasets) {
      if (!entry.per_layer()) continue;
      const std::string object = object_in_layer(entry, l);
      if (entry.type == "int32") {
        compare_values(object, numbers_of(first, entry), numbers_of(second, entry), differences);
        continue;
      }
      const auto x = std::ranges::find(a, object, &StoredTensor::path),
                 y = std::ranges::find(b, object, &StoredTensor::path);
      const bool in_first = x != a.end(), in_second = y != b.end();
      if (in_first != in_second)
        differences.push_back({object, "", in_first ? "present" : "none", in_second ? "present" : "none"});
      if (in_first && in_second)
        compare_tensors(*x, *y, entry.name == "q" ? first.query_positions(l) : std::span<const std::int32_t>{},
                        tolerance, differences);
    }
    first.release(l);
    second.release(l);
  }
  return differences;
}

}  // namespace kvreplay
