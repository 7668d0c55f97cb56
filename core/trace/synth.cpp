#include "trace/synth.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "error.h"
#include "float_types.h"
#include "nearest.h"
#include "random.h"

namespace kvreplay {
namespace {

// Purposes of a number, first in its chain after the seed; the fixture's tags are the first three.
enum Tag : std::uint64_t {
  queries = 1,
  keys = 2,
  values = 3,
  token_numbers = 4,
  directions = 5,
  copies = 6,
  sinks = 7,
  selected = 8
};

constexpr int vocabulary = 1000;
constexpr int most_tokens = std::numeric_limits<int>::max() / 5;  // a token's text is at most "w999 "
constexpr int most_layers = 65536;                                // of the format
constexpr int sink_tokens = 4;
constexpr int repeated_block = 64;
constexpr int instruction_tokens = 4;  // of a reconstruction pass
constexpr std::size_t block_bytes = std::size_t{8} << 20;

/// Which row is wanted: tag, layer, head, position.
struct Row {
  Tag tag;
  int layer;
  int head;
  int token;
};

using RowMaker = std::function<void(Row, std::span<float>)>;

double normal(std::uint64_t chain_so_far, std::uint64_t component) {
  const std::uint64_t at = mix(chain_so_far ^ component);
  return gaussian(mix(at), mix(at ^ 1U));
}

void fill_gaussian(std::uint64_t start, std::span<float> row) {
  for (std::size_t c = 0; c < row.size(); ++c) row[c] = static_cast<float>(normal(start, c));
}

std::uint64_t coordinates(const SynthOptions& options, Row row) {
  return chain(options.seed, static_cast<std::uint64_t>(row.tag), row.layer, row.head, row.token);
}

/// A direction for each layer and KV head that its queries and keys share: along it they are moved so far that the
/// logit of a moved query and a moved key rises by `gain`.
class SharedDirections {
 public:
  SharedDirections(const SynthOptions& options, double gain) {
    const double length = std::sqrt(gain * std::sqrt(static_cast<double>(options.head_dim.of(0))));
    for (int l = 0; l < options.layers; ++l) {
      const LayerShape shape = options.shape(l);
      Layer& layer = layers_.emplace_back(Layer{shape.query_heads / shape.kv_heads, {}});
      if (const int source = options.source(l); source != l) {
        layer.directions = layers_[static_cast<std::size_t>(source)].directions;
        continue;
      }
      for (int h = 0; h < shape.kv_heads; ++h) {
        std::vector<float>& direction = layer.directions.emplace_back(static_cast<std::size_t>(shape.key_dim));
        fill_gaussian(chain(options.seed, static_cast<std::uint64_t>(directions), l, h), direction);
        double square = 0.0;
        for (const float component : direction) square += double{component} * component;
        for (float& component : direction) component *= static_cast<float>(length / std::sqrt(square));
      }
    }
  }

  void add(Row row, std::span<float> to) const {
    const Layer& layer = layers_[static_cast<std::size_t>(row.layer)];
    const int kv_head = row.tag == queries ? row.head / layer.group : row.head;
    const std::vector<float>& direction = layer.directions[static_cast<std::size_t>(kv_head)];
    for (std::size_t c = 0; c < to.size(); ++c) to[c] += direction[c];
  }

