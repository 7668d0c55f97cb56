#include "hdf5/child_walk.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <hdf5.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "error.h"
#include "hdf5/hdf5.h"
#include "open_file.h"

namespace kvreplay {
namespace {

using hdf5::Handle;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
/// Datasets that are no larger are read: what a reader takes in whole.
constexpr std::uint64_t small = std::uint64_t{1} << 16;
constexpr std::size_t longest_refusal = 4096;
/// Each may take 1 GiB, and as much as its file is long.
constexpr unsigned most_children = 16;
constexpr int refused = 2, out_of_memory = 3, unopened = 4, no_room = 5;  // exit codes of the child
using Work = std::function<void(const hdf5::File&)>;

/// What the child knows.
struct Walk {
  std::string file;
  hsize_t length;  // of the file
  int told;        // where a refusal is written to: its pieces, separated by NULs
  Links links;
  std::string at = "/";
  std::set<std::uint64_t> visited = {};
};

herr_t is_about_memory(unsigned, const H5E_error2_t* error, void* found) {
  if (error->min_num == H5E_NOSPACE || error->min_num == H5E_CANTALLOC) *static_cast<bool*>(found) = true;
  return 0;
}

/// Ends the child with what its parent throws.
[[noreturn]] void refuse(const Walk& walk, const Error& error) {
  std::string text;
  // Shorter than a pipe is deep, also where names have many thousand bytes.
  for (const std::string* piece : {&error.where(), &error.problem(), &error.expected(), &error.found()})
    text += piece->substr(0, longest_refusal / 4 - 1) + '\0';
  const ssize_t written = ::write(walk.told, text.data(), text.size());
  ::_exit(written <= 0 ? EXIT_FAILURE : error.refusal() == Refusal::resources ? no_room : refused);
}

[[noreturn]] void refuse(const Walk& walk, const std::string& what) {
  refuse(walk, Error{Refusal::input, walk.file + ":" + walk.at, what});
}

/// What HDF5 refuses ends the walk: on its way out of a failure it frees what it has not set (1.10.8, links of a dense
/// group), so nobody should try again.
void require(hid_t status, const Walk& walk, const char* what) {
  if (status >= 0) return;
  bool memory = false;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, is_about_memory, &memory);
  if (memory) ::_exit(out_of_memory);
  refuse(walk, hdf5::failure({}, what).problem());
}

/// HDF5 (1.10.8, 1.14.4, 2.0.0) reads on behind elements of which fewer bytes are stored.
void require_size(hsize_t expected, hsize_t stored, const Walk& walk) {
  if (stored != expected) refuse(walk, fmt::format("size: expected {} bytes, found {} bytes", expected, stored));
}

std::vector<hsize_t> extent(hid_t space) {
  const int rank = H5Sget_simple_extent_ndims(space);
  std::vector<hsize_t> shape(static_cast<std::size_t>(std::max(rank, 0)));
  if (rank > 0) H5Sget_simple_extent_dims(space, shape.data(), nullptr);
  return shape;
}

/// The bytes of all elements of a flat type; 0: none, or more than `small`.
std::size_t few_bytes(hid_t space, const hdf5::Type& type) {
  if (!type.is_flat()) return 0;
  const hssize_t count = H5Sget_simple_extent_npoints(space);
  const std::size_t size = type.bytes();
  if (count <= 0 || size == 0 || static_cast<std::uint64_t>(count) > small / size) return 0;
  return static_cast<std::size_t>(count) * size;
}

herr_t walk_attribute(hid_t object, const char* name, const H5A_info_t*, void* walking) {
  Walk& walk = *static_cast<Walk*>(walking);
  const std::string object_at = std::exchange(walk.at, walk.at + "@" + name);
  const Handle attribute{H5Aopen(object, name, H5P_DEFAULT), H5Aclose};
  require(attribute.id(), walk, "cannot be opened");
  const hdf5::Type type{H5Aget_type(attribute.id()), H5Tclose};
  const Handle space{H5Aget_space(attribute.id()), H5Sclose};
  require(type.id(), walk, "has no type");
  require(space.id(), walk, "has no shape");
  std::vector<char> bytes(few_bytes(space.id(), type));
  if (!bytes.empty()) require(H5Aread(attribute.id(), type.id(), bytes.data()), walk, "cannot be read");
  walk.at = object_at;
  return 0;
}

/// What stands between a dataset's elements and the file.
struct Filters {
  std::optional<unsigned> deflate;  // its place among them
  bool known = true;                // all are deflate, once, or shuffle
  bool at_edges = true;             // also of chunks that reach beyond the shape
};

Filters filters_of(hid_t creation) {
  Filters filters;
  unsigned options = 0;
  if (H5Pget_layout(creation) == H5D_CHUNKED && H5Pget_chunk_opts(creation, &options) >= 0)
    filters.at_edges = (options & H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS) == 0;
  const int count = std::max(H5Pget_nfilters(creation), 0);
  for (unsigned place = 0; place < static_cast<unsigned>(count); ++place) {
    unsigned flags = 0, settings = 0;
    std::size_t values = 0;
    const H5Z_filter_t filter = H5Pget_filter2(creation, place, &flags, &values, nullptr, 0, nullptr, &settings);
    if (filter == H5Z_FILTER_DEFLATE && !filters.deflate)
      filters.deflate = place;
    else if (filter != H5Z_FILTER_SHUFFLE)
      filters.known = false;
  }
  return filters;
}

/// How many bytes deflated ones become; counted as far as `most` + 1.
hsize_t inflated(std::vector<Bytef>& deflated, hsize_t most) {
  z_stream stream{};
  if (inflateInit(&stream) != Z_OK) ::_exit(out_of_memory);
  stream.next_in = deflated.data();
  stream.avail_in = static_cast<uInt>(deflated.size());
  std::vector<Bytef> some(small);
  int status = Z_OK;
  while (status == Z_OK && stream.total_out <= most) {
    stream.next_out = some.data();
    stream.avail_out = static_cast<uInt>(some.size());
    status = inflate(&stream, Z_NO_FLUSH);
  }
  inflateEnd(&stream);
  return std::min<hsize_t>(stream.total_out, most + 1);
}

/// Where each chunk lies, so that their index is read on the way, and whether each holds all its elements, of which one
/// has so many bytes.
void walk_chunks(hid_t dataset, hid_t space, const std::vector<hsize_t>& shape, const std::vector<hsize_t>& chunk,
                 std::size_t element, const Filters& filters, const Walk& walk) {
  if (hdf5::elements(shape) == 0) return;
  hdf5::Shape chunks;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) chunks.push_back((shape[axis] - 1) / chunk[axis] + 1);
  if (hdf5::elements(chunks) > walk.length)
    refuse(walk, fmt::format("chunks: expected at most one for each of {} bytes, found {}", walk.length,
                             hdf5::to_string(chunks)));
  hsize_t written = 0;
  require(H5Dget_num_chunks(dataset, space, &written), walk, "has chunks that cannot be counted");
  const hsize_t whole = hdf5::bytes(chunk, element);
  std::vector<hsize_t> at(shape.size(), 0);
  for (std::size_t axis = 0; axis < at.size();) {
    hsize_t stored = 0;
    if (H5Dget_chunk_storage_size(dataset, at.data(), &stored) < 0) H5Eclear2(H5E_DEFAULT);  // none is stored there
    if (stored > walk.length) require_size(walk.length, stored, walk);
    if (stored > 0 && filters.deflate) {
      std::uint32_t left_out = 0;
      std::vector<Bytef> bytes(stored);
      require(H5Dread_chunk(dataset, H5P_DEFAULT, at.data(), &left_out, bytes.data()), walk, "cannot be read");
      bool plain = (left_out >> *filters.deflate & 1) != 0;
      for (std::size_t a = 0; a < at.size(); ++a) plain |= !filters.at_edges && at[a] + chunk[a] > shape[a];
      require_size(whole, plain ? stored : inflated(bytes, whole), walk);
    } else if (stored > 0) {
      require_size(whole, stored, walk);
    }
    for (axis = 0; axis < at.size(); ++axis) {
      at[axis] += chunk[axis];
      if (at[axis] < shape[axis]) break;
      at[axis] = 0;
    }
  }
}

