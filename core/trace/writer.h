// Writing a trace: header first, then layer by layer, any rows at a time. The file appears under its name only when it
// is whole: NAME.partial is written, flushed, marked complete, synced to disk and renamed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

#include "tensor.h"
#include "trace/trace.h"

namespace kvreplay::hdf5 {
class Group;
}

namespace kvreplay {

/// What becomes of a file that already has the trace's name.
enum class Existing { refuse, replace };

/// /tokens and /spans become members of `to`, in the types that the writer stores whatever those of the trace's file
/// are.
void write_tokens_and_spans(const TraceHeader& header, hdf5::Group& to);

/// Everything refused is an Error: {input} for a header or a tensor that breaks a rule of the format (the reader's own
/// checks), {resources} for a full disk. A writer that is destroyed before finish() removes its .partial.
class TraceWriter {
 public:
  /// Writes the header. An empty `created` becomes now; format, version and complete are the writer's own.
  TraceWriter(std::filesystem::path path, const TraceHeader& header, Existing existing = Existing::refuse);
  TraceWriter(TraceWriter&&) noexcept;
  TraceWriter& operator=(TraceWriter&&) noexcept;
  ~TraceWriter();

  /// The next layer: 0, 1, 2 ... `query_positions` ascending; empty: all T queries are stored.
  void begin_layer(DType stored, std::span<const std::int32_t> query_positions = {});

  /// Whole rows, in file order: head by head, token by token. The three may be interleaved; bytes are elements of the
  /// layer's stored type.
  void append_q(std::span<const std::byte> rows);
  void append_k(std::span<const std::byte> rows);
  void append_v(std::span<const std::byte> rows);

  /// The layer's output projection [hidden, Hq*d], whole; optional.
  void write_output_projection(DType stored, int hidden, std::span<const std::byte> elements);

  /// Every layer must be whole. The name exists afterwards, and what it names has been read back and checked.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvreplay
