#include "trace/header.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <type_traits>
#include <utility>

#include "error.h"

namespace kvreplay {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(OtherState, kind, layers, bytes)

namespace {

static_assert(std::endian::native == std::endian::little, "traces are mapped as they are: little-endian machines only");

using Member = std::variant<std::string TraceHeader::*, int TraceHeader::*, bool TraceHeader::*, double TraceHeader::*,
                            DType TraceHeader::*, std::vector<std::int32_t> TraceHeader::*,
                            std::vector<double> TraceHeader::*, std::vector<Span> TraceHeader::*>;

/// Where the header keeps what the schema names. An enumeration of words is the number of its word in `one_of`.
const std::pair<std::string_view, Member> members[] = {
    {"/@producer", &TraceHeader::producer},
    {"/@created", &TraceHeader::created},
    {"/@synthetic", &TraceHeader::synthetic},
    {"/model@name", &TraceHeader::model},
    {"/model@architecture", &TraceHeader::architecture},
    {"/model@n_layers", &TraceHeader::layers},
    {"/model@n_query_heads", &TraceHeader::query_heads},
    {"/model@n_kv_heads", &TraceHeader::kv_heads},
    {"/model@head_dim", &TraceHeader::head_dim},
    {"/model@dtype", &TraceHeader::dtype},
    {"/model@softmax_scale", &TraceHeader::softmax_scale},
    {"/model@logit_softcap", &TraceHeader::logit_softcap},
    {"/model@source_hash", &TraceHeader::source_hash},
    {"/model@quantisation", &TraceHeader::quantisation},
    {"/model@other_state", &TraceHeader::other_state},
    {"/model@value_dim", &TraceHeader::value_dim},
    {"/model@visible_block", &TraceHeader::visible_block},
    {"/model@value_is_key", &TraceHeader::value_is_key},
    {"/model/rope@style", &TraceHeader::rope_interleaved},
    {"/model/rope@offset", &TraceHeader::rope_offset},
    {"/tokens@prefill", &TraceHeader::prefill},
    {"/model/sliding_window", &TraceHeader::sliding_window},
    {"/model/layer_index", &TraceHeader::layer_index},
    {"/model/heads", &TraceHeader::heads},
    {"/model/head_dims", &TraceHeader::head_dims},
    {"/model/kv_source", &TraceHeader::kv_source},
    {"/model/sinks", &TraceHeader::sinks},
    {"/model/chunk", &TraceHeader::chunk},
    {"/model/rope/inv_freq", &TraceHeader::inv_freq},
    {"/model/rope/pairs", &TraceHeader::layer_pairs},
    {"/model/rope/attention_scaling", &TraceHeader::attention_scaling},
    {"/tokens/ids", &TraceHeader::ids},
    {"/tokens/offsets", &TraceHeader::offsets},
    {"/tokens/text", &TraceHeader::text},
    {"/spans", &TraceHeader::spans},
    {"/reference/ids", &TraceHeader::reference_ids},
    {"/reference/log_probabilities", &TraceHeader::reference_log_probabilities},
    {"/reference/tail", &TraceHeader::reference_tail},
    {"/reconstruction@boundary", &TraceHeader::reconstruction_boundary},
    {"/reconstruction/ids", &TraceHeader::reconstruction_ids},
    {"/reconstruction/passes", &TraceHeader::reconstruction_passes},
};

const Member* member_of(const SchemaEntry& entry) {
  const auto found = std::ranges::find(members, entry.object, &std::pair<std::string_view, Member>::first);
  return found == std::end(members) ? nullptr : &found->second;
}

/// What the writer alone decides.
Value constant_of(const SchemaEntry& entry, const TraceHeader& header) {
  if (entry.name == "format") return schema().format;
  if (entry.name == "version") return version_of(header);
  if (entry.name == "complete") return std::int64_t{1};
  throw Error{Refusal::internal, entry.object, "the schema names it, the header has no place for it"};
}

/// What an optional object is when it is absent.
bool is_empty(const Value& value) {
  return std::visit(
      [](const auto& v) {
        if constexpr (requires { v.empty(); })
          return v.empty();
        else
          return v == 0;
      },
      value);
}

std::string range_of(const SchemaEntry& entry) {
  if (entry.above) return fmt::format("above {}", *entry.above);
  if (entry.min && entry.max)
    return *entry.min == *entry.max ? fmt::format("{}", *entry.min) : fmt::format("{} to {}", *entry.min, *entry.max);
  return entry.min ? fmt::format("at least {}", *entry.min) : fmt::format("at most {}", entry.max.value_or(0));
}

template <class Number>
bool in_range(const SchemaEntry& entry, Number number) {
  const double value = static_cast<double>(number);
  return !(entry.above && value <= *entry.above) && !(entry.min && value < *entry.min) &&
         !(entry.max && value > *entry.max);
}

constexpr std::size_t all_valid = std::numeric_limits<std::size_t>::max();

/// The first byte that is not UTF-8, or `all_valid`; counts characters (code points) on the way.
std::size_t first_invalid_byte(std::string_view text, std::int64_t& characters) {
  characters = 0;
  for (std::size_t i = 0; i < text.size(); ++characters) {
    const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0U; };
    const unsigned lead = byte(i);
    const std::size_t length = lead < 0x80                   ? 1
                               : lead >= 0xC2 && lead < 0xE0 ? 2
                               : (lead & 0xF0U) == 0xE0      ? 3
                               : lead >= 0xF0 && lead < 0xF5 ? 4
                                                             : 0;
    if (length == 0) return i;
    for (std::size_t k = 1; k < length; ++k)
      if ((byte(i + k) & 0xC0U) != 0x80) return i;
    const unsigned second = byte(i + 1);
    const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
    const bool surrogate = lead == 0xED && second > 0x9F;
    if (overlong || surrogate || (lead == 0xF4 && second > 0x8F)) return i;
    i += length;
  }
  return all_valid;
}

template <class Number>
void append(std::string& bytes, Number number) {
  char raw[sizeof number];
  std::memcpy(raw, &number, sizeof number);
  bytes.append(raw, sizeof number);
}

std::string bytes_of(const Value& value) {
  std::string bytes;
  std::visit(
      [&](const auto& v) {
        using V = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<V, std::string>) {
          bytes = v;
        } else if constexpr (std::is_same_v<V, std::vector<Span>>) {
          for (const Span& span : v) {
            bytes += span.name + '\0' + span.kind + '\0';
            append(bytes, static_cast<std::int32_t>(span.begin));
            append(bytes, static_cast<std::int32_t>(span.end));
          }
        } else if constexpr (std::is_arithmetic_v<V>) {
          append(bytes, v);
        } else {
          for (const auto element : v) append(bytes, element);
        }
      },
      value);
  return bytes;
}

}  // namespace

