#include "policies/stores/number_format.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "policies/plan_part.h"

namespace kvreplay {

Registry<FormatCard>& number_formats() {
  static Registry<FormatCard> formats = [] {
    Registry<FormatCard> made{"number format"};
    struct Exact {
      void parameters(Parameters&) const {}
      NumberFormat format() const {
        return {.bytes = [](int dim) { return 2.0 * dim; }};
      }
    };
    made.add({"exact", "unchanged numbers",
              [] { return std::make_unique<RegisteredFormat<Exact>::Holder>("exact", Exact{}); }});
    return made;
  }();
  return formats;
}

std::unique_ptr<ConfiguredFormat> parse_format(std::string_view text, std::uint64_t seed) {
  const PartText parsed = PartText::parse(text);
  std::unique_ptr<ConfiguredFormat> format = number_formats().get(parsed.name).make();
  Parameters parameters = format->parameters();
  for (const Parameter& parameter : parameters.all())
    if (parameter.is_seed) parameter.set(std::to_string(seed));
  for (const auto& [name, value] : parsed.assignments(parameters)) parameters.set(name, value);
  return format;
}

std::string normal_format(std::string_view text, std::uint64_t seed) {
  const std::string name = PartText::parse(text).name;
  const std::unique_ptr<ConfiguredFormat> format = parse_format(text, seed), fresh = number_formats().get(name).make();
  const Parameters parameters = format->parameters(), defaults = fresh->parameters();
  std::string values;
  for (const Parameter& parameter : parameters.all())
    if (parameter.is_seed || parameter.text() != defaults.find(parameter.name)->text())
      values += (values.empty() ? "" : ",") + parameter.assignment();
  return values.empty() ? name : name + "(" + values + ")";
}

float largest_of(std::span<const float> numbers) {
  float largest = 0;
  for (const float number : numbers) largest = std::max(largest, std::abs(number));
  return largest;
}

Coder block_coder(std::size_t size, std::function<void(std::span<float>)> code) {
  return [size, code = std::move(code)](std::span<float> vector, float) {
    for (std::size_t first = 0; first < vector.size(); first += size) code(vector.subspan(first, size));
  };
}

}  // namespace kvreplay
