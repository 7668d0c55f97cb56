// Names to things, filled by the things themselves before main: adding a file is the interface.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "nearest.h"

namespace kvreplay {

/// Whether it can be written wherever names are, and what such a name is made of.
bool is_name(std::string_view text);
inline constexpr const char* name_rule = "lower-case letters, digits and hyphens, a letter first";

/// A name that was registered while a plug-in was loaded.
struct Registration {
  std::string kind;  // of what: "policy", "selector"
  std::string name;
  bool is_taken;  // another of this name was registered before, and remains
  std::function<void()> take_back;
};

/// The registrations of the plug-in that is being loaded; null: the program itself registers what it is made of.
extern std::vector<Registration>* pending_registrations;

/// `Card` has a member `name`. A duplicate name is a bug of ours that no caller could handle: the program stops. A
/// plug-in's is listed in `pending_registrations` instead.
template <class Card>
class Registry {
 public:
  /// `kind` names what is registered, for messages: "policy", "backend".
  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  void add(Card card) {
    const std::string name{card.name};
    const bool taken = !cards_.emplace(name, std::move(card)).second;
    if (pending_registrations != nullptr) {
      pending_registrations->push_back({kind_, name, taken, [this, name, taken] {
                                          if (!taken) cards_.erase(name);
                                        }});
    } else if (taken) {
      std::fprintf(stderr, "kvreplay: two things are registered as %s \"%s\"\n", kind_.c_str(), name.c_str());
      std::abort();
    }
  }

  /// In place of what has that name; new where nothing has.
  void replace(Card card) {
    std::string name{card.name};
    cards_.insert_or_assign(std::move(name), std::move(card));
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