bool has_group(const TraceHeader& header, std::string_view group) {
  if (group == "/model/rope") return header.has_rope;
  if (group == "/reference") return !header.reference_ids.empty();
  if (group == "/reconstruction") return !header.reconstruction_ids.empty();
  return true;
}

std::int64_t version_of(const TraceHeader& header) {
  std::int64_t version = 1;
  for (const std::vector<SchemaEntry>* entries : {&schema().attributes, &schema().datasets})
    for (const SchemaEntry& entry : *entries)
      if (!entry.per_layer() && entry.since > version && header_value(header, entry)) version = entry.since;
  return version;
}

std::vector<OtherState> other_states(const TraceHeader& header) {
  if (header.other_state.empty()) return {};
  return nlohmann::json::parse(header.other_state).get<std::vector<OtherState>>();
}

std::optional<Value> header_value(const TraceHeader& header, const SchemaEntry& entry) {
  if (!has_group(header, entry.group)) return std::nullopt;
  const Member* member = member_of(entry);
  if (member == nullptr) return constant_of(entry, header);
  const Value value = std::visit(
      [&](auto pointer) -> Value {
        const auto& v = header.*pointer;
        using V = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<V, bool> || std::is_same_v<V, DType>) {
          if (entry.type == "string") return entry.one_of.at(static_cast<std::size_t>(v));
          return static_cast<std::int64_t>(v);
        } else if constexpr (std::is_same_v<V, int>) {
          return std::int64_t{v};
        } else {
          return v;
        }
      },
      *member);
  if (!entry.required && is_empty(value)) return std::nullopt;
  return value;
}