void walk_dataset(hid_t dataset, const Walk& walk) {
  const hdf5::Type type{H5Dget_type(dataset), H5Tclose};
  const Handle space{H5Dget_space(dataset), H5Sclose}, creation{H5Dget_create_plist(dataset), H5Pclose};
  require(type.id(), walk, "has no type");
  require(space.id(), walk, "has no shape");
  require(creation.id(), walk, "has no layout");
  const H5D_layout_t layout = H5Pget_layout(creation.id());
  const Filters filters = filters_of(creation.id());
  const bool elsewhere = layout == H5D_VIRTUAL || H5Pget_external_count(creation.id()) > 0;
  if (elsewhere && walk.links == Links::inside) refuse(walk, "layout: expected stored in this file, found other files");
  // Neither other files nor filters that are found on the machine are a reader's business, nor elements of any length.
  if (elsewhere || !filters.known || !type.is_flat()) return;
  const std::vector<hsize_t> shape = extent(space.id());
  const std::size_t element = type.bytes();
  if (layout == H5D_CHUNKED) {
    std::vector<hsize_t> chunk(shape.size());
    require(H5Pget_chunk(creation.id(), static_cast<int>(chunk.size()), chunk.data()), walk, "has no chunks");
    walk_chunks(dataset, space.id(), shape, chunk, element, filters, walk);
  } else if (layout == H5D_COMPACT) {
    if (H5Sget_simple_extent_type(space.id()) != H5S_NULL)
      require_size(hdf5::bytes(shape, element), H5Dget_storage_size(dataset), walk);
  } else {
    H5Dget_offset(dataset);  // fails where nothing is allocated
    H5Eclear2(H5E_DEFAULT);
  }
  std::vector<char> bytes(few_bytes(space.id(), type));
  if (!bytes.empty())
    require(H5Dread(dataset, type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()), walk, "cannot be read");
}

herr_t walk_link(hid_t group, const char* name, const H5L_info_t* link, void* walking);

void walk_object(hid_t object, Walk& walk) {
  hdf5::Looks info;
  require(hdf5::look_up(object, info), walk, "cannot be looked up");
  if (!walk.visited.insert(info.number).second) return;
  hsize_t next = 0;
  require(H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_INC, &next, walk_attribute, &walk), walk,
          "has attributes that cannot be listed");
  next = 0;
  if (info.type == H5O_TYPE_DATASET) walk_dataset(object, walk);
  if (info.type == H5O_TYPE_GROUP)
    require(H5Literate(object, H5_INDEX_NAME, H5_ITER_INC, &next, walk_link, &walk), walk, "cannot be listed");
}

herr_t walk_link(hid_t group, const char* name, const H5L_info_t* link, void* walking) {
  Walk& walk = *static_cast<Walk*>(walking);
  if (link->type != H5L_TYPE_HARD && walk.links == Links::anywhere) return 0;
  const std::string group_at = std::exchange(walk.at, walk.at + (walk.at == "/" ? "" : "/") + name);
  if (link->type != H5L_TYPE_HARD)
    refuse(walk, fmt::format("link: expected an object of this file, found {}",
                             link->type == H5L_TYPE_SOFT ? "a soft link" : "a link out of it"));
  const Handle object{H5Oopen(group, name, H5P_DEFAULT), H5Oclose};
  require(object.id(), walk, "cannot be opened");
  walk_object(object.id(), walk);
  walk.at = group_at;
  return 0;
}

std::uint64_t address_space() {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

void limit(decltype(RLIMIT_CPU) resource, std::uint64_t most) {
  rlimit now{};
  ::getrlimit(resource, &now);
  now.rlim_cur = std::min<rlim_t>(now.rlim_max, most);
  ::setrlimit(resource, &now);
}

/// Never returns; the parent's files, handlers and threads stay its own.
[[noreturn]] void be_the_child(pid_t parent, const std::filesystem::path& path, Walk walk, const Work& work,
                               std::uint64_t seconds, std::uint64_t memory) {
  // Locks of the parent are its own, too: it must not outlive a parent that is killed.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGALRM, SIGXCPU})
    std::signal(signal, SIG_DFL);
  std::signal(SIGINT, SIG_IGN);  // meant for the parent
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_CPU, seconds);
  limit(RLIMIT_AS, address_space() + memory);
  ::alarm(static_cast<unsigned>(seconds * 10));                // a disk may be slow
  walk.told = ::fcntl(walk.told, F_DUPFD, STDERR_FILENO + 1);  // the caller's may have been closed, and be it
  if (const int nowhere = ::open("/dev/null", O_WRONLY); nowhere >= 0) {
    ::dup2(nowhere, STDOUT_FILENO);
    ::dup2(nowhere, STDERR_FILENO);
  }
  // What the library frees without having set it, or reads, it must not find set by chance.
  H5set_free_list_limits(0, 0, 0, 0, 0, 0);
#ifdef M_PERTURB
  ::mallopt(M_PERTURB, 0x5a);
#endif
  try {
    const hdf5::File file = hdf5::File::open_walked(path);
    walk_object(file.id(), walk);
    try {
      if (work) work(file);
    } catch (const Error& error) {
      refuse(walk, error);
    }
  } catch (const Error&) {
    ::_exit(unopened);
  } catch (const std::bad_alloc&) {
    ::_exit(out_of_memory);
  }
  ::_exit(0);
}

