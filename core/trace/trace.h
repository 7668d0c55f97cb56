// A trace: the Q/K/V tensors of one model on one input, opened, checked and mapped. The format is traces/FORMAT.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "open_file.h"
#include "reconstruction_pass.h"
#include "tensor.h"

namespace kvreplay {

/// A named range of tokens [begin, end).
struct Span {
  std::string name;
  std::string kind;
  int begin = 0;
  int end = 0;

  friend bool operator==(const Span&, const Span&) = default;
};

/// The first span of that name; null: there is none. A name that is given twice means its first span everywhere.
inline const Span* find_span(std::span<const Span> spans, std::string_view name) {
  for (const Span& span : spans)
    if (span.name == name) return &span;
  return nullptr;
}

/// Sizes of a layer's queries, keys and values, as Trace::layer() gives them.
struct LayerShape {
  int query_heads = 0;  // Hq, of all layers that read the keys and values
  int kv_heads = 0;     // Hkv
  int key_dim = 0;      // d, of queries too
  int value_dim = 0;    // dv

  friend bool operator==(const LayerShape&, const LayerShape&) = default;
};

/// State of a hybrid model beside keys and values, in some of its layers.
struct OtherState {
  std::string kind;                  // of layer, as the model's configuration names it
  std::vector<std::int32_t> layers;  // the model's own numbers
  std::int64_t bytes = 0;            // of each layer, for one sequence of any length
};

/// Everything in a trace but the tensors.
struct TraceHeader {
  std::string producer, created;
  bool synthetic = false;

  std::string model, architecture;
  int layers = 0;                // L, stored layers
  int query_heads = 0;           // the largest Hq of a layer
  int kv_heads = 0;              // the largest Hkv
  int head_dim = 0;              // the largest d
  DType dtype = DType::float32;  // the model computed in it
  double softmax_scale = 1.0;
  double logit_softcap = 0.0;
  std::string source_hash;
  std::string quantisation;  // of the weights while loading: 8bit or 4bit; empty: as stored
  std::string other_state;   // JSON, which other_states() reads; or empty
  int value_dim = 0;         // the largest dv; 0: that of d
  int visible_block = 0;     // tokens of a unit of the model's own selection; 0: it selects nothing
  int value_is_key = 0;      // values are the first dv components of the keys, and this is dv; 0: separate tensors

  std::vector<std::int32_t> sliding_window;  // [L]
  std::vector<std::int32_t> layer_index;     // [L], the model's own numbers
  std::vector<std::int32_t> heads;           // [L, 2] Hq and Hkv of each layer; or empty: all the same
  std::vector<std::int32_t> head_dims;       // [L, 2] d and dv of each layer; or empty: all the same
  std::vector<std::int32_t> kv_source;       // [L] layer whose keys and values a layer reads; or empty: its own
  std::vector<double> sinks;                 // [L, Hq] logits, -infinity: none; or empty
  std::vector<std::int32_t> chunk;           // [L], 0: none; or empty

  bool has_rope = false;
  bool rope_interleaved = false;
  int rope_pairs = 0;                     // r, the most of a layer
  std::vector<std::int32_t> layer_pairs;  // [L] rotated pairs of each layer; or empty: r each
  int rope_offset = 0;                    // of the first rotated component
  std::vector<double> inv_freq;           // [L, r]
  std::vector<double> attention_scaling;  // [L]

  int prefill = 0;                    // P
  std::vector<std::int32_t> ids;      // [T]
  std::vector<std::int32_t> offsets;  // [T, 2], or empty
  std::string text;                   // UTF-8, or empty
  std::vector<Span> spans;

  std::vector<std::int32_t> reference_ids;          // [G, K], or empty: the model's most probable tokens
  std::vector<double> reference_log_probabilities;  // [G, K], or empty
  std::vector<double> reference_tail;               // [G], or empty: the probability of all others

  int reconstruction_boundary = 0;                  // prompt tokens that each reconstruction pass follows; 0: no pass
  std::vector<std::int32_t> reconstruction_ids;     // [R], or empty
  std::vector<std::int32_t> reconstruction_passes;  // [p, 3], or empty

