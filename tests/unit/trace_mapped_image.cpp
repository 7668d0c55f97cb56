#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>

#include "hdf5/hdf5.h"
#include "hdf5/mapped_image.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

std::string content(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void fill(hdf5::File& file) {
  for (int i = 0; i < 40; ++i) {
    hdf5::Group group = file.create_group("group " + std::to_string(i));
    group.write("numbers", std::vector<std::int32_t>(static_cast<std::size_t>(20'000 * (i % 5)), i));
    group.set_attribute("name", std::string_view("a text"));
  }
}

using MappedImages = TraceFiles;

TEST_F(MappedImages, TheFileIsTheOneThatHdf5WouldWrite) {
  hdf5::File plain = hdf5::File::create(file("plain.h5"));
  fill(plain);
  plain.close();

  MappedImage mapped(file("mapped.h5"));
  hdf5::File image_file = hdf5::File::create_in(mapped, "mapped");
  fill(image_file);
  image_file.close();
  EXPECT_FALSE(std::filesystem::exists(file("mapped.h5")));
  mapped.complete();
  mapped.finish();
  EXPECT_FALSE(std::filesystem::exists(file("mapped.h5.partial")));
  const std::string found = content(file("mapped.h5"));
  EXPECT_GT(found.size(), 5 * mib / 2);
  EXPECT_TRUE(found == content(file("plain.h5")));
}

TEST_F(MappedImages, NoChildWritesIntoIt) {
  MappedImage mapped(file("mapped.h5"));
  auto* bytes = static_cast<char*>(mapped.resize(mib));
  bytes[0] = 1;
  const pid_t child = ::fork();
  if (child == 0) {
    unsigned char resident = 0;
    ::_exit(::mincore(bytes, 1, &resident) == -1 && errno == ENOMEM ? 0 : 1);  // nothing is mapped there
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(MappedImages, WhatFindsNoRoomLiesInMemoryAndIsRefused) {
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{3 * mib, before.rlim_max};  // the headroom of PartialFile included
  {
    MappedImage mapped(file("mapped.h5"));
    ::setrlimit(RLIMIT_FSIZE, &small);
    auto* bytes = static_cast<char*>(mapped.resize(mib));
    std::memset(bytes, 1, mib);
    EXPECT_NO_THROW(mapped.require_room());
    for (int i = 2; i < 6; ++i) {
      bytes = static_cast<char*>(mapped.resize(static_cast<std::size_t>(i) * mib));
      std::memset(bytes + static_cast<std::size_t>(i - 1) * mib, i, mib);
    }
    for (int i = 1; i < 6; ++i) EXPECT_EQ(bytes[static_cast<std::size_t>(i) * mib - 1], i);
    try {
      mapped.complete();
      mapped.finish();
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::resources);
    }
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(std::filesystem::is_empty(folder()));
}

}  // namespace
}  // namespace kvreplay
