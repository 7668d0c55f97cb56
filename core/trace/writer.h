// Writing a trace: header first, then layer by layer, any rows at a time; or object by object, where the header is
// known only at the end and several layers grow at a time. The file appears under its name only when it is whole:
// NAME.partial is written, flushed, marked complete, synced to disk and renamed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensor.h"
#include "trace/header.h"
#include "trace/trace.h"

namespace kvreplay::hdf5 {
class Group;
}

namespace kvreplay {

/// What becomes of a file that already has the trace's name.
enum class Existing { refuse, replace };
void refuse_existing(const std::filesystem::path& path, Existing existing);

/// /tokens and /spans become members of `to`, in the types that the writer stores whatever those of the trace's file
/// are.
void write_tokens_and_spans(const TraceHeader& header, hdf5::Group& to);

/// Everything refused is an Error: {input} for a header or a tensor that breaks a rule of the format (the reader's own
/// checks), {resources} for a full disk. A writer that is destroyed before finish() removes its .partial.
class TraceWriter {
 public:
  /// Writes the header. An empty `created` becomes now; format, version and complete are the writer's own.
  TraceWriter(const std::filesystem::path& path, TraceHeader header, Existing existing = Existing::refuse);
  /// Writes the header's format and date alone; write() adds the rest. Replaces an existing file.
  explicit TraceWriter(const std::filesystem::path& path);
  ~TraceWriter();

  /// The next layer: 0, 1, 2 ... `query_positions` ascending; empty: all T queries are stored.
  void begin_layer(DType stored, std::span<const std::int32_t> query_positions = {});

  /// Whole rows, in file order: head by head, token by token. The three may be interleaved; bytes are elements of the
  /// layer's stored type. No values where they are components of the keys.
  void append_q(std::span<const std::byte> rows);
  void append_k(std::span<const std::byte> rows);
  void append_v(std::span<const std::byte> rows);

  /// An object of the header, or the query positions of a layer ("/layers/003/q_positions"), checked against the
  /// objects that came before. Its layer's tensors come later. `shape`: that of a dataset.
  void write(const std::string& object, Value value, const std::vector<std::uint64_t>& shape);

  /// A tensor of a layer ("/layers/003/k"), written in pieces, in any order; gives its place in the file, in bytes.
  std::uint64_t begin_tensor(const std::string& object, DType stored, const std::vector<std::uint64_t>& shape);
  /// The tokens from `begin` on of every head: [H, n, d] of [H, T, d], or [n] of [T].
  void write_tokens(const std::string& object, std::uint64_t begin, std::span<const std::byte> piece);

  /// Every layer must be whole. The name exists afterwards, and what it names has been read back and checked.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvreplay
