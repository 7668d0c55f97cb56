#include "policies/text/policy_source.h"

#include <algorithm>

#include "error.h"

namespace kvreplay {
namespace {

constexpr std::string_view python_ending = ".py";

/// The colon behind the file in "mine.py:my_policy"; npos in other names.
std::size_t end_of_file(std::string_view text) {
  const std::size_t colon = text.find(':');
  const bool is_python = colon != std::string_view::npos && text.substr(0, colon).ends_with(python_ending);
  return is_python && python_policy_reader() ? colon : std::string_view::npos;
}

/// Whether a word between separators names a file; `next` is what ends it.
bool is_file(std::string_view word, char next) {
  return word.ends_with(".npy") || (next == ':' && word.ends_with(python_ending) && python_policy_reader());
}

}  // namespace

std::function<std::string(const std::string&, const std::string&)>& python_policy_reader() {
  static std::function<std::string(const std::string&, const std::string&)> reader;
  return reader;
}

std::size_t end_of_policy_name(std::string_view text) {
  const std::size_t file = end_of_file(text);
  const std::size_t colon = text.find(':', file == std::string_view::npos ? 0 : file + 1);
  return colon == std::string_view::npos ? text.size() : colon;
}

std::string registered_policy(std::string_view name) {
  const std::size_t file = end_of_file(name);
  if (file == std::string_view::npos) return std::string(name);
  return python_policy_reader()(std::string(name.substr(0, file)), std::string(name.substr(file + 1)));
}

std::string with_files_in(const std::filesystem::path& folder, std::string_view policies) {
  constexpr const char* separators = ",=():";
  std::string all;
  while (!policies.empty()) {
    const std::size_t end = std::min(policies.find_first_of(separators), policies.size());
    const std::string_view word = policies.substr(0, end);
    if (is_file(word, end < policies.size() ? policies[end] : '\0')) {
      const bool relative = std::filesystem::path(word).is_relative();
      if (relative && folder.string().find_first_of(separators) != std::string::npos)
        throw Error{Refusal::usage, folder.string(), "the name of this folder cannot be part of a policy",
                    std::string("a name without any of ") + separators, std::string(word)};
      all += (folder / word).string();
    } else {
      all += word;
    }
    if (end < policies.size()) all += policies[end];
    policies.remove_prefix(std::min(end + 1, policies.size()));
  }
  return all;
}

}  // namespace kvreplay
