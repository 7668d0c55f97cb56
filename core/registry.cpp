#include "registry.h"

#include <algorithm>

namespace kvreplay {
namespace {

Newcomers* the_current = nullptr;

}  // namespace

bool is_name(std::string_view text) {
  const auto is_letter = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto fits = [&](char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '-'; };
  return !text.empty() && is_letter(text.front()) && text.back() != '-' && std::ranges::all_of(text, fits);
}

Newcomers::Newcomers() { the_current = this; }

Newcomers::~Newcomers() { the_current = nullptr; }

Newcomers* Newcomers::current() { return the_current; }

void Newcomers::add(Name name, std::function<void()> remove) {
  if (!name.taken) removals_.push_back(std::move(remove));
  names_.push_back(std::move(name));
}

void Newcomers::take_back() {
  for (const std::function<void()>& remove : removals_) remove();
  removals_.clear();
}

}  // namespace kvreplay
