// Synthetic traces of any shape: the same bits for the same options, whatever the number of threads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tensor.h"
#include "trace/trace.h"
#include "trace/writer.h"

namespace kvreplay {

/// A size of layers 0, 1, ..., repeated as often as needed.
struct SizeByLayer : std::vector<int> {
  using std::vector<int>::vector;
  SizeByLayer(int of_all) : std::vector<int>{of_all} {}

  int of(int layer) const { return at(static_cast<std::size_t>(layer) % size()); }
};

struct SynthOptions {
  std::string kind = "gaussian";
  int layers = 4;               // L
  SizeByLayer query_heads = 8;  // Hq
  SizeByLayer kv_heads = 2;     // Hkv
  SizeByLayer head_dim = 64;    // d
  SizeByLayer value_dim = 0;    // dv; 0: d
  int prefill = 256;            // P
  int continuation = 32;        // G
  DType dtype = DType::float16;
  std::uint64_t seed = 0;
  std::vector<int> kv_source = {};  // layer whose keys and values each layer reads; empty: its own
  int last_queries = 0;             // store the last N queries; 0: all
  SizeByLayer sliding_window = 0;   // W; 0: none
  SizeByLayer chunk = 0;            // C; 0: none
  int visible = 0;                  // units that each query reads, drawn at random and its own; 0: every token
  int visible_block = 1;            // tokens of a unit
  int repeated = 0;                 // prompt tokens that each reconstruction pass repeats; 0: no pass
  double logit_softcap = 0.0;       // 0: none
  bool value_is_key = false;        // values are the first dv components of the keys
  bool sinks = false;               // each query head has a sink logit, standard normal; every fourth has none
  double rope_base = 10000.0;       // inv_freq[i] = base^(-2i/d); 0: no RoPE
  bool rope_interleaved = false;
  Existing existing = Existing::refuse;

  int source(int layer) const { return kv_source.empty() ? layer : kv_source[static_cast<std::size_t>(layer)]; }
  /// Sizes of the layer's own queries, and of the keys and values that it reads.
  LayerShape shape(int layer) const;
};

struct SynthKind {
  std::string name;
  std::string summary;
  SynthOptions defaults;
};

/// gaussian, sinks, needle, repeat, integer, fixture.
const std::vector<SynthKind>& synth_kinds();

/// The options of one kind before anything is changed; an unknown name is an Error{usage} with the nearest.
SynthOptions synth_defaults(const std::string& kind);

/// Writes the trace. Options that contradict each other are an Error{usage}, a trace that the disk has no room for
/// is an Error{resources}, before anything is written.
void synthesise(const SynthOptions& options, const std::filesystem::path& path,
                const std::function<bool()>& interrupted = {});

}  // namespace kvreplay
