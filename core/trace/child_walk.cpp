#include "trace/child_walk.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <hdf5.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "error.h"
#include "trace/hdf5.h"

namespace kvreplay {
namespace {

using hdf5::Handle;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
/// Datasets that are no larger are read: what a reader takes in whole.
constexpr std::uint64_t small = std::uint64_t{1} << 16;
constexpr int out_of_memory = 1;

herr_t is_about_memory(unsigned, const H5E_error2_t* error, void* found) {
  if (error->min_num == H5E_NOSPACE || error->min_num == H5E_CANTALLOC) *static_cast<bool*>(found) = true;
  return 0;
}

/// What HDF5 refuses is passed over, unless it was the memory that did not suffice.
bool good(hid_t status) {
  if (status >= 0) return true;
  bool memory = false;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, is_about_memory, &memory);
  H5Eclear2(H5E_DEFAULT);
  if (memory) ::_exit(out_of_memory);
  return false;
}

bool has_pointers(hid_t type) { return H5Tdetect_class(type, H5T_VLEN) != 0 || H5Tis_variable_str(type) != 0; }

std::vector<hsize_t> extent(hid_t space) {
  const int rank = H5Sget_simple_extent_ndims(space);
  std::vector<hsize_t> shape(static_cast<std::size_t>(std::max(rank, 0)));
  if (rank > 0) H5Sget_simple_extent_dims(space, shape.data(), nullptr);
  return shape;
}

/// The bytes of all elements of a type without pointers; 0: none, or more than `small`.
std::size_t few_bytes(hid_t space, hid_t type) {
  if (has_pointers(type)) return 0;
  const hssize_t count = H5Sget_simple_extent_npoints(space);
  const std::size_t size = H5Tget_size(type);
  if (count <= 0 || size == 0 || static_cast<std::uint64_t>(count) > small / size) return 0;
  return static_cast<std::size_t>(count) * size;
}

herr_t walk_attribute(hid_t object, const char* name, const H5A_info_t*, void*) {
  const Handle attribute{H5Aopen(object, name, H5P_DEFAULT), H5Aclose};
  if (!good(attribute.id())) return 0;
  const Handle type{H5Aget_type(attribute.id()), H5Tclose}, space{H5Aget_space(attribute.id()), H5Sclose};
  if (!good(type.id()) || !good(space.id())) return 0;
  std::vector<char> bytes(few_bytes(space.id(), type.id()));
  if (!bytes.empty()) good(H5Aread(attribute.id(), type.id(), bytes.data()));
  return 0;
}

/// Where each chunk lies: the index of chunks is read on the way. More chunks than the file has bytes are not walked:
/// no reader believes such a shape.
void walk_chunks(hid_t dataset, const std::vector<hsize_t>& shape, const std::vector<hsize_t>& chunk, hsize_t length) {
  hdf5::Shape chunks;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) chunks.push_back((shape[axis] - 1) / chunk[axis] + 1);
  if (hdf5::elements(shape) == 0 || hdf5::elements(chunks) > length) return;
  std::vector<hsize_t> at(shape.size(), 0);
  for (std::size_t axis = 0; axis < at.size();) {
    hsize_t bytes = 0;
    if (!good(H5Dget_chunk_storage_size(dataset, at.data(), &bytes))) return;
    for (axis = 0; axis < at.size(); ++axis) {
      at[axis] += chunk[axis];
      if (at[axis] < shape[axis]) break;
      at[axis] = 0;
    }
  }
}

