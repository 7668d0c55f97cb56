// A folder of its own for each test, and small traces in it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace kvreplay {

inline std::string content(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

class TraceFiles : public ::testing::Test {
 protected:
  TraceFiles() {
    const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
    std::string name = std::string(test.test_suite_name()) + "." + test.name() + "." + std::to_string(::getpid());
    for (char& letter : name)
      if (letter == '/') letter = '-';
    folder_ = std::filesystem::temp_directory_path() / name;
    std::filesystem::create_directories(folder_);
  }
  ~TraceFiles() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path file(const std::string& name) const { return folder_ / name; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::filesystem::path folder_;
};

}  // namespace kvreplay