std::string left_out_by(const SchemaEntry& entry, const TraceHeader& header, int layer) {
  if (!entry.unless.empty() && header_value(header, schema().entry(entry.unless))) return entry.unless;
  return entry.of_source && !header.has_keys(layer) ? "/model/kv_source" : "";
}

std::vector<std::uint64_t> dataset_shape(const TraceHeader& header, const SchemaEntry& entry, const Value& value) {
  if (entry.shape.empty()) return {};
  const std::uint64_t elements = std::visit(
      [](const auto& v) -> std::uint64_t {
        if constexpr (requires { v.size(); }) return v.size();
        return 1;
      },
      value);
  const std::string& first = entry.shape[0];
  const int rows = first == "T"     ? header.tokens()
                   : first == "T-P" ? header.continuation()
                   : first == "p"   ? static_cast<int>(header.passes().size())
                                    : header.layers;
  if (entry.shape.size() == 1 || rows <= 0 || elements % static_cast<std::uint64_t>(rows) != 0) return {elements};
  return {static_cast<std::uint64_t>(rows), elements / static_cast<std::uint64_t>(rows)};
}

void set_header_value(TraceHeader& header, const SchemaEntry& entry, Value value) {
  const Member* member = member_of(entry);
  if (member == nullptr) return;
  std::visit(
      [&](auto pointer) {
        auto& v = header.*pointer;
        using V = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<V, bool> || std::is_same_v<V, DType>) {
          if (entry.type == "string")
            v = static_cast<V>(std::ranges::find(entry.one_of, std::get<std::string>(value)) - entry.one_of.begin());
          else
            v = static_cast<V>(std::get<std::int64_t>(value));
        } else if constexpr (std::is_same_v<V, int>) {
          v = static_cast<int>(std::get<std::int64_t>(value));
        } else {
          v = std::get<V>(std::move(value));
        }
      },
      *member);
}

void drop_header_value(TraceHeader& header, const SchemaEntry& entry) {
  if (const Member* member = member_of(entry)) std::visit([&](auto pointer) { header.*pointer = {}; }, *member);
}

std::string object_in_layer(const SchemaEntry& entry, int layer) {
  return fmt::format("/layers/{:03}/{}", layer, entry.name);
}

std::optional<std::int64_t> Rules::known(const std::string& dimension) const {
  if (!dimension.empty() && dimension.find_first_not_of("0123456789") == std::string::npos)
    return std::stoll(dimension);
  if (const std::size_t star = dimension.find('*'); star != std::string::npos) {
    const auto left = known(dimension.substr(0, star)), right = known(dimension.substr(star + 1));
    return left && right ? std::optional(*left * *right) : std::nullopt;
  }
  if (const std::size_t minus = dimension.find('-'); minus != std::string::npos) {
    const auto whole = known(dimension.substr(0, minus)), part = known(dimension.substr(minus + 1));
    return whole && part ? std::optional(*whole - *part) : std::nullopt;
  }
  const auto found = sizes_.find(dimension);
  if (found == sizes_.end() && dimension == "dv") return known("d");
  if (found == sizes_.end() && dimension == "Hq") return known("H");
  return found == sizes_.end() ? std::nullopt : std::optional(found->second);
}

void Rules::bind_layer(const TraceHeader& header, int layer) {
  const auto bind_pair = [&](const std::vector<std::int32_t>& sizes, const char* first, const char* second) {
    const std::size_t at = 2 * static_cast<std::size_t>(layer);
    if (at + 1 >= sizes.size()) return;
    bind(first, sizes[at]);
    bind(second, sizes[at + 1]);
  };
  bind_pair(header.heads, "Hq", "Hkv");
  bind_pair(header.head_dims, "d", "dv");
}

