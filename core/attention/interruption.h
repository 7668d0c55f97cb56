// A long call that ends early, because its caller wants it to.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>

namespace kvreplay {

/// Asks the caller while a call runs on several threads: every 20 ms, and from the thread that called.
class Interruption {
 public:
  /// While it is alive `interruption` asks `wanted`, which may be empty.
  class Asking {
   public:
    /// `where`: of the error.
    Asking(Interruption& interruption, const std::function<bool()>& wanted, std::string where);
    Asking(const Asking&) = delete;
    Asking& operator=(const Asking&) = delete;
    ~Asking();

   private:
    Interruption& interruption_;
  };

  /// Of any thread, between two pieces of its work: whether the rest is to be left undone.
  bool ended();
  /// After such work. Throws Error{interrupted} where some of it was left undone.
  void require_all_done() const;

 private:
  std::function<bool()> wanted_;
  std::string where_;
  std::chrono::steady_clock::time_point asked_;
  std::atomic<bool> ended_ = false;
};

}  // namespace kvreplay