/// Both ends of a pipe.
struct Pipe {
  Pipe() {
    if (::pipe2(ends, O_CLOEXEC) < 0) ends[0] = ends[1] = -1;
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    close(0);
    close(1);
  }
  void close(int end) {
    if (ends[end] >= 0) ::close(std::exchange(ends[end], -1));
  }
  int ends[2];
};

/// A file before its walk.
struct FoundFile {
  struct stat looks;
  std::time_t when;  // the clock before it was looked at

  bool is_settled() const { return looks.st_ctim.tv_sec + 1 < when; }
};

/// The files whose walk went well, as they were: each is walked once for a process, and once more where a second
/// caller wants more of its links.
class Walked {
 public:
  bool holds(const struct stat& file, Links links) {
    const std::scoped_lock lock(mutex_);
    const auto found = states_.find(state(file));
    return found != states_.end() && (links == Links::anywhere || found->second == Links::inside);
  }
  void add(const struct stat& file, Links links) {
    const std::scoped_lock lock(mutex_);
    Links& known = states_.try_emplace(state(file), links).first->second;
    if (links == Links::inside) known = links;
  }

 private:
  using State = std::tuple<dev_t, ino_t, off_t, time_t, long>;
  static State state(const struct stat& file) {
    return {file.st_dev, file.st_ino, file.st_size, file.st_ctim.tv_sec, file.st_ctim.tv_nsec};
  }
  std::mutex mutex_;
  std::map<State, Links> states_;
};

Walked& walked() {
  static Walked all;
  return all;
}

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
}

/// A process that walks a file, ended with this at the latest.
class WalkingChild {
 public:
  WalkingChild(const std::filesystem::path& path, const FoundFile& file, Links links, const Work& work = {})
      : path_(path), before_(file), links_(links) {
    const auto length = static_cast<std::uint64_t>(file.looks.st_size);
    seconds_ = 5 + length / mib;
    memory_ = 1024 * mib + length;
    const pid_t parent = ::getpid();
    child_ = pipe_.ends[0] < 0 ? -1 : ::fork();
    if (child_ < 0)
      throw Error{Refusal::resources, path.string(), fmt::format("no process to check it: {}", std::strerror(errno))};
    if (child_ == 0)
      be_the_child(parent, path, {.file = path.string(), .length = length, .told = pipe_.ends[1], .links = links}, work,
                   seconds_, memory_);
    pipe_.close(1);
  }
  WalkingChild(const WalkingChild&) = delete;
  WalkingChild& operator=(const WalkingChild&) = delete;
  ~WalkingChild() {
    if (child_ < 0) return;
    ::kill(child_, SIGKILL);
    wait(0);
  }

  bool has_ended() { return child_ < 0 || wait(WNOHANG) != 0; }
  /// Waits for its end; returns and throws as walk_in_child does.
  bool finish() {
    if (child_ >= 0) wait(0);
    if (lost_ != 0)
      throw Error{Refusal::resources, path_.string(), fmt::format("its check was lost: {}", std::strerror(lost_))};
    const auto damaged = [&](const std::string& found) {
      throw Error{Refusal::input, path_.string(), "damaged", "an HDF5 file that the library can walk", found};
    };
    if (WIFSIGNALED(status_)) {
      const int signal = WTERMSIG(status_);
      // The file keeps nobody waiting: a child that computes without end is stopped by SIGXCPU before.
      if (signal == SIGALRM)
        throw Error{
            Refusal::resources, path_.string(),
            fmt::format("not checked: its check used {:.1f} of {} seconds of CPU time in the {} seconds that it "
                        "may take; run this again when the machine and its disk are less busy",
                        seconds(usage_.ru_utime) + seconds(usage_.ru_stime), seconds_, seconds_ * 10)};
      if (signal == SIGXCPU) damaged(fmt::format("no end in {} seconds", seconds_));
      damaged(fmt::format("it ends in {}", ::strsignal(signal)));
    }
    const int code = WEXITSTATUS(status_);
    if (code == out_of_memory) damaged(fmt::format("more than {} MiB of memory asked for", memory_ / mib));
    if (code == refused || code == no_room) {
      std::string told(longest_refusal, '\0');
      told.resize(static_cast<std::size_t>(std::max<ssize_t>(::read(pipe_.ends[0], told.data(), told.size()), 0)));
      std::string pieces[4];
      std::istringstream rest(told);
      for (std::string& piece : pieces) std::getline(rest, piece, '\0');
      throw Error{code == no_room ? Refusal::resources : Refusal::input, pieces[0], pieces[1], pieces[2], pieces[3]};
    }
    if (code == unopened) return false;
    if (code != 0) damaged(fmt::format("it ends with exit code {}", code));
    // Not a file that had just changed: another change might bear the same time.
    if (before_.is_settled()) walked().add(before_.looks, links_);
    return true;
  }

