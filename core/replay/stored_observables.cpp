#include "replay/stored_observables.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <exception>
#include <iterator>
#include <span>
#include <system_error>

#include "hash.h"
#include "hdf5/hdf5.h"
#include "hdf5/partial_file.h"
#include "open_file.h"

namespace kvreplay {
namespace {

constexpr const char* file_format = "kvobservables";
constexpr int file_version = 1;

/// Of an observable's numbers and of everything they depend on, so that none can stand for others.
std::string content_hash(const ObservableKey& key, std::string_view observable, int layer,
                         std::span<const double> values) {
  Hash hash;
  hash.update(fmt::format("kvreplay observable\ntrace={}\nnumerics={}\nbackend={}\nboundary={}\nlayer={}\n{}\n",
                          key.trace_hash, key.numerics, key.backend, key.boundary, layer, observable));
  hash.update(std::as_bytes(values));
  return hash.digits();
}

std::string layer_name(int layer) { return fmt::format("{:03}", layer); }

int integer(const hdf5::Object& object, const char* name) {
  const std::int64_t value = object.integer_attribute(name);
  if (value < 0 || value > INT32_MAX)
    throw Error{Refusal::input, object.where(name), "value", "a whole number", std::to_string(value)};
  return static_cast<int>(value);
}

constexpr const char* observables_ending = ".obs.h5";

bool says_it_is_ours(const hdf5::File& file) {
  return file.has_attribute("format") && file.string_attribute("format") == file_format;
}

hdf5::File open_whole(const std::filesystem::path& path) {
  hdf5::File file = hdf5::File::open(path);
  if (!says_it_is_ours(file)) throw Error{Refusal::input, path.string(), "format", file_format, "another file"};
  if (const std::int64_t version = file.integer_attribute("version"); version != file_version)
    throw Error{Refusal::input, path.string(), "version", std::to_string(file_version), std::to_string(version)};
  return file;
}

/// Nothing is there, or what may be replaced.
void require_own(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::symlink_status(path, ignored).type() == std::filesystem::file_type::not_found) return;
  if (!is_observables_file(path))
    throw Error{Refusal::input, path.string(), "not a file of stored observables, or damaged; remove it first"};
}

/// Links that lead elsewhere are refused.
hdf5::Group group_in(const hdf5::Group& parent, const std::string& name) {
  if (parent.member(name) != hdf5::Group::Member::group)
    throw Error{Refusal::input, parent.where(), "kind of " + name, "a group", "something else"};
  return parent.group(name);
}

ObservableKey key_of(const hdf5::Group& entry) {
  return {entry.string_attribute("trace_hash"), integer(entry, "numerics"), entry.string_attribute("backend"),
          integer(entry, "boundary")};
}

LayersOf layers_of(const hdf5::Group& entry) {
  LayersOf layers;
  for (const std::string& name : entry.names()) {
    const hdf5::Group layer = group_in(entry, name);
    int number = -1;
    std::from_chars(name.data(), name.data() + name.size(), number);
    if (name != layer_name(number)) throw Error{Refusal::input, layer.where(), "name", "the number of a layer", name};
    for (const std::string& observable : layer.names()) layers[observable].push_back(number);
  }
  return layers;
}

bool all_finite(std::span<const double> values) {
  return std::ranges::all_of(values, [](double value) { return std::isfinite(value); });
}

/// Numbers that are the ones that were written. Throws Error{input} for others.
Matrix read_values(const hdf5::Group& entry, const ObservableKey& key, const std::string& observable, int layer) {
  const hdf5::Group group = group_in(entry, layer_name(layer));
  if (group.member(observable) != hdf5::Group::Member::dataset)
    throw Error{Refusal::input, group.where(), "kind of " + observable, "a dataset", "something else"};
  const hdf5::Dataset dataset = group.dataset(observable);
  dataset.require_plain_storage();
  const hdf5::Shape shape = dataset.shape();
  if (shape.size() != 2 || shape[1] != static_cast<hsize_t>(key.boundary) || shape[0] == 0 || shape[0] > 65536 ||
      dataset.chunked() || dataset.compact())
    throw Error{Refusal::input, dataset.where(), "shape", fmt::format("[heads, {}], contiguous", key.boundary),
                hdf5::to_string(shape)};
  const std::vector<double> values = dataset.values<double>();
  if (dataset.string_attribute("xxh3") != content_hash(key, observable, layer, values))
    throw Error{Refusal::input, dataset.where(), "xxh3", "the hash of its numbers and of their inputs", "another hash"};
  if (!all_finite(values)) throw Error{Refusal::input, dataset.where(), "number", "finite numbers", "NaN or Inf"};
  Matrix matrix(static_cast<int>(shape[0]), static_cast<int>(shape[1]));
  std::ranges::copy(values, matrix.values().begin());
  return matrix;
}

}  // namespace

std::filesystem::path observables_path(const Trace& trace) {
  return trace.path().parent_path() / (trace.name() + observables_ending);
}

bool is_observables_file(const std::filesystem::path& path) noexcept {
  try {
    return says_it_is_ours(hdf5::File::open(path));
  } catch (const std::exception&) {
    return false;
  }
}

std::vector<std::string> without_observables(std::vector<std::string> paths) {
  std::vector<std::string> others;
  // The name is asked first: a trace that was not named like them is opened once, by its reader.
  std::ranges::remove_copy_if(paths, std::back_inserter(others), [](const std::string& path) {
    return path.ends_with(observables_ending) && is_observables_file(path);
  });
  return others.empty() ? paths : others;
}

std::vector<StoredEntry> list_observables(const std::filesystem::path& path) {
  const hdf5::File file = open_whole(path);
  std::vector<StoredEntry> entries;
  for (const std::string& name : file.names()) {
    const hdf5::Group entry = group_in(file, name);
    entries.push_back({key_of(entry), layers_of(entry)});
  }
  return entries;
}

/// The entry of an existing file that has the key.
class StoredObservables::Reader {
 public:
  Reader(hdf5::Group entry, ObservableKey key)
      : entry_(std::move(entry)), key_(std::move(key)), layers_(layers_of(entry_)) {}

  /// Null: no entry has the key.
  static std::unique_ptr<Reader> open(const std::filesystem::path& path, const ObservableKey& key) {
    const hdf5::File file = open_whole(path);
    for (const std::string& name : file.names())
      if (hdf5::Group entry = group_in(file, name); key_of(entry) == key)
        return std::make_unique<Reader>(std::move(entry), key);
    return nullptr;
  }

  bool holds(std::string_view observable, int layer) const {
    const auto found = layers_.find(observable);
    return found != layers_.end() && std::ranges::find(found->second, layer) != found->second.end();
  }
  Matrix values(std::string_view observable, int layer) const {
    return read_values(entry_, key_, std::string(observable), layer);
  }

 private:
  hdf5::Group entry_;  // keeps its file open
  ObservableKey key_;
  LayersOf layers_;
};

