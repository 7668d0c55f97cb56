// What opening a trace does not check, because it means reading every number.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "trace/trace.h"

namespace kvreplay {

/// Every violation of the format that opening a trace finds, each with its remedy; empty: it can be opened. Strings of
/// variable length are reported alone, and so is what keeps HDF5 from reading the file.
std::vector<Error> violations(const std::filesystem::path& path);

struct DeepReport {
  std::vector<Error> problems;  // empty: valid. Each names its object as the reader's errors do
  std::int64_t numbers = 0;     // elements looked at
  int hashes = 0;               // stored tensor hashes that were recomputed
  int tensors = 0;              // tensors in all; those without a stored hash have nothing to compare with
  int rope_layers = 0;          // layers whose keys could be held against RoPE
};

/// Every number finite (the first that is not, with layer, tensor, head, position, component); stored hashes equal to
/// recomputed ones; keys not such as a model has before RoPE (traces/FORMAT.md says what can be concluded and when).
/// `progress` hears the fraction done.
DeepReport validate_deep(const Trace& trace, const std::function<void(double)>& progress = {});

/// Of one head of a tensor, the first number that is NaN or infinite. `positions`: what its rows are, where they are
/// not all tokens. `rows`: those to look at, ascending; none given: all.
std::optional<Error> first_not_finite(const std::string& file, const StoredTensor& tensor, int head,
                                      std::span<const std::int32_t> positions = {},
                                      std::optional<std::span<const std::int32_t>> rows = {});

}  // namespace kvreplay
