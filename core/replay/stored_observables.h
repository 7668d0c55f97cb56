// Observables of whole prompts in a file beside their trace, so that the O(n²) work is done once. The file is a cache:
// what does not fit the run or is damaged is never used, and a run has the same bits with and without it. Layout and
// rules: traces/FORMAT.md, "Stored observables".
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "observables/observable_store.h"
#include "trace/trace.h"

namespace kvreplay {

/// What the numbers depend on beside observable and layer.
struct ObservableKey {
  std::string trace_hash;
  int numerics = 0;
  std::string backend;  // Backend::description(): what computed, at which SIMD level or on which device
  int boundary = 0;

  friend bool operator==(const ObservableKey&, const ObservableKey&) = default;
};

/// Layers by observable.
using LayersOf = std::map<std::string, std::vector<int>, std::less<>>;

struct StoredEntry {
  ObservableKey key;
  LayersOf layers;  // ascending
};

/// NAME.obs.h5 beside NAME.h5.
std::filesystem::path observables_path(const Trace& trace);

/// What such a file says it holds; its numbers are not read. Throws Error{input} for one that is not whole or not of
/// this version.
std::vector<StoredEntry> list_observables(const std::filesystem::path& path);

/// Whether a regular file says at its root that it is one of stored observables, whatever its name; its version and
/// what it holds may be anything. False for what cannot be read.
bool is_observables_file(const std::filesystem::path& path) noexcept;

/// What is named beside files NAME.obs.h5 of stored observables, as by `*.h5`; all of it where nothing else is named.
std::vector<std::string> without_observables(std::vector<std::string> paths);

/// Reads what fits, and with `keep` writes what had to be computed. Nothing here stops a run: a file that cannot be
/// read or written is left alone from then on, and warnings() says why. Another file of that name is never replaced.
class StoredObservables final : public ObservableStore {
 public:
  StoredObservables(const Trace& trace, ObservableKey key, bool keep);
  /// What was kept is finished.
  ~StoredObservables() override;

  std::optional<Matrix> find(std::string_view observable, int layer, int rows, int columns) override;
  void keep(std::string_view observable, int layer, const Matrix& values) override;

  /// Whether find() would be tried there: the file says it has that, and no number of it was read.
  bool holds(std::string_view observable, int layer) const;

  /// What was kept becomes the file, with all in it that is still of this trace and these numerics.
  void finish();

  /// Layers that were read.
  const LayersOf& read() const { return read_; }
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  class Reader;
  class Writer;
  template <class Work>
  bool attempt(const char* consequence, Work work);

  std::filesystem::path path_;
  ObservableKey key_;
  bool keep_;
  std::unique_ptr<Reader> reader_;  // null: there is nothing that fits, or no longer
  std::unique_ptr<Writer> writer_;  // from the first layer that is kept
  LayersOf read_;
  std::vector<std::string> warnings_;
};

}  // namespace kvreplay
