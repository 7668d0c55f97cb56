#include "profile.h"

#include <atomic>
#include <utility>

namespace kvreplay {
namespace {

std::atomic<Profile*> current = nullptr;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

Profile::Profile() { current = this; }

Profile::~Profile() { current = nullptr; }

std::vector<ProfiledPiece> Profile::pieces() const {
  const std::lock_guard lock(adding_);
  return pieces_;
}

int Profile::thread_number() {
  // A thread keeps its number for as long as the profile exists.
  thread_local std::pair<const Profile*, int> numbered{nullptr, 0};
  if (numbered.first != this) {
    const std::lock_guard lock(adding_);
    numbered = {this, threads_++};
  }
  return numbered.second;
}

void Profile::add(ProfiledPiece piece) {
  const std::lock_guard lock(adding_);
  pieces_.push_back(std::move(piece));
}

Timed::Timed(Work work, std::string_view name) : profile_(current) {
  if (profile_ != nullptr)
    piece_ = {work, std::string(name), profile_->thread_number(), seconds_since(profile_->begin_), 0, 0};
}

Timed::~Timed() {
  if (profile_ == nullptr) return;
  piece_.end = seconds_since(profile_->begin_);
  profile_->add(std::move(piece_));
}

}  // namespace kvreplay