  int tokens() const { return static_cast<int>(ids.size()); }  // T
  int continuation() const { return tokens() - prefill; }      // G
  /// Whether layer l has keys and values: it does not read those of an earlier layer.
  bool has_keys(int l) const { return source(l) == l; }
  /// The layer whose keys and values layer l reads.
  int source(int l) const { return kv_source.empty() ? l : kv_source[static_cast<std::size_t>(l)]; }
  /// Layers that read the keys and values of layer l, itself first; itself alone where it has none.
  std::vector<int> readers(int l) const;
  /// Query heads of layer l alone.
  int own_query_heads(int l) const { return heads.empty() ? query_heads : heads[2 * static_cast<std::size_t>(l)]; }
  /// Layers and heads of the query heads of Trace::layer(l): those of a KV head together, reader by reader.
  struct QueryHead {
    int layer = 0;
    int head = 0;
  };
  std::vector<QueryHead> query_heads_of(int l) const;
  std::vector<ReconstructionPass> passes() const;
  LayerShape shape(int l) const;
  /// Each size is the largest of some layers.
  LayerShape largest_shape(std::span<const int> some_layers) const;
  /// Of the rotated pairs of layer l, in radians a position.
  std::span<const double> frequencies(int l) const;
  int value_components() const { return value_is_key > 0 ? value_is_key : value_dim > 0 ? value_dim : head_dim; }
  bool stores_values() const { return value_is_key == 0; }
  /// Whether each query of layer l sees all tokens before it: no sliding window, and one chunk.
  bool sees_all_tokens(int l) const {
    const auto at = static_cast<std::size_t>(l);
    return sliding_window[at] == 0 && (chunk.empty() || chunk[at] == 0 || chunk[at] >= tokens());
  }
};

/// A tensor as the file has it.
struct StoredTensor {
  std::string path;        // "/layers/003/k"
  TensorView view;         // output projections are one head of `hidden` tokens of Hq*dv components, norms of T tokens
  std::vector<int> shape;  // as in the file
  std::string xxh3;        // stated by the file; empty: not stated
  bool is_archived;        // view is in memory that the next archived layer overwrites
};

/// A tensor outside any file.
struct TensorInMemory {
  DType dtype = DType::float32;
  std::vector<std::uint64_t> shape = {};
  std::shared_ptr<const std::byte> elements = {};  // which it keeps in memory
};

/// The tensors of one layer outside any file.
struct LayerInMemory {
  std::vector<std::int32_t> query_positions = {};  // [Tq] ascending; empty: all T queries
  TensorInMemory q = {}, k = {}, v = {};           // k, v: none in layers that have none in a file
  std::vector<std::int32_t> visible = {};          // units that the model selected; or empty
  std::vector<std::uint64_t> visible_shape = {};   // [Hkv, Tq, u]
  std::optional<TensorInMemory> wo = {};
};

/// Throws, in open()'s words, where there is no file that can be read at all.
void require_file(const std::filesystem::path& path);

/// An open trace. Opening checks every shape, type, range and the file's length, and reads no tensor data.
class Trace {
 public:
  /// Throws Error{input} that names the object, what was expected and what was found.
  static Trace open(const std::filesystem::path& path);

  /// A trace of tensors in memory, which are not copied and must not change while the trace is in use. `path` takes the
  /// place of a file's in messages and names the trace. Every number and the hash are those of a file with this header
  /// and these tensors. Throws as open() does for such a file.
  static Trace of_arrays(const std::filesystem::path& path, TraceHeader header, std::vector<LayerInMemory> layers);

  Trace(Trace&&) noexcept;
  Trace& operator=(Trace&&) noexcept;
  ~Trace();

  const std::filesystem::path& path() const;
  /// The file's name without its last ".h5": what tables and results call the trace.
  const std::string& name() const;
  const TraceHeader& header() const;

  /// XXH3-128 of the header's values and of every tensor's hash, 32 hexadecimal digits. A trace without stored
  /// tensor hashes is read once to make them.
  const std::string& hash() const;
  /// Whether every tensor's hash is in the file, so that hash() is immediate.
  bool states_hashes() const;

  /// Whether its tensors are arrays in memory: no file has its path.
  bool is_in_memory() const;

  /// Of the file that was opened.
  const FileIdentity& identity() const;

  /// Throws Error{input} where the file was written to since it was opened, or its disk failed. Bytes that have gone
  /// meanwhile read as 0: whoever computes with tensors asks this again before the result is believed.
  void require_unchanged() const;

  /// Stored layer l, with the queries of all layers that read its keys and values; require_unchanged(). Mapped where
  /// the file is contiguous; read through HDF5 into memory that the result's trace keeps until another archived layer
  /// is asked for, where it is chunked. Queries of several layers are put together in memory and kept likewise.
  LayerTensors layer(int l) const;

  /// All tensors of layer l that are stored, q and k first; lifetime as for layer().
  std::vector<StoredTensor> tensors(int l) const;

  /// Positions of the stored queries of layer l: [Tq] ascending, or empty when all T are stored.
  std::span<const std::int32_t> query_positions(int l) const;
  /// [Hkv, Tq, u] the units that the model itself selected for each query, as in the file; empty: every token.
  std::span<const std::int32_t> visible_units(int l) const;

  /// Asks the system to read layer l ahead, with its queries or without; whether there is room for all of that beside a
  /// layer in use.
  bool prefetch(int l, bool queries = true) const;
  /// Unmaps its pages: they are the system's to keep or to drop.
  void release(int l) const;

  /// Bytes of layer l that are mapped while it is in use, and that an archive puts together in memory.
  std::size_t mapped_bytes(int l) const;
  std::size_t archived_bytes(int l) const;

  /// From now on at most about so many bytes are mapped at a time. Nothing is read ahead that does not fit beside a
  /// layer in use; pages of a layer that does not fit itself are let go while it is in use, and come back from the
  /// system's cache or the disk when they are touched again.
  void limit_mapped(std::size_t bytes) const;
  /// No smaller limit can be kept: pages come while others are let go.
  static constexpr std::size_t least_mapped = std::size_t{128} << 20;

  /// Bytes of all tensors.
  std::size_t tensor_bytes() const;

 private:
  class State;
  explicit Trace(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvreplay
