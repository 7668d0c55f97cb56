// A damaged HDF5 file can crash the library that opens it, or keep it busy for ever. So a child process goes first.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <list>
#include <memory>
#include <vector>

namespace kvreplay::hdf5 {
class File;
}

namespace kvreplay {

/// Where a file's links and its datasets' elements may lie. What leads out of a file is no concern of who never follows
/// it.
enum class Links { anywhere, inside };

/// A child process opens an HDF5 file and looks up everything that hard links lead to: attributes, types, shapes,
/// storage, where each chunk lies, and how much a deflated one holds. Throws Error{input} where that ends the child,
/// takes it more than five seconds and one for each MiB, or more than 1 GiB of memory beside the file's own size, and
/// where HDF5 refuses any of it, failures being what the library survives least, for a directory, device or pipe, and
/// with Links::inside for what leads out of the file, and for soft links. Error{resources} where no child can be made,
/// or where it gets too little CPU time. False: the file cannot be opened, which the caller will hear of in the
/// caller's own words. A file whose walk went well is walked again only if it has changed since, or less than two
/// seconds before it.
bool walk_in_child(const std::filesystem::path& path, Links links = Links::anywhere);

/// Reads a file that only a process of its own may read: one with an old superblock, or strings of variable length. A
/// child walks it as above and then does `work` on it, under the same limits. Throws what walk_in_child throws, and
/// Error{input} or Error{resources} where `work` does, and Error{interrupted}, once the child has ended, where
/// `interrupted` says so. Only files that `work` writes outlive the child.
void work_in_child(const std::filesystem::path& path, const std::function<void(const hdf5::File&)>& work,
                   const std::function<bool()>& interrupted);

/// For a file that this process has just written itself, in a folder where no other may write: walk_in_child takes it
/// as walked until it changes.
void need_no_walk(const std::filesystem::path& path);

/// Many files that one thread is going to open in this order: as many children as there are cores, at most sixteen,
/// walk ahead of it.
class WalksAhead {
 public:
  explicit WalksAhead(std::vector<std::filesystem::path> files);
  WalksAhead(const WalksAhead&) = delete;
  WalksAhead& operator=(const WalksAhead&) = delete;
  /// Children that still walk are ended.
  ~WalksAhead();
  /// To be called before each file is opened, which walk_in_child then finds walked. Throws nothing of a walk that
  /// ended badly: walk_in_child repeats it, and says what is wrong.
  void go_on();

 private:
  class Child;
  std::vector<std::filesystem::path> files_;
  std::size_t opened_ = 0, begun_ = 0;
  std::list<std::unique_ptr<Child>> children_;
};

}  // namespace kvreplay