std::string Rules::expected_shape(const SchemaEntry& entry) const {
  if (entry.shape.empty()) return "scalar";
  std::vector<std::string> words;
  for (const std::string& dimension : entry.shape) {
    const auto size = known(dimension);
    words.push_back(size ? std::to_string(*size) : dimension);
  }
  return fmt::format("[{}]", fmt::join(words, ", "));
}

void Rules::check_shape(const std::string& object, const SchemaEntry& entry, const std::vector<std::uint64_t>& found) {
  bool fits = found.size() == entry.shape.size();
  for (std::size_t i = 0; fits && i < found.size(); ++i) {
    const auto size = known(entry.shape[i]);
    fits = size ? found[i] == static_cast<std::uint64_t>(*size)
                : found[i] <= std::numeric_limits<std::int32_t>::max() && (found[i] > 0 || entry.shape[i] == "n");
  }
  if (!fits)
    throw Error{Refusal::input, where(object), "shape", expected_shape(entry),
                found.empty() ? "scalar" : fmt::format("[{}]", fmt::join(found, ", "))};
  for (std::size_t i = 0; i < found.size(); ++i)
    if (!known(entry.shape[i])) bind(entry.shape[i], static_cast<std::int64_t>(found[i]));
  if (entry.type == "span") sizes_.erase("n");
}

void Rules::check_value(const std::string& object, const SchemaEntry& entry, const Value& value) {
  const auto refuse = [&](const std::string& what, const std::string& expected, const std::string& found) {
    throw Error{Refusal::input, where(object), what, expected, found};
  };
  if (const auto* text = std::get_if<std::string>(&value)) {
    std::int64_t characters = 0;
    if (const std::size_t byte = first_invalid_byte(*text, characters); byte != all_valid)
      refuse("value", "UTF-8", fmt::format("byte {:#04x} at {}", static_cast<unsigned char>((*text)[byte]), byte));
    if (!entry.equals.empty() && *text != entry.equals) refuse("value", entry.equals, fmt::format("\"{}\"", *text));
    if (!entry.one_of.empty() && std::ranges::find(entry.one_of, *text) == entry.one_of.end())
      refuse("value", fmt::format("{}", fmt::join(entry.one_of, " or ")), fmt::format("\"{}\"", *text));
  } else if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    if (!in_range(entry, *integer) || *integer > std::numeric_limits<std::int32_t>::max())
      refuse("value", range_of(entry), fmt::format("{}", *integer));
    if (!entry.dimension.empty()) bind(entry.dimension, *integer);
  } else if (const auto* number = std::get_if<double>(&value)) {
    if (!std::isfinite(*number)) refuse("value", "a finite number", fmt::format("{}", *number));
    if (!in_range(entry, *number)) refuse("value", range_of(entry), fmt::format("{}", *number));
  } else if (const auto* integers = std::get_if<std::vector<std::int32_t>>(&value)) {
    const auto below = known(entry.below);
    for (std::size_t i = 0; i < integers->size(); ++i) {
      const std::int32_t element = (*integers)[i];
      const auto found = [&] { return fmt::format("{} at element {}", element, i); };
      if (!in_range(entry, element)) refuse("value", range_of(entry), found());
      if (below && element >= *below) refuse("value", fmt::format("below {} ({})", *below, entry.below), found());
      if (entry.ascending && i > 0 && element <= (*integers)[i - 1])
        refuse("order", "strictly ascending", fmt::format("{} after {} at element {}", element, (*integers)[i - 1], i));
    }
  } else if (const auto* numbers = std::get_if<std::vector<double>>(&value)) {
    for (std::size_t i = 0; i < numbers->size(); ++i) {
      const auto found = [&] { return fmt::format("{} at element {}", (*numbers)[i], i); };
      if (entry.minus_infinity && (*numbers)[i] == -HUGE_VAL) continue;
      if (!std::isfinite((*numbers)[i])) refuse("value", "finite numbers", found());
      if (!in_range(entry, (*numbers)[i])) refuse("value", range_of(entry), found());
    }
  }
}

