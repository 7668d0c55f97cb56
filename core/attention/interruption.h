// Early end of long backend calls, at the caller's request.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

namespace kvreplay {

/// Polls the caller during calls that run on several threads: every 20 ms, from the calling thread.
class Interruption {
 public:
  /// Polls `wanted` (may be empty) until its destruction.
  class Asking {
   public:
    /// `where`: location named in the error.
    Asking(Interruption& interruption, const std::function<bool()>& wanted, std::string where);
    Asking(const Asking&) = delete;
    Asking& operator=(const Asking&) = delete;
    ~Asking();

   private:
    Interruption& interruption_;
  };

  /// Called by any thread between two pieces of its work: whether to skip the rest.
  bool ended();
  /// Called after the work. Throws Error{interrupted} if some of it was skipped.
  void require_all_done() const;
  /// Between calls, from the calling thread: polls at once, and throws Error{interrupted}.
  void poll();

 private:
  std::function<bool()> wanted_;
  std::string where_;
  std::thread::id caller_;
  std::chrono::steady_clock::time_point asked_;
  std::atomic<bool> ended_ = false;
};

}  // namespace kvreplay