void walk_dataset(hid_t dataset, hsize_t length) {
  const Handle type{H5Dget_type(dataset), H5Tclose}, space{H5Dget_space(dataset), H5Sclose},
      creation{H5Dget_create_plist(dataset), H5Pclose};
  if (!good(type.id()) || !good(space.id()) || !good(creation.id())) return;
  const H5D_layout_t layout = H5Pget_layout(creation.id());
  // Neither other files nor filters that are found on the machine are a reader's business.
  if (layout == H5D_VIRTUAL || H5Pget_external_count(creation.id()) > 0) return;
  const std::vector<hsize_t> shape = extent(space.id());
  if (layout == H5D_CHUNKED) {
    std::vector<hsize_t> chunk(shape.size());
    if (good(H5Pget_chunk(creation.id(), static_cast<int>(chunk.size()), chunk.data())))
      walk_chunks(dataset, shape, chunk, length);
  } else {
    H5Dget_offset(dataset);
    H5Eclear2(H5E_DEFAULT);
  }
  for (int f = 0; f < H5Pget_nfilters(creation.id()); ++f) {
    unsigned flags = 0, settings = 0;
    std::size_t values = 0;
    const H5Z_filter_t filter =
        H5Pget_filter2(creation.id(), static_cast<unsigned>(f), &flags, &values, nullptr, 0, nullptr, &settings);
    if (filter != H5Z_FILTER_DEFLATE && filter != H5Z_FILTER_SHUFFLE) return;
  }
  std::vector<char> bytes(few_bytes(space.id(), type.id()));
  if (!bytes.empty()) good(H5Dread(dataset, type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()));
}

struct Visited {
  std::set<std::uint64_t> objects = {};
  hsize_t length;  // of the file
};

herr_t walk_link(hid_t group, const char* name, const H5L_info_t* link, void* visited);

void walk_object(hid_t object, Visited& visited) {
  hdf5::Looks info;
  if (!good(hdf5::look_up(object, info)) || !visited.objects.insert(info.number).second) return;
  hsize_t next = 0;
  good(H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_INC, &next, walk_attribute, nullptr));
  next = 0;
  if (info.type == H5O_TYPE_DATASET) walk_dataset(object, visited.length);
  if (info.type == H5O_TYPE_GROUP) good(H5Literate(object, H5_INDEX_NAME, H5_ITER_INC, &next, walk_link, &visited));
}

herr_t walk_link(hid_t group, const char* name, const H5L_info_t* link, void* visited) {
  if (link->type != H5L_TYPE_HARD) return 0;
  const Handle object{H5Oopen(group, name, H5P_DEFAULT), H5Oclose};
  if (good(object.id())) walk_object(object.id(), *static_cast<Visited*>(visited));
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
[[noreturn]] void be_the_child(const std::filesystem::path& path, std::uint64_t length, std::uint64_t seconds,
                               std::uint64_t memory) {
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGALRM, SIGXCPU})
    std::signal(signal, SIG_DFL);
  std::signal(SIGINT, SIG_IGN);  // meant for the parent
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_CPU, seconds);
  limit(RLIMIT_AS, address_space() + memory);
  ::alarm(static_cast<unsigned>(seconds * 10));  // a disk may be slow
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
    Visited visited{.length = length};
    walk_object(file.id(), visited);
  } catch (const Error&) {
    // HDF5 refuses the file: the parent will say so.
  } catch (const std::bad_alloc&) {
    ::_exit(out_of_memory);
  }
  ::_exit(0);
}

}  // namespace

void walk_in_child(const std::filesystem::path& path) {
  std::error_code none;
  const std::uintmax_t length = std::filesystem::file_size(path, none);
  if (none) return;  // whoever opens it says what is wrong
  const std::uint64_t seconds = 5 + length / mib, memory = 1024 * mib + length;
  const pid_t child = ::fork();
  if (child < 0)
    throw Error{Refusal::resources, path.string(), fmt::format("no process to check it: {}", std::strerror(errno))};
  if (child == 0) be_the_child(path, length, seconds, memory);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0)
    if (errno != EINTR)
      throw Error{Refusal::resources, path.string(), fmt::format("its check was lost: {}", std::strerror(errno))};
  const auto damaged = [&](const std::string& found) {
    throw Error{Refusal::input, path.string(), "damaged", "an HDF5 file that the library can walk", found};
  };
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    if (signal == SIGXCPU || signal == SIGALRM)
      damaged(fmt::format("no end in {} seconds", signal == SIGALRM ? seconds * 10 : seconds));
    damaged(fmt::format("it ends in {}", ::strsignal(signal)));
  }
  if (WEXITSTATUS(status) == out_of_memory) damaged(fmt::format("more than {} MiB of memory asked for", memory / mib));
  if (WEXITSTATUS(status) != 0) damaged(fmt::format("it ends with exit code {}", WEXITSTATUS(status)));
}

}  // namespace kvreplay