void Rules::check_units(const std::string& object, const TraceHeader& header, const std::vector<std::int32_t>& units,
                        const std::vector<std::int32_t>& positions) const {
  const auto refuse = [&](const std::string& what, const std::string& expected, const std::string& found) {
    throw Error{Refusal::input, where(object), what, expected, found};
  };
  if (!header.kv_source.empty()) refuse("beside /model/kv_source", "one of the two", "both");
  const int block = header.visible_block;
  if (block == 0) refuse("units of unknown size", "/model@visible_block", "none");
  const auto queries = static_cast<std::size_t>(size("Tq")), most = static_cast<std::size_t>(size("u"));
  for (std::size_t i = 0; i < units.size(); ++i) {
    const std::int32_t unit = units[i], before = i % most == 0 ? -1 : units[i - 1];
    const std::size_t query = i / most % queries;
    const int position = positions.empty() ? static_cast<int>(query) : positions[query];
    const bool follows = unit < 0 ? i % most > 0 : (i % most == 0 || before >= 0) && unit > before;
    if (!follows || unit > position / block)
      refuse("units of a query", fmt::format("at least one, ascending, at most {}, then -1", position / block),
             fmt::format("{} after {} for query {}", unit, before, position));
  }
}

void Rules::note_shapes_of_layers(const TraceHeader& header, const Note& note) const {
  const auto note_largest = [&](const char* object, const std::vector<std::int32_t>& of_layers, std::size_t column,
                                std::size_t columns, int stated, const char* attribute) {
    std::int32_t largest = 0;
    for (std::size_t i = column; i < of_layers.size(); i += columns) largest = std::max(largest, of_layers[i]);
    if (!of_layers.empty() && largest != stated)
      note(attribute, "value", fmt::format("{}, the largest in {}", largest, object), fmt::format("{}", stated));
  };
  note_largest("/model/heads", header.heads, 0, 2, header.query_heads, "/model@n_query_heads");
  note_largest("/model/heads", header.heads, 1, 2, header.kv_heads, "/model@n_kv_heads");
  note_largest("/model/head_dims", header.head_dims, 0, 2, header.head_dim, "/model@head_dim");
  if (header.stores_values())
    note_largest("/model/head_dims", header.head_dims, 1, 2, header.value_components(), "/model@value_dim");
  note_largest("/model/rope/pairs", header.layer_pairs, 0, 1, header.rope_pairs, "/model/rope/inv_freq");
  if (!header.stores_values() && !header.head_dims.empty())
    note("/model/head_dims", "beside /model@value_is_key", "one of the two", "a dataset");
  for (std::size_t i = 0; i + 1 < header.heads.size(); i += 2) {
    if (header.heads[i] % header.heads[i + 1] == 0) continue;
    note("/model/heads", "value", fmt::format("a divisor of {} (Hq)", header.heads[i]),
         fmt::format("{} at element {}", header.heads[i + 1], i + 1));
    break;
  }
  for (std::size_t l = 0;
       l < std::max<std::size_t>(1, std::max(header.head_dims.size() / 2, header.layer_pairs.size())); ++l) {
    const auto dim = header.head_dims.empty() ? known("d") : std::optional<std::int64_t>(header.head_dims[2 * l]);
    const int pairs = header.layer_pairs.empty() ? header.rope_pairs : header.layer_pairs[l];
    if (!dim || header.rope_offset + 2 * pairs <= *dim) continue;
    note(header.layer_pairs.empty() ? "/model/rope/inv_freq" : "/model/rope/pairs", "shape",
         fmt::format("at most {} pairs (offset + 2r <= d)", std::max<std::int64_t>(0, *dim - header.rope_offset) / 2),
         fmt::format("{}", pairs));
    break;
  }
}

