#include "trace/synth.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>

#include "arguments.h"
#include "commands.h"
#include "error.h"
#include "interruption.h"
#include "output.h"
#include "parameters.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    {"output", 'o', "FILE", "", "trace to write"},
    {"layers", 0, "N", "", "layers (default: see kinds)"},
    {"query-heads", 0, "N,...", "", "query heads of layers 0, 1, ..., repeated over all layers"},
    {"kv-heads", 0, "N,...", "", "KV heads, likewise; divisors of the query heads"},
    {"head-dim", 0, "N,...", "", "head dimension, likewise"},
    {"value-dim", 0, "N,...", "", "head dimension of the values, likewise (default: that of the keys)"},
    {"kv-source", 0, "LAYER,...", "",
     "layer whose keys and values each layer reads: its own number, or an earlier one"},
    {"value-is-key", 0, "", "", "values are the first components of the keys, as in MLA"},
    {"prompt", 0, "N", "", "prompt tokens"},
    {"continuation", 0, "N", "", "tokens after the prompt"},
    {"dtype", 0, "float16|bfloat16|float32", "", "data type of the stored tensors (default: float16)"},
    {"seed", 0, "N", "", "random seed (default: 0)"},
    {"queries", 0, "all|last:N", "all", "queries to store"},
    {"sliding-window", 0, "W,...", "",
     "sliding windows of layers 0, 1, ..., in tokens, repeated over all layers; 0: none"},
    {"chunk", 0, "C,...", "", "chunks of attention, likewise: query t sees keys from floor(t / C) C on; 0: none"},
    {"visible", 0, "U,B", "", "native sparse attention: each query reads U units of B tokens, its own and random ones"},
    {"reconstruct", 0, "N", "", "passes that repeat the prompt, N of its tokens in each"},
    {"sink-logits", 0, "", "", "sink logits: the softmax of a query head has one more term"},
    {"softcap", 0, "C", "", "soft cap of logits, C tanh(z/C); 0: none"},
    {"rope-base", 0, "X", "", "base of RoPE, inv_freq[i] = X^(-2i/d); 0: no RoPE"},
    {"rope-interleaved", 0, "", "", "RoPE pairs (2i, 2i+1) in place of (i, i+d/2)"},
    {"force", 0, "", "", "overwrite an existing file"},
};

constexpr int many = std::numeric_limits<int>::max();

DType dtype_of(const std::string& word) {
  return word == "float16" ? DType::float16 : word == "bfloat16" ? DType::bfloat16 : DType::float32;
}

int last_queries(const std::string& text) {
  if (text == "all") return 0;
  if (!text.starts_with("last:")) throw Error{Refusal::usage, "--queries", "unknown value", "all or last:N", text};
  const int n = parse_int("--queries", text.substr(5));
  if (n < 1) throw Error{Refusal::usage, "--queries", "out of range", "last:1 or more", text};
  return n;
}

SizeByLayer sizes(const std::string& option, const std::string& text, int least) {
  SizeByLayer all;
  for (const std::string_view piece : split_list(option, text)) {
    all.push_back(parse_int(option, piece));
    if (all.back() < least)
      throw Error{Refusal::usage, option, "out of range", fmt::format("{} or more", least), std::string(piece)};
  }
  return all;
}

SynthOptions requested(const Arguments& arguments) {
  SynthOptions wanted = synth_defaults(arguments.operands().front());
  const auto number = [&](const char* option, int& value, int least) {
    if (arguments.given(option)) value = arguments.whole_number(option, least, many);
  };
  const auto by_layer = [&](const std::string& option, SizeByLayer& values, int least) {
    if (arguments.given(option)) values = sizes("--" + option, arguments.text(option), least);
  };
  number("layers", wanted.layers, 1);
  by_layer("query-heads", wanted.query_heads, 1);
  by_layer("kv-heads", wanted.kv_heads, 1);
  by_layer("head-dim", wanted.head_dim, 1);
  by_layer("value-dim", wanted.value_dim, 1);
  if (arguments.given("kv-source")) wanted.kv_source = sizes("--kv-source", arguments.text("kv-source"), 0);
  wanted.value_is_key = arguments.given("value-is-key");
  wanted.sinks = arguments.given("sink-logits");
  if (arguments.given("visible")) {
    const std::vector<int> units = sizes("--visible", arguments.text("visible"), 1);
    if (units.size() != 2)
      throw Error{Refusal::usage, "--visible", "value", "U,B, each at least 1", arguments.text("visible")};
    wanted.visible = units[0];
    wanted.visible_block = units[1];
  }
  number("prompt", wanted.prefill, 1);
  number("reconstruct", wanted.repeated, 1);
  number("continuation", wanted.continuation, 0);
  if (arguments.given("dtype")) wanted.dtype = dtype_of(arguments.text("dtype"));
  if (arguments.given("seed")) wanted.seed = arguments.seed("seed");
  if (arguments.given("queries")) wanted.last_queries = last_queries(arguments.text("queries"));
  by_layer("sliding-window", wanted.sliding_window, 0);
  by_layer("chunk", wanted.chunk, 0);
  if (arguments.given("softcap"))
    wanted.logit_softcap = arguments.real_number("softcap", 0.0, std::numeric_limits<double>::max());
  if (arguments.given("rope-base"))
    wanted.rope_base = arguments.real_number("rope-base", 0.0, std::numeric_limits<double>::max());
  if (arguments.given("rope-interleaved")) wanted.rope_interleaved = true;
  if (arguments.given("force")) wanted.existing = Existing::replace;
  return wanted;
}

int run(const Arguments& arguments) {
  const SynthOptions wanted = requested(arguments);
  if (!arguments.given("output")) throw Error{Refusal::usage, "synth", "no output file", "-o FILE"};
  const std::string path = arguments.text("output");
  heed_interruptions();
  synthesise(wanted, path, interrupted);
  fmt::print("{}  {}  prompt {} + continuation {} tokens  {} layers  {} query / {} KV heads  {}\n", path, wanted.kind,
             wanted.prefill, wanted.continuation, wanted.layers, fmt::join(wanted.query_heads, ","),
             fmt::join(wanted.kv_heads, ","), size_text(std::filesystem::file_size(path)));
  return 0;
}

std::string kinds() {
  std::string text = "kinds, and their default shapes\n";
  for (const SynthKind& kind : synth_kinds()) {
    const SynthOptions& d = kind.defaults;
    text += fmt::format(
        "  {:10} {}\n             --layers {} --query-heads {} --kv-heads {} --head-dim {} --prompt {} "
        "--continuation {}\n",
        kind.name, kind.summary, d.layers, d.query_heads.of(0), d.kv_heads.of(0), d.head_dim.of(0), d.prefill,
        d.continuation);
  }
  return text;
}

}  // namespace

constexpr const char* examples =
    "kvreplay synth needle -o needle.h5\n"
    "kvreplay synth gaussian --prompt 4096 --dtype bfloat16 --seed 1 -o gaussian.h5\n";

const Command synth_command{"synth", "writes a synthetic trace of any shape", "KIND", options, run, kinds, examples,
                            true};

}  // namespace kvreplay
