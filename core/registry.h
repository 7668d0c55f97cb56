// Names to things, filled by the things themselves before main: adding a file is the interface.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "nearest.h"

namespace kvreplay {

/// `Card` has a member `name`. A duplicate name is a bug of ours that no caller could handle: the program stops.
template <class Card>
class Registry {
 public:
  /// `kind` names what is registered, for messages: "policy", "backend".
  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  void add(Card card) {
    const std::string name{card.name};
    if (!cards_.emplace(name, std::move(card)).second) {
      std::fprintf(stderr, "kvreplay: two things are registered as %s \"%s\"\n", kind_.c_str(), name.c_str());
      std::abort();
    }
  }

  const Card* find(std::string_view name) const {
    const auto found = cards_.find(name);
    return found == cards_.end() ? nullptr : &found->second;
  }

  /// Throws Error{usage} that offers the nearest name.
  const Card& get(std::string_view name) const {
    if (const Card* card = find(name)) return *card;
    if (name.empty()) throw Error{Refusal::usage, kind_, "no name", nearest(name, names())};
    throw Error{Refusal::usage, std::string(name), "unknown " + kind_, nearest(name, names()), std::string(name)};
  }

  /// Sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, card] : cards_) all.push_back(name);
    return all;
  }

 private:
  std::string kind_;
  std::map<std::string, Card, std::less<>> cards_;
};

}  // namespace kvreplay