namespace {

bool has_other_rope(const TraceHeader& header, int layer, int other) {
  const auto at = static_cast<std::size_t>(layer), at_other = static_cast<std::size_t>(other);
  const auto pairs = static_cast<std::size_t>(header.rope_pairs);
  if (header.attention_scaling.size() <= at || header.inv_freq.size() < (at + 1) * pairs) return false;
  const auto row = [&](std::size_t l) { return std::span(header.inv_freq).subspan(l * pairs, pairs); };
  return header.attention_scaling[at] != header.attention_scaling[at_other] ||
         !std::ranges::equal(row(at), row(at_other));
}

}  // namespace

void Rules::note_sources(const TraceHeader& header, const Note& note) const {
  const auto layers = static_cast<int>(header.kv_source.size());
  for (int l = 0; l < layers; ++l) {
    const int source = header.source(l);
    if (source > l || !header.has_keys(source)) {
      note("/model/kv_source", "value", fmt::format("{} or an earlier layer with keys and values", l),
           fmt::format("{} at element {}", source, l));
      return;
    }
    const auto differs = [&](const std::vector<std::int32_t>& of_layers, int columns, int column) {
      const auto at = [&](int layer) { return static_cast<std::size_t>(columns * layer + column); };
      return at(layers - 1) < of_layers.size() && of_layers[at(l)] != of_layers[at(source)];
    };
    const char* differing = differs(header.heads, 2, 1)            ? "/model/heads"
                            : differs(header.head_dims, 2, 0)      ? "/model/head_dims"
                            : differs(header.head_dims, 2, 1)      ? "/model/head_dims"
                            : differs(header.sliding_window, 1, 0) ? "/model/sliding_window"
                            : differs(header.chunk, 1, 0)          ? "/model/chunk"
                            : differs(header.layer_pairs, 1, 0)    ? "/model/rope/pairs"
                            : has_other_rope(header, l, source)    ? "/model/rope"
                                                                   : nullptr;
    if (differing != nullptr)
      note(differing, "value",
           fmt::format("in layer {} the KV heads, dimensions, window, chunks and RoPE of layer {}, "
                       "whose keys it reads",
                       l, source),
           "others");
  }
}

void Rules::note_passes(const TraceHeader& header, const Note& note) const {
  const auto tokens = static_cast<int>(header.reconstruction_ids.size());
  const std::vector<ReconstructionPass> passes = header.passes();
  for (std::size_t i = 0; i < passes.size(); ++i) {
    const ReconstructionPass& pass = passes[i];
    const int repeated = pass.last - pass.first;
    const bool fits = pass.begin < pass.end && pass.end <= tokens && (i + 1 < passes.size() || pass.end == tokens) &&
                      0 < repeated && repeated <= pass.tokens() && pass.last <= header.reconstruction_boundary &&
                      pass.last <= header.tokens();
    if (!fits) {
      note("/reconstruction/passes", "value",
           fmt::format("ascending ends, the last {} (R), and repeated tokens below {} that fit into the pass", tokens,
                       header.reconstruction_boundary),
           fmt::format("end {} after {}, tokens [{}, {}) in pass {}", pass.end, pass.begin, pass.first, pass.last, i));
      return;
    }
    const auto from = header.reconstruction_ids.begin() + pass.end - repeated;
    if (std::equal(from, from + repeated, header.ids.begin() + pass.first)) continue;
    note("/reconstruction/ids", "value",
         fmt::format("the prompt tokens [{}, {}) at the end of pass {}", pass.first, pass.last, i), "others");
    return;
  }
}

