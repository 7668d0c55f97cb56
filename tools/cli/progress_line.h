// One line on stderr that tells how far the work is, at what rate, and how long it will go on.
#pragma once

#include <chrono>
#include <string_view>

namespace kvreplay {

class Arguments;

class ProgressLine {
 public:
  /// Of a command with progress_option: auto (stderr is a terminal), always or never; --quiet is never. Where stderr is
  /// no terminal the line is not redrawn but written anew every few seconds.
  explicit ProgressLine(const Arguments& arguments);
  /// Wipes the line, so that what follows starts on a clean one.
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// `share` of all work is done, 0 ... 1; `what` says what is being worked on.
  void show(double share, std::string_view what);

 private:
  using Clock = std::chrono::steady_clock;
  const bool terminal_;
  const bool shown_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_ = start_;
};

}  // namespace kvreplay
