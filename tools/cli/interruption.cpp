#include "interruption.h"

#include <atomic>
#include <csignal>

namespace kvreplay {
namespace {

std::atomic<bool> signalled = false;
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

}  // namespace

void heed_interruptions() {
  struct sigaction action = {};
  action.sa_handler = [](int) { signalled = true; };
  action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return signalled; }

}  // namespace kvreplay