std::vector<Error> Rules::broken_relations(const TraceHeader& header) const {
  std::vector<Error> broken;
  const Note note = [&](const std::string& object, const std::string& what, const std::string& expected,
                        const std::string& found) {
    broken.emplace_back(Refusal::input, where(object), what, expected, found);
  };
  for (const SchemaEntry& entry : schema().attributes) {
    const auto value = header_value(header, entry);
    const std::int64_t* number = value ? std::get_if<std::int64_t>(&*value) : nullptr;
    if (number == nullptr || *number == 0) continue;
    if (const auto most = known(entry.at_most); most && *number > *most)
      note(entry.object, "value", fmt::format("at most {} ({})", *most, entry.at_most), fmt::format("{}", *number));
    if (const auto whole = known(entry.divides); whole && *whole % *number != 0 && header.heads.empty())
      note(entry.object, "value", fmt::format("a divisor of {} ({})", *whole, entry.divides),
           fmt::format("{}", *number));
  }
  for (const SchemaEntry& entry : schema().datasets)
    if (!entry.per_layer() && !entry.with.empty() && header_value(header, entry) &&
        !header_value(header, schema().entry(entry.with)))
      note(entry.object, "alone", entry.with + " beside it", "none");

  if (header.value_dim > 0 && header.value_is_key > 0)
    note("/model@value_dim", "beside /model@value_is_key", "one of the two", fmt::format("{}", header.value_dim));
  note_shapes_of_layers(header, note);
  note_sources(header, note);
  note_passes(header, note);
  try {
    other_states(header);
  } catch (const nlohmann::json::exception&) {
    note("/model@other_state", "value", "a JSON list of objects with kind, layers and bytes",
         fmt::format("\"{}\"", header.other_state));
  }

  std::int64_t characters = 0;
  first_invalid_byte(header.text, characters);
  for (std::size_t t = 0; !header.text.empty() && 2 * t < header.offsets.size(); ++t) {
    const std::int32_t begin = header.offsets[2 * t], end = header.offsets[2 * t + 1];
    if (begin <= end && end <= characters) continue;
    note("/tokens/offsets", "range", fmt::format("begin <= end <= {} characters", characters),
         fmt::format("[{}, {}) at token {}", begin, end, t));
    break;
  }
  const auto tokens = known("T");
  const std::size_t before_spans = broken.size();
  for (std::size_t s = 0; s < header.spans.size() && broken.size() == before_spans; ++s) {
    const Span& span = header.spans[s];
    for (const auto& [word, text] : {std::pair{"name", &span.name}, std::pair{"kind", &span.kind}}) {
      if (text->empty() || first_invalid_byte(*text, characters) != all_valid)
        note("/spans", word, "UTF-8, at least one character",
             fmt::format("{} in span {}", text->empty() ? "none" : "other bytes", s));
    }
    if (span.begin < 0 || span.begin >= span.end || (tokens && span.end > *tokens))
      note("/spans", "range", fmt::format("0 <= begin < end <= {} (T)", tokens.value_or(INT32_MAX)),
           fmt::format("[{}, {}) in span {} \"{}\"", span.begin, span.end, s, span.name));
  }
  return broken;
}

void Rules::check_header(const TraceHeader& header) {
  for (const SchemaEntry& entry : schema().attributes)
    if (const auto value = header_value(header, entry)) check_value(entry.object, entry, *value);
  for (const SchemaEntry& entry : schema().datasets) {
    if (entry.per_layer()) continue;
    const auto value = header_value(header, entry);
    if (!value) continue;
    check_shape(entry.object, entry, dataset_shape(header, entry, *value));
    check_value(entry.object, entry, *value);
  }
  if (header.has_rope && size("r") != header.rope_pairs)
    throw Error{Refusal::input, where("/model/rope/inv_freq"), "shape", fmt::format("{} pairs", header.rope_pairs),
                fmt::format("{}", size("r"))};
  if (const std::vector<Error> broken = broken_relations(header); !broken.empty()) throw broken.front();
}

void hash_value(Hash& hash, const std::string& object, const Value& value) {
  const std::string bytes = bytes_of(value);
  std::string length;
  append(length, static_cast<std::uint64_t>(bytes.size()));
  hash.update(object + '\0');
  hash.update(length);
  hash.update(bytes);
}

void hash_header(Hash& hash, const TraceHeader& header) {
  for (const std::vector<SchemaEntry>* entries : {&schema().attributes, &schema().datasets})
    for (const SchemaEntry& entry : *entries)
      if (entry.hashed && !entry.per_layer())
        if (const auto value = header_value(header, entry)) hash_value(hash, entry.object, *value);
}

}  // namespace kvreplay
