#include <fmt/format.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "hdf5/child_walk.h"
#include "hdf5/hdf5.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class ChildWalk : public TraceFiles {};

/// Where a file says so, chunks that reach beyond the shape are stored as they are.
TEST_F(ChildWalk, EdgesNeedNotBeDeflated) {
  std::vector<int> numbers(40);
  std::iota(numbers.begin(), numbers.end(), 0);
  {
    const hdf5::Handle access{H5Pcreate(H5P_FILE_ACCESS), H5Pclose};
    H5Pset_libver_bounds(access.id(), H5F_LIBVER_V110, H5F_LIBVER_V110);
    const hdf5::Handle made{H5Fcreate(file("a.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.id()), H5Fclose};
    const hdf5::Handle creation{H5Pcreate(H5P_DATASET_CREATE), H5Pclose};
    const hsize_t chunk[] = {5, 5};
    H5Pset_chunk(creation.id(), 2, chunk);
    H5Pset_deflate(creation.id(), 4);
    ASSERT_GE(H5Pset_chunk_opts(creation.id(), H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS), 0);
    const hdf5::Space space = hdf5::Space::of({8, 5});
    const hdf5::Handle edges{
        H5Dcreate2(made.id(), "edges", H5T_NATIVE_INT32, space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT),
        H5Dclose};
    ASSERT_GE(H5Dwrite(edges.id(), H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, numbers.data()), 0);
  }
  walk_in_child(file("a.h5"));
  EXPECT_EQ(hdf5::File::open(file("a.h5")).dataset("edges").values<std::int32_t>(), numbers);
}

/// A dataset of eight numbers; not whole: none of them is stored.
void write_eight(const std::filesystem::path& path, bool whole) {
  hdf5::File made = hdf5::File::create(path);
  hdf5::Dataset numbers = made.create_deflated("numbers", hdf5::Type::int32(), {8}, {8}, 4);
  const std::vector<std::int32_t> eight(8, 7);
  numbers.write(hdf5::Type::int32(), eight.data());
  const char none[] = {'\x78', '\x9c', '\x03', '\0', '\0', '\0', '\0', '\1'};  // zlib's nothing
  const hsize_t first = 0;
  if (!whole) {
    ASSERT_GE(H5Dwrite_chunk(numbers.id(), H5P_DEFAULT, 0, &first, sizeof none, none), 0);
  }
  made.close();
}

/// What a process wrote itself it need not walk, until somebody else writes to it.
TEST_F(ChildWalk, NoneOfAFileOfOnesOwnUntilItChanges) {
  write_eight(file("short.h5"), false);
  EXPECT_THROW(walk_in_child(file("short.h5")), Error);
  need_no_walk(file("short.h5"));
  EXPECT_NO_THROW(walk_in_child(file("short.h5")));
  std::ofstream(file("short.h5"), std::ios::app) << '.';
  EXPECT_THROW(walk_in_child(file("short.h5")), Error);
}

/// Whoever opens what is no file, or cannot be looked up, says so.
TEST_F(ChildWalk, NoneOfWhatCannotBeOpened) {
  std::filesystem::create_symlink(file("loop.h5"), file("loop.h5"));
  std::ofstream(file("text.h5")) << "no HDF5";
  for (const char* name : {"none.h5", "loop.h5", "text.h5"}) EXPECT_FALSE(walk_in_child(file(name))) << name;
  hdf5::File::create(file("a.h5")).close();
  EXPECT_TRUE(walk_in_child(file("a.h5")));
}

/// Links that lead elsewhere matter only to who may follow them, also where the file has been walked before.
TEST_F(ChildWalk, OutOfTheFile) {
  {
    const hdf5::File made = hdf5::File::create(file("a.h5"));
    ASSERT_GE(H5Lcreate_soft("/", made.id(), "itself", H5P_DEFAULT, H5P_DEFAULT), 0);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));  // until its walk is remembered
  EXPECT_NO_THROW(walk_in_child(file("a.h5")));
  for (int time = 0; time < 2; ++time) try {
      walk_in_child(file("a.h5"), Links::inside);
      ADD_FAILURE() << "a soft link";
    } catch (const Error& error) {
      EXPECT_EQ(error.what(),
                file("a.h5").string() + ":/itself: link: expected an object of this file, found a soft link");
    }
  EXPECT_NO_THROW(walk_in_child(file("a.h5")));
}

/// A child that was given no CPU time says nothing of its file.
TEST_F(ChildWalk, AnAlarmWithoutCpuTimeIsNoDamage) {
  {
    hdf5::File made = hdf5::File::create(file("a.h5"));
    for (int group = 0; group < 5'000; ++group) made.create_group(std::to_string(group));
  }
  std::jthread alarm([children = fmt::format("/proc/self/task/{}/children", ::gettid())](const std::stop_token& stop) {
    pid_t child = 0;
    while (!stop.stop_requested() && !(std::ifstream(children) >> child)) std::this_thread::yield();
    if (child > 0) ::kill(child, SIGALRM);
  });
  try {
    walk_in_child(file("a.h5"));
    ADD_FAILURE() << "walked before the alarm";
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::resources);
    const std::string said = error.what();
    EXPECT_TRUE(said.starts_with(file("a.h5").string() + ": not checked: its check used 0.")) << said;
    EXPECT_NE(said.find(" of 5 seconds of CPU time in the 50 seconds that it may take"), std::string::npos) << said;
  }
}

/// What is wrong with a file is said when it is opened, and nothing of the others.
TEST_F(ChildWalk, AheadOfManyFiles) {
  std::vector<std::filesystem::path> files;
  for (const char* name : {"0.h5", "1.h5", "none.h5", "2.h5", "text.h5", "short.h5", "3.h5", "4.h5", "5.h5"})
    files.push_back(file(name));
  for (const std::filesystem::path& path : files) {
    if (path.stem() == "none") continue;
    if (path.stem() == "text") {
      std::ofstream(path) << "no HDF5";
      continue;
    }
    write_eight(path, path.stem() != "short");
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));  // until they count as settled
  WalksAhead walks(files);
  for (const std::filesystem::path& path : files) {
    walks.go_on();
    const std::string name = path.stem().string();
    try {
      EXPECT_EQ(hdf5::File::open(path).dataset("numbers").values<std::int32_t>().size(), 8U);
      EXPECT_EQ(name.size(), 1U) << name;
    } catch (const Error& error) {
      EXPECT_GT(name.size(), 1U) << error.what();
      EXPECT_TRUE(error.where().starts_with(path.string())) << error.what();
    }
  }
  walks.go_on();  // there are no more
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
}

TEST_F(ChildWalk, ChildrenAheadEndWithTheirOwner) {
  hdf5::File::create(file("a.h5")).close();
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  {
    WalksAhead walks({file("none.h5"), file("a.h5")});
    walks.go_on();
    siginfo_t any{};
    EXPECT_EQ(::waitid(P_ALL, 0, &any, WEXITED | WNOHANG | WNOWAIT), 0);  // a child walks, or has just done so
  }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
}

}  // namespace
}  // namespace kvreplay
