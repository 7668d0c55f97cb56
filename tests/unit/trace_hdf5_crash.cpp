#include <gtest/gtest.h>
#include <hdf5.h>

#include <csignal>

#include "hdf5/hdf5.h"
#include "hdf5/hdf5_crash.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

using hdf5::File;

class Hdf5Crash : public TraceFiles, public testing::WithParamInterface<int> {};

TEST_P(Hdf5Crash, WithinTheLibraryRefusesTheFile) {
  File::create(file("a.h5")).create_group("group");
  const auto crash = [&] {
    hdf5::refuse_crashes();
    const File opened = File::open(file("a.h5"));
    int signal = GetParam();
    const auto raise = [](hid_t, const char*, const H5L_info_t*, void* number) -> herr_t {
      return std::raise(*static_cast<int*>(number));
    };
    H5Literate(opened.id(), H5_INDEX_NAME, H5_ITER_INC, nullptr, raise, &signal);
  };
  EXPECT_EXIT(crash(), testing::ExitedWithCode(3),
              "^kvreplay: [^ ]*a.h5: damaged: expected .*, found it ends in [A-Z]");
}

TEST_P(Hdf5Crash, ElsewhereStaysACrash) {
  const auto crash = [] {
    hdf5::refuse_crashes();
    std::raise(GetParam());
  };
  EXPECT_EXIT(crash(), testing::KilledBySignal(GetParam()), "");
}

INSTANTIATE_TEST_SUITE_P(Signals, Hdf5Crash, testing::Values(SIGSEGV, SIGABRT, SIGFPE));

}  // namespace
}  // namespace kvreplay
