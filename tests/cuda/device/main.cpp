// The suites over the CUDA backend on a real device. Without one they are skipped: exit code 4, and the driver's
// reason.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/tested_backend.h"

int main(int count, char** arguments) {
  setenv("KVREPLAY_TEST_BACKEND", "cuda", 1);
  testing::InitGoogleTest(&count, arguments);
  if (!testing::GTEST_FLAG(list_tests)) {
    try {
      kvreplay::tested_backend(1);
    } catch (const kvreplay::Error& error) {
      std::printf("skipped: %s\n", error.what());
      return error.exit_code();
    }
  }
  return RUN_ALL_TESTS();
}
