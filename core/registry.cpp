#include "registry.h"

#include <algorithm>

namespace kvreplay {
std::vector<Registration>* pending_registrations = nullptr;

bool is_name(std::string_view text) {
  const auto is_letter = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto fits = [&](char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '-'; };
  return !text.empty() && is_letter(text.front()) && text.back() != '-' && std::ranges::all_of(text, fits);
}

}  // namespace kvreplay
