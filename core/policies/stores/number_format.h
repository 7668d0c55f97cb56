// Number formats of quantised caches. Each is a store of its name, and a format of keys or values in store=kv.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "float_types.h"
#include "parameters.h"
#include "registry.h"

namespace kvreplay {

/// Replaces the numbers of a vector by decode(encode(x)). `largest`: the largest absolute number in the format's range.
using Coder = std::function<void(std::span<float> vector, float largest)>;

struct NumberFormat {
  /// The vectors of the prompt that share a scale: none, those of a KV head, or all of a layer's keys or values.
  enum class Range { vector, head, tensor };

  int block = 1;  // numbers; a vector has a whole number of blocks
  Range range = Range::vector;
  double range_bytes = 0;                     // of the scale of a head or tensor
  std::function<double(int dim)> bytes = {};  // of a vector
  std::function<Coder(int dim)> coder = {};   // empty: numbers remain exact, of 16 bits
};

/// A format with its parameters.
class ConfiguredFormat {
 public:
  virtual ~ConfiguredFormat() = default;
  virtual Parameters parameters() = 0;
  virtual NumberFormat format() const = 0;
};

struct FormatCard {
  std::string name;
  std::string summary;
  std::function<std::unique_ptr<ConfiguredFormat>()> make;
};

Registry<FormatCard>& number_formats();

/// "NAME" or "NAME(VALUE,...)"; `seed` is the default of every seed parameter. Throws Error{usage}.
std::unique_ptr<ConfiguredFormat> parse_format(std::string_view text, std::uint64_t seed = 0);
/// The same with its seeds and the values that differ from the defaults: equal text, equal format.
std::string normal_format(std::string_view text, std::uint64_t seed);

/// Adds the format, and the store of its name (format_store.cpp).
void register_format(FormatCard card);

/// `T` has `parameters(Parameters&)` and `format() const`.
template <class T>
struct RegisteredFormat {
  struct Holder final : ConfiguredFormat {
    Holder(std::string its_name, T its_value) : name(std::move(its_name)), value(std::move(its_value)) {}
    Parameters parameters() override {
      Parameters declared{name};
      const auto read = declared.of_part("store");
      value.parameters(declared);
      return declared;
    }
    NumberFormat format() const override { return value.format(); }

    std::string name;
    T value;
  };
  RegisteredFormat(const char* name, const char* summary, T value = {}) {
    register_format({name, summary, [name, value] { return std::make_unique<Holder>(name, value); }});
  }
};

inline float rounded_to_float16(float number) { return from_float16(to_float16(number)); }

/// The largest absolute number.
float largest_of(std::span<const float> numbers);

/// A coder that encodes each block of `size` numbers alone.
Coder block_coder(std::size_t size, std::function<void(std::span<float> block)> code);

}  // namespace kvreplay