 private:
  struct Layer {
    int group = 1;
    std::vector<std::vector<float>> directions;  // [Hkv][d]
  };
  std::vector<Layer> layers_;
};

int tokens_of(const SynthOptions& options) { return options.prefill + options.continuation; }

struct Range {
  int begin = 0;
  int end = 0;
  bool contains(int t) const { return begin <= t && t < end; }
};

/// The last prompt tokens ask; a region in the middle answers.
Range question_of(const SynthOptions& options) {
  return {options.prefill - std::clamp(options.prefill / 6, 1, 16), options.prefill};
}
Range needle_of(const SynthOptions& options) {
  const int before_question = question_of(options).begin;
  const int length = std::clamp(before_question / 6, 1, 16);
  return {(before_question - length) / 2, (before_question - length) / 2 + length};
}

RowMaker gaussian_rows(const SynthOptions& options) {
  return [options](Row row, std::span<float> to) { fill_gaussian(coordinates(options, row), to); };
}

RowMaker sink_rows(const SynthOptions& options) {
  return
      [options, shared = SharedDirections(options, std::log(tokens_of(options)) + 4.0)](Row row, std::span<float> to) {
        fill_gaussian(coordinates(options, row), to);
        const bool sink = row.token < sink_tokens;
        if (row.tag == queries || (row.tag == keys && sink)) shared.add(row, to);
        if (row.tag == values && sink)
          for (float& component : to) component *= 0.1F;
      };
}

RowMaker needle_rows(const SynthOptions& options) {
  const Range needle = needle_of(options), question = question_of(options);
  const SharedDirections shared(options, std::log(tokens_of(options)) + 4.0);
  return [=](Row row, std::span<float> to) {
    fill_gaussian(coordinates(options, row), to);
    if ((row.tag == queries && row.token >= question.begin) || (row.tag == keys && needle.contains(row.token)))
      shared.add(row, to);
  };
}

/// Turns the pairs of one row by `position`, as RoPE does.
void turn(const std::vector<double>& inv_freq, bool interleaved, int position, std::span<float> row) {
  const std::size_t pairs = inv_freq.size();
  for (std::size_t i = 0; i < pairs; ++i) {
    const double cosine = std::cos(position * inv_freq[i]), sine = std::sin(position * inv_freq[i]);
    float& x = row[interleaved ? 2 * i : i];
    float& y = row[interleaved ? 2 * i + 1 : i + pairs];
    const double real = x, imaginary = y;
    x = static_cast<float>(real * cosine - imaginary * sine);
    y = static_cast<float>(real * sine + imaginary * cosine);
  }
}

std::vector<double> frequencies(const SynthOptions& options, int layer) {
  std::vector<double> inv_freq;
  const int dim = options.shape(layer).key_dim;
  if (options.rope_base > 0.0)
    for (int i = 0; i < dim / 2; ++i) inv_freq.push_back(std::pow(options.rope_base, -2.0 * i / dim));
  return inv_freq;
}

/// Token t copies token t mod block, nearly, before RoPE. RoPE changes nothing about the other kinds' Gaussians, and
/// what they plant is planted after it.
RowMaker repeat_rows(const SynthOptions& options) {
  const int block = std::clamp(options.prefill / 4, 1, repeated_block);
  std::vector<std::vector<double>> inv_freq;  // [L]
  for (int l = 0; l < options.layers; ++l) inv_freq.push_back(frequencies(options, l));
  return [=](Row row, std::span<float> to) {
    const int token = row.token;
    if (row.tag != queries) row.token %= block;
    fill_gaussian(coordinates(options, row), to);
    row.token = token;
    if (row.tag != queries && token >= block) {
      const std::uint64_t start = chain(coordinates(options, row), static_cast<std::uint64_t>(copies));
      for (std::size_t c = 0; c < to.size(); ++c) to[c] += static_cast<float>(0.1 * normal(start, c));
    }
    if (row.tag != values) turn(inv_freq[static_cast<std::size_t>(row.layer)], options.rope_interleaved, token, to);
  };
}

RowMaker integer_rows(const SynthOptions& options) {
  return [options](Row row, std::span<float> to) {
    const std::uint64_t start = coordinates(options, row);
    for (std::size_t c = 0; c < to.size(); ++c) to[c] = static_cast<float>(mix(start ^ c) % 9) - 4.0F;
  };
}

RowMaker fixture_rows(const SynthOptions&) {
  return [](Row row, std::span<float> to) {
    const std::uint64_t start = chain(static_cast<std::uint64_t>(row.tag), row.layer, row.head, row.token);
    for (std::size_t c = 0; c < to.size(); ++c) to[c] = (static_cast<float>(mix(start ^ c) % 33) - 16.0F) / 8.0F;
  };
}

struct Kind : SynthKind {
  RowMaker (*rows)(const SynthOptions&);
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {{"gaussian", "independent standard normal queries, keys and values", {.kind = "gaussian"}}, gaussian_rows},
      {{"sinks", "every query attends to the first 4 tokens, whose values are small", {.kind = "sinks"}}, sink_rows},
      {{"needle", "question and continuation attend to the middle of the prompt", {.kind = "needle"}}, needle_rows},
      {{"repeat", "keys and values nearly repeat in blocks of tokens", {.kind = "repeat"}}, repeat_rows},
      {{"integer", "integers from -4 to 4: exact in every type, many ties", {.kind = "integer"}}, integer_rows},
      {{"fixture",
        "multiples of 1/8, equal in every language; no seed (test fixture)",
        {.kind = "fixture",
         .layers = 4,
         .query_heads = 4,
         .kv_heads = 2,
         .head_dim = 4,
         .prefill = 12,
         .continuation = 4,
         .rope_base = 100.0}},
       fixture_rows},
  };
  return all;
}

const Kind& kind_of(const std::string& name) {
  std::vector<std::string> names;
  for (const Kind& kind : kinds()) {
    if (kind.name == name) return kind;
    names.push_back(kind.name);
  }
  throw Error{Refusal::usage, name, "unknown kind of synthetic trace", nearest(name, names), name};
}

void require(bool holds, const char* option, const std::string& expected, const std::string& found) {
  if (!holds) throw Error{Refusal::usage, option, "value", expected, found};
}

void check_sources(const SynthOptions& options) {
  require(options.kv_source.empty() || std::ssize(options.kv_source) == options.layers, "kv_source",
          fmt::format("{} numbers, one for each layer", options.layers), std::to_string(options.kv_source.size()));
  for (int l = 0; l < std::ssize(options.kv_source); ++l) {
    const int source = options.source(l);
    require(source >= 0 && source <= l && options.source(source) == source, "kv_source",
            fmt::format("{} or an earlier layer with keys and values", l), fmt::format("{} for layer {}", source, l));
  }
}

void check_shapes(const SynthOptions& options) {
  for (const auto& [name, sizes, least] :
       {std::tuple{"query_heads", &options.query_heads, 1}, std::tuple{"kv_heads", &options.kv_heads, 1},
        std::tuple{"head_dim", &options.head_dim, 1}, std::tuple{"value_dim", &options.value_dim, 0},
        std::tuple{"sliding_window", &options.sliding_window, 0}, std::tuple{"chunk", &options.chunk, 0}}) {
    require(!sizes->empty(), name, "at least one number", "none");
    for (const int size : *sizes) require(size >= least, name, fmt::format("at least {}", least), std::to_string(size));
  }
  for (int l = 0; l < options.layers; ++l) {
    const auto [query_heads, kv_heads, key_dim, value_dim] = options.shape(l);
    require(query_heads % kv_heads == 0, "kv_heads", fmt::format("a divisor of {}", query_heads),
            std::to_string(kv_heads));
    require(!options.value_is_key || value_dim <= key_dim, "value_dim",
            fmt::format("1 to {}, since values are components of keys", key_dim), std::to_string(value_dim));
  }
}

/// The rest the writer refuses; here is what would not come to it.
void check(const SynthOptions& options) {
  kind_of(options.kind);
  for (const auto& [name, value] : {std::pair{"layers", options.layers}, std::pair{"prefill", options.prefill}})
    require(value >= 1, name, "at least 1", std::to_string(value));
  require(options.layers <= most_layers, "layers", fmt::format("at most {}", most_layers),
          std::to_string(options.layers));
  check_sources(options);
  check_shapes(options);
  require(options.continuation >= 0 && options.continuation < most_tokens, "continuation",
          fmt::format("0 to {}", most_tokens - 1), std::to_string(options.continuation));
  require(options.prefill <= most_tokens - options.continuation, "prefill",
          fmt::format("at most {}", most_tokens - options.continuation), std::to_string(options.prefill));
  require(options.last_queries >= 0 && options.last_queries <= tokens_of(options), "last_queries",
          fmt::format("0 to {}", tokens_of(options)), std::to_string(options.last_queries));
  require(options.repeated >= 0, "reconstruct", "at least 0", std::to_string(options.repeated));
  require(options.visible >= 0 && options.visible_block >= 1, "visible", "0 or more units of at least 1 token",
          fmt::format("{} of {}", options.visible, options.visible_block));
  require(options.rope_base >= 0.0, "rope_base", "at least 0", fmt::format("{}", options.rope_base));
  require(options.kind != "fixture" || options.seed == 0, "seed", "0: the fixture has none",
          fmt::format("{}", options.seed));
  require(options.kind != "needle" || question_of(options).begin >= 1, "prefill", "at least 2 for a needle",
          std::to_string(options.prefill));
}

int components_of(Tag tag, const LayerShape& shape) { return tag == values ? shape.value_dim : shape.key_dim; }

/// [p] passes that repeat the prompt, all of it together.
std::vector<ReconstructionPass> passes_of(const SynthOptions& options) {
  std::vector<ReconstructionPass> passes;
  for (int first = 0; options.repeated > 0 && first < options.prefill; first += options.repeated) {
    const int begin = passes.empty() ? 0 : passes.back().end;
    const int last = first + std::min(options.repeated, options.prefill - first);
    passes.push_back({begin, begin + instruction_tokens + last - first, first, last});
  }
  return passes;
}

int pass_tokens(const SynthOptions& options) {
  const std::vector<ReconstructionPass> passes = passes_of(options);
  return passes.empty() ? 0 : passes.back().end;
}

/// Bytes of the tensors, which are nearly all of a trace. A real number, since any options may be asked for.
double size_of_trace(const SynthOptions& options) {
  const double stored = options.last_queries > 0 ? options.last_queries : tokens_of(options);
  double numbers = 0;
  for (int l = 0; l < options.layers; ++l) {
    const LayerShape shape = options.shape(l);
    const double keys = options.source(l) == l ? 1.0 * shape.kv_heads * tokens_of(options) : 0.0;
    const double repeated = pass_tokens(options);
    numbers += (shape.query_heads + (options.source(l) == l ? shape.kv_heads : 0)) * repeated * shape.key_dim;
    numbers +=
        (shape.query_heads * stored + keys) * shape.key_dim + (options.value_is_key ? 0.0 : keys * shape.value_dim);
  }
  return numbers * static_cast<double>(size_of(options.dtype));
}

void require_space(const SynthOptions& options, const std::filesystem::path& path) {
  const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  std::error_code unknown;  // the writer refuses a folder that is not there
  const auto available = static_cast<double>(std::filesystem::space(folder, unknown).available);
  if (const double size = size_of_trace(options); !unknown && size > available) {
    constexpr double mebibyte = 1 << 20;
    throw Error{Refusal::resources, path.string(), "too little space on the disk for the trace",
                fmt::format("at least {:.1f} MiB", size / mebibyte), fmt::format("{:.1f} MiB", available / mebibyte)};
  }
}

/// The sizes of each layer where layers differ, and the largest ones.
void set_shapes(TraceHeader& header, const SynthOptions& options) {
  for (int l = 0; l < options.layers; ++l) {
    const auto [query_heads, kv_heads, key_dim, value_dim] = options.shape(l);
    header.heads.insert(header.heads.end(), {query_heads, kv_heads});
    header.head_dims.insert(header.head_dims.end(), {key_dim, value_dim});
    header.layer_pairs.push_back(static_cast<int>(frequencies(options, l).size()));
    header.query_heads = std::max(header.query_heads, query_heads);
    header.kv_heads = std::max(header.kv_heads, kv_heads);
    header.head_dim = std::max(header.head_dim, key_dim);
    header.value_dim = std::max(header.value_dim, value_dim);
    header.rope_pairs = std::max(header.rope_pairs, header.layer_pairs.back());
  }
  header.has_rope = header.rope_pairs > 0;
  if (options.value_is_key) header.value_is_key = header.value_dim;
  if (options.value_is_key || header.value_dim == header.head_dim) header.value_dim = 0;
  const auto clear_if_equal = [](std::vector<std::int32_t>& of_layers, std::ptrdiff_t sizes) {
    if (std::equal(of_layers.begin() + sizes, of_layers.end(), of_layers.begin())) of_layers.clear();
  };
  clear_if_equal(header.heads, 2);
  clear_if_equal(header.head_dims, 2);
  clear_if_equal(header.layer_pairs, 1);
}

TraceHeader header_of(const SynthOptions& options) {
  TraceHeader header;
  header.producer = "kvreplay synth";
  header.synthetic = true;
  header.model = "synthetic " + options.kind;
  header.architecture = "none";
  header.layers = options.layers;
  header.dtype = options.dtype;
  header.softmax_scale = 1.0 / std::sqrt(static_cast<double>(options.head_dim.of(0)));
  header.logit_softcap = options.logit_softcap;
  if (options.visible > 0) header.visible_block = options.visible_block;
  set_shapes(header, options);
  header.kv_source.assign(options.kv_source.begin(), options.kv_source.end());
  header.rope_interleaved = options.rope_interleaved;
  for (int l = 0; l < options.layers; ++l) {
    header.sliding_window.push_back(options.sliding_window.of(options.source(l)));
    header.chunk.push_back(options.chunk.of(options.source(l)));
    header.layer_index.push_back(l);
    for (int h = 0; options.sinks && h < header.query_heads; ++h)
      header.sinks.push_back(
          h % 4 == 3 || h >= header.own_query_heads(l)
              ? -HUGE_VAL
              : normal(chain(options.seed, static_cast<std::uint64_t>(sinks), l), static_cast<std::uint64_t>(h)));
    std::vector<double> inv_freq = frequencies(options, l);
    inv_freq.resize(static_cast<std::size_t>(header.rope_pairs));
    header.inv_freq.insert(header.inv_freq.end(), inv_freq.begin(), inv_freq.end());
    if (header.has_rope) header.attention_scaling.push_back(1.0);
  }
  if (std::ranges::all_of(header.chunk, [](int chunk) { return chunk == 0; })) header.chunk.clear();
  header.prefill = options.prefill;
  for (int t = 0; t < tokens_of(options); ++t) {
    const auto id =
        static_cast<std::int32_t>(chain(options.seed, static_cast<std::uint64_t>(token_numbers), t) % vocabulary);
    header.ids.push_back(id);
    header.offsets.push_back(static_cast<std::int32_t>(header.text.size()));
    header.text += fmt::format("w{} ", id);
    header.offsets.push_back(static_cast<std::int32_t>(header.text.size()));
  }
  for (const ReconstructionPass& pass : passes_of(options)) {
    for (int i = pass.begin; i < pass.begin + instruction_tokens; ++i)
      header.reconstruction_ids.push_back(static_cast<std::int32_t>(
          chain(options.seed, static_cast<std::uint64_t>(token_numbers), tokens_of(options) + i) % vocabulary));
    header.reconstruction_ids.insert(header.reconstruction_ids.end(), header.ids.begin() + pass.first,
                                     header.ids.begin() + pass.last);
    header.reconstruction_passes.insert(header.reconstruction_passes.end(), {pass.end, pass.first, pass.last});
    header.reconstruction_boundary = options.prefill;
  }
  const Range question = question_of(options);
  if (question.begin > 0) header.spans.push_back({"context", "context", 0, question.begin});
  if (options.kind == "needle") {
    const Range needle = needle_of(options);
    header.spans.push_back({"needle", "needle", needle.begin, needle.end});
  }
  header.spans.push_back({"question", "question", question.begin, question.end});
  if (options.continuation > 0) header.spans.push_back({"answer", "answer", options.prefill, tokens_of(options)});
  return header;
}

/// The units that these queries read, [Hkv, Tq, u]: that of each query and some drawn at random.
std::vector<std::int32_t> visible_units(const SynthOptions& options, int layer,
                                        std::span<const std::int32_t> positions) {
  std::vector<std::int32_t> all;
  for (int head = 0; head < options.shape(layer).kv_heads; ++head)
    for (const std::int32_t position : positions) {
      const std::int32_t own = position / options.visible_block;
      std::vector<std::int32_t> units(static_cast<std::size_t>(own));
      std::iota(units.begin(), units.end(), 0);
      std::ranges::sort(units, {}, [&](std::int32_t unit) {
        return chain(options.seed, static_cast<std::uint64_t>(selected), layer, head, position, unit);
      });
      units.resize(std::min(units.size(), static_cast<std::size_t>(options.visible - 1)));
      std::ranges::sort(units);
      units.push_back(own);
      units.resize(static_cast<std::size_t>(options.visible), -1);
      all.insert(all.end(), units.begin(), units.end());
    }
  return all;
}

/// Makes the rows [begin, end) of one tensor, counted head by head over `positions`, with as many threads as help.
void make_rows(const RowMaker& maker, Tag tag, int layer, const SynthOptions& options,
               std::span<const std::int32_t> positions, std::size_t begin, std::span<std::byte> to) {
  const auto dim = static_cast<std::size_t>(components_of(tag, options.shape(layer)));
  const std::size_t row_bytes = dim * size_of(options.dtype), rows = to.size() / row_bytes;
  const auto part = [&](std::size_t first, std::size_t last) {
    std::vector<float> row(dim);
    for (std::size_t r = first; r < last; ++r) {
      const std::size_t at = begin + r;
      maker({tag, layer, static_cast<int>(at / positions.size()), positions[at % positions.size()]}, row);
      for (std::size_t c = 0; c < dim; ++c) store(to.data() + r * row_bytes, options.dtype, c, row[c]);
    }
  };
  const std::size_t most = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t parts = std::clamp(to.size() / 65536, std::size_t{1}, most);
  std::vector<std::jthread> threads;
  std::size_t begun = 1;
  try {
    for (; begun < parts; ++begun) threads.emplace_back(part, rows * begun / parts, rows * (begun + 1) / parts);
  } catch (const std::system_error&) {
    // The system grants no more threads: the rest is made here.
  }
  part(rows * begun / parts, rows);
  part(0, rows / parts);
}

}  // namespace

