#include "registry.h"

#include <algorithm>

namespace kvreplay {
namespace {

PendingRegistrations* the_current = nullptr;

}  // namespace

bool is_name(std::string_view text) {
  const auto is_letter = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto fits = [&](char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '-'; };
  return !text.empty() && is_letter(text.front()) && text.back() != '-' && std::ranges::all_of(text, fits);
}

PendingRegistrations::PendingRegistrations() { the_current = this; }

PendingRegistrations::~PendingRegistrations() { the_current = nullptr; }

PendingRegistrations* PendingRegistrations::current() { return the_current; }

void PendingRegistrations::add(Name name, std::function<void()> remove) {
  if (!name.taken) removals_.push_back(std::move(remove));
  names_.push_back(std::move(name));
}

void PendingRegistrations::take_back() {
  for (const std::function<void()>& remove : removals_) remove();
  removals_.clear();
}

}  // namespace kvreplay