 private:
  pid_t wait(int options) {
    pid_t ended = 0;
    while ((ended = ::wait4(child_, &status_, options, &usage_)) < 0 && errno == EINTR) {
    }
    if (ended != 0) child_ = -1;
    if (ended < 0) lost_ = errno;
    return ended;
  }

  std::filesystem::path path_;
  FoundFile before_;
  Links links_;
  std::uint64_t seconds_ = 0, memory_ = 0;  // at most
  Pipe pipe_;
  pid_t child_ = -1;
  int status_ = 0, lost_ = 0;  // how it ended, or why nobody knows
  rusage usage_{};
};

/// Empty where there is nothing to walk: what is walked already, and what cannot be asked about, of which whoever opens
/// it says what is wrong.
std::optional<FoundFile> unwalked(const std::filesystem::path& path, Links links) {
  FoundFile file{{}, std::time(nullptr)};
  if (::stat(path.c_str(), &file.looks) != 0 || walked().holds(file.looks, links)) return std::nullopt;
  require_file(file.looks, path.string());
  return file;
}

}  // namespace

bool walk_in_child(const std::filesystem::path& path, Links links) {
  if (const auto file = unwalked(path, links)) return WalkingChild(path, *file, links).finish();
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

void work_in_child(const std::filesystem::path& path, const Work& work, const std::function<bool()>& interrupted) {
  FoundFile file{{}, std::time(nullptr)};
  if (::stat(path.c_str(), &file.looks) != 0)
    throw Error{Refusal::input, path.string(), fmt::format("cannot be opened: {}", std::strerror(errno))};
  require_file(file.looks, path.string());
  WalkingChild child(path, file, Links::anywhere, work);
  while (!child.has_ended()) {
    if (interrupted()) throw Error{Refusal::interrupted, path.string(), "interrupted"};
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (!child.finish())
    throw Error{Refusal::input, path.string(), "cannot be opened", "an HDF5 file", "another, or a damaged one"};
}

void need_no_walk(const std::filesystem::path& path) {
  struct stat file{};
  if (::stat(path.c_str(), &file) == 0) walked().add(file, Links::inside);
}

class WalksAhead::Child : public WalkingChild {
 public:
  Child(std::size_t file_number, const std::filesystem::path& path, const FoundFile& file)
      : WalkingChild(path, file, Links::anywhere), number(file_number) {}
  const std::size_t number;  // of its file
};

WalksAhead::WalksAhead(std::vector<std::filesystem::path> files) : files_(std::move(files)) {}

WalksAhead::~WalksAhead() = default;

void WalksAhead::go_on() {
  const std::size_t now = opened_++;
  const auto gather = [this](auto which) {
    for (auto child = children_.begin(); child != children_.end();) {
      if (!which(**child)) {
        ++child;
        continue;
      }
      try {
        (*child)->finish();
      } catch (const Error&) {
        // Said when its file is opened.
      }
      child = children_.erase(child);
    }
  };
  gather([](Child& child) { return child.has_ended(); });
  begun_ = std::max(begun_, now);
  try {
    for (; begun_ < files_.size() &&
           children_.size() < std::clamp(std::thread::hardware_concurrency(), 1U, most_children);
         ++begun_)
      if (const auto file = unwalked(files_[begun_], Links::anywhere); file && file->is_settled())
        children_.push_back(std::make_unique<Child>(begun_, files_[begun_], *file));
  } catch (const Error&) {
    // No process more, or no file: said when it is opened.
  }
  gather([now](const Child& child) { return child.number == now; });
}

}  // namespace kvreplay