LayerShape SynthOptions::shape(int layer) const {
  const int of_keys = source(layer), dim = head_dim.of(of_keys), values = value_dim.of(of_keys);
  return {query_heads.of(layer), kv_heads.of(of_keys), dim, values > 0 ? values : dim};
}

const std::vector<SynthKind>& synth_kinds() {
  static const std::vector<SynthKind> cards(kinds().begin(), kinds().end());
  return cards;
}

SynthOptions synth_defaults(const std::string& kind) { return kind_of(kind).defaults; }

void synthesise(const SynthOptions& options, const std::filesystem::path& path,
                const std::function<bool()>& interrupted) {
  check(options);
  require_space(options, path);
  const RowMaker maker = kind_of(options.kind).rows(options);
  TraceWriter writer(path, header_of(options), options.existing);

  std::vector<std::int32_t> all;
  for (int t = 0; t < tokens_of(options); ++t) all.push_back(t);
  const std::size_t stored = options.last_queries > 0 ? static_cast<std::size_t>(options.last_queries) : all.size();
  const std::span<const std::int32_t> last = std::span<const std::int32_t>(all).last(stored);

  std::vector<std::byte> block;
  const auto write = [&](Tag tag, int layer, int heads, std::span<const std::int32_t> positions, auto append) {
    const std::size_t rows = static_cast<std::size_t>(heads) * positions.size();
    const std::size_t row_bytes =
        static_cast<std::size_t>(components_of(tag, options.shape(layer))) * size_of(options.dtype);
    const std::size_t rows_in_block = std::max(std::size_t{1}, block_bytes / row_bytes);
    for (std::size_t r = 0; r < rows; r += rows_in_block) {
      if (interrupted && interrupted())
        throw Error{Refusal::interrupted, path.string(), "interrupted; nothing is kept of it"};
      block.resize(std::min(rows_in_block, rows - r) * row_bytes);
      make_rows(maker, tag, layer, options, positions, r, block);
      append(block);
    }
  };
  // Tokens of passes are numbered behind those of the trace.
  std::vector<std::int32_t> repeated(static_cast<std::size_t>(pass_tokens(options)));
  std::iota(repeated.begin(), repeated.end(), tokens_of(options));
  const auto write_passes = [&](Tag tag, int layer, int heads, const char* name) {
    const std::string object = fmt::format("/layers/{:03}/{}", layer, name);
    const int dim = components_of(tag, options.shape(layer));
    writer.begin_tensor(object, options.dtype,
                        {static_cast<std::uint64_t>(heads), repeated.size(), static_cast<std::uint64_t>(dim)});
    const std::size_t token_bytes =
        static_cast<std::size_t>(heads) * static_cast<std::size_t>(dim) * size_of(options.dtype);
    const std::size_t tokens_in_block = std::max(std::size_t{1}, block_bytes / token_bytes);
    for (std::size_t t = 0; t < repeated.size(); t += tokens_in_block) {
      const std::span<const std::int32_t> tokens =
          std::span<const std::int32_t>(repeated).subspan(t, std::min(tokens_in_block, repeated.size() - t));
      block.resize(tokens.size() * token_bytes);
      make_rows(maker, tag, layer, options, tokens, 0, block);
      writer.write_tokens(object, t, block);
    }
  };
  for (int l = 0; l < options.layers; ++l) {
    writer.begin_layer(options.dtype, stored < all.size() ? last : std::span<const std::int32_t>{});
    const LayerShape shape = options.shape(l);
    if (options.visible > 0)
      writer.write(fmt::format("/layers/{:03}/visible", l), visible_units(options, l, last),
                   {static_cast<std::uint64_t>(shape.kv_heads), stored, static_cast<std::uint64_t>(options.visible)});
    write(queries, l, shape.query_heads, last, [&](std::span<const std::byte> rows) { writer.append_q(rows); });
    if (!repeated.empty()) write_passes(queries, l, shape.query_heads, "q_reconstruction");
    if (!repeated.empty() && options.source(l) == l) write_passes(keys, l, shape.kv_heads, "k_reconstruction");
    if (options.source(l) != l) continue;
    write(keys, l, shape.kv_heads, all, [&](std::span<const std::byte> rows) { writer.append_k(rows); });
    if (!options.value_is_key)
      write(values, l, shape.kv_heads, all, [&](std::span<const std::byte> rows) { writer.append_v(rows); });
  }
  writer.finish();
}

}  // namespace kvreplay