/// The new file, layer by layer. Room is reserved first: HDF5 cannot close a file that it fails to write.
class StoredObservables::Writer {
 public:
  /// Begins with what the existing file has of this trace and these numerics.
  Writer(const std::filesystem::path& path, const ObservableKey& key) : partial_(path), key_(key) {
    partial_.reserve(0);
    file_.emplace(hdf5::File::create(partial_.path()));
    file_->set_attribute("format", file_format);
    file_->set_attribute("version", std::int64_t{file_version});
    flush();
    if (std::error_code ignored; std::filesystem::exists(path, ignored)) copy_from(path);
    if (!own_) own_.emplace(add_entry(key));
  }
  ~Writer() {
    own_.reset();
    if (!file_) return;
    try {
      file_->close();
    } catch (const std::exception&) {
      // It is thrown away.
    }
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void write(std::string_view observable, int layer, const Matrix& values) {
    write(*own_, key_, std::string(observable), layer, values);
  }

  void finish() {
    own_.reset();
    flush();
    file_->close();
    file_.reset();
    partial_.trim();
    partial_.finish();
  }

 private:
  void flush() {
    file_->flush();
    partial_.reserve_again();
  }

  hdf5::Group add_entry(const ObservableKey& key) {
    hdf5::Group entry = file_->create_group(fmt::format("{:03}", entries_++));
    entry.set_attribute("trace_hash", key.trace_hash);
    entry.set_attribute("numerics", std::int64_t{key.numerics});
    entry.set_attribute("backend", key.backend);
    entry.set_attribute("boundary", std::int64_t{key.boundary});
    return entry;
  }

  /// What is damaged stays behind.
  void copy_from(const std::filesystem::path& path) {
    unless_damaged([&] {
      const hdf5::File old = open_whole(path);
      for (const std::string& name : old.names()) unless_damaged([&] { copy_entry(group_in(old, name)); });
    });
  }

  void copy_entry(const hdf5::Group& from) {
    const ObservableKey key = key_of(from);
    if (key.trace_hash != key_.trace_hash || key.numerics != key_.numerics) return;
    const LayersOf stored = layers_of(from);
    hdf5::Group to = add_entry(key);
    for (const auto& [observable, layers] : stored)
      for (const int layer : layers)
        unless_damaged([&] { write(to, key, observable, layer, read_values(from, key, observable, layer)); });
    if (key == key_) own_.emplace(std::move(to));
  }

  template <class Work>
  static void unless_damaged(Work work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.refusal() != Refusal::input) throw;
    }
  }

  void write(hdf5::Group& entry, const ObservableKey& key, const std::string& observable, int layer,
             const Matrix& values) {
    const std::string name = layer_name(layer);
    hdf5::Group group = entry.member(name) == hdf5::Group::Member::none ? entry.create_group(name) : entry.group(name);
    if (group.member(observable) != hdf5::Group::Member::none) return;
    hdf5::Dataset dataset =
        group.create_dataset(observable, hdf5::Type::float64(),
                             {static_cast<hsize_t>(values.rows()), static_cast<hsize_t>(values.columns())});
    const auto offset = dataset.offset();
    if (!offset) throw Error{Refusal::internal, dataset.where(), "has no place in the file"};
    const std::span<const std::byte> bytes = std::as_bytes(values.values());
    partial_.reserve(*offset + bytes.size());
    partial_.write(*offset, bytes);
    dataset.set_attribute("xxh3", content_hash(key, observable, layer, values.values()));
    flush();
  }

  PartialFile partial_;
  ObservableKey key_;
  std::optional<hdf5::File> file_;
  std::optional<hdf5::Group> own_;
  int entries_ = 0;
};

/// Whether it went well; otherwise a warning says what did not, and with what consequence.
template <class Work>
bool StoredObservables::attempt(const char* consequence, Work work) {
  try {
    work();
    return true;
  } catch (const std::exception& error) {
    warnings_.push_back(fmt::format("{} ({})", error.what(), consequence));
    return false;
  }
}

namespace {

constexpr const char* not_used = "stored observables are not used";
constexpr const char* not_kept = "observables are not kept";

}  // namespace

StoredObservables::StoredObservables(const Trace& trace, ObservableKey key, bool keep)
    : path_(observables_path(trace)), key_(std::move(key)), keep_(keep) {
  if (keep_) keep_ = attempt(not_kept, [&] { require_own(path_); });
  const bool refused = keep && !keep_;
  if (std::error_code ignored; !refused && std::filesystem::exists(path_, ignored))
    attempt(not_used, [&] { reader_ = Reader::open(path_, key_); });
}

StoredObservables::~StoredObservables() {
  try {
    finish();
  } catch (const std::exception&) {
    // An exception is on its way already, or nobody asked how it ended.
  }
}

bool StoredObservables::holds(std::string_view observable, int layer) const {
  return reader_ && reader_->holds(observable, layer);
}

std::optional<Matrix> StoredObservables::find(std::string_view observable, int layer, int rows, int columns) {
  if (!holds(observable, layer)) return std::nullopt;
  Matrix values;
  const bool sound = attempt(not_used, [&] {
    values = reader_->values(observable, layer);
    if (values.rows() != rows || values.columns() != columns)
      throw Error{Refusal::input, path_.string(), "shape of " + std::string(observable),
                  fmt::format("[{}, {}]", rows, columns), fmt::format("[{}, {}]", values.rows(), values.columns())};
  });
  if (!sound) {
    reader_.reset();
    return std::nullopt;
  }
  read_[std::string(observable)].push_back(layer);
  return values;
}

void StoredObservables::keep(std::string_view observable, int layer, const Matrix& values) {
  if (!keep_ || !all_finite(values.values())) return;
  keep_ = attempt(not_kept, [&] {
    if (!writer_) writer_ = std::make_unique<Writer>(path_, key_);
    writer_->write(observable, layer, values);
  });
  if (!keep_) writer_.reset();
}

void StoredObservables::finish() {
  if (!writer_) return;
  attempt(not_kept, [&] {
    require_own(path_);  // once more: the run took its time
    writer_->finish();
  });
  writer_.reset();
}

}  // namespace kvreplay
