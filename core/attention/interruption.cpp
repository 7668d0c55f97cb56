#include "attention/interruption.h"

#include <utility>

#include "error.h"

namespace kvreplay {

Interruption::Asking::Asking(Interruption& interruption, const std::function<bool()>& wanted, std::string where)
    : interruption_(interruption) {
  interruption_.wanted_ = wanted;
  interruption_.where_ = std::move(where);
  interruption_.caller_ = std::this_thread::get_id();
  interruption_.asked_ = {};
  interruption_.ended_ = false;
}

Interruption::Asking::~Asking() {
  interruption_.wanted_ = nullptr;
  interruption_.ended_ = false;
}

bool Interruption::ended() {
  if (wanted_ && std::this_thread::get_id() == caller_) {
    constexpr std::chrono::milliseconds pause(20);
    if (const auto now = std::chrono::steady_clock::now(); now - asked_ >= pause) {
      asked_ = now;
      if (wanted_()) ended_ = true;
    }
  }
  return ended_.load(std::memory_order_relaxed);
}

void Interruption::poll() {
  if (wanted_ && wanted_()) ended_ = true;
  require_all_done();
}

void Interruption::require_all_done() const {
  if (ended_) throw Error{Refusal::interrupted, where_, "interrupted"};
}

}  // namespace kvreplay
