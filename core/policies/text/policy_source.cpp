#include "policies/text/policy_source.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <sstream>

#include "error.h"
#include "policies/policy.h"

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

constexpr std::string_view press = "press";

/// "SnapKVPress" -> "snapkvpress", "snap-kv" -> "snapkv".
std::string letters_of(std::string_view name) {
  std::string letters;
  for (const char c : name)
    if (c != '-' && c != '_') letters += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return letters;
}

/// "SnapKVPress" and "snap-kv" -> "snapkv".
std::string plain_name(std::string_view name) {
  std::string plain = letters_of(name);
  if (plain.size() > press.size() && plain.ends_with(press)) plain.erase(plain.size() - press.size());
  return plain;
}

bool has_plain_name(const PolicyEntry& entry, const std::string& plain) {
  if (plain_name(entry.name) == plain) return true;
  std::istringstream names(entry.make()->card().other_names);
  return std::any_of(std::istream_iterator<std::string>(names), {},
                     [&](const std::string& name) { return plain_name(name) == plain; });
}

/// Throws Error{usage} for a file in place of a policy in it.
void refuse_file(std::string_view name) {
  const std::string file(name);
  if (name.ends_with(python_ending))
    throw Error{Refusal::usage, file, "a Python file without the name of a policy",
                file + ":NAME, with NAME a function or class of the file"};
  for (const std::string_view ending : {".so", ".cpp"})
    if (name.ends_with(ending))
      throw Error{
          Refusal::usage, file, "a file is not a policy",
          "--plugin FILE.so -p NAME (in Python kv.load_plugin), with the shared library that is built from the policy"};
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
  if (file == std::string_view::npos) {
    if (policies().find(name) != nullptr) return std::string(name);
    refuse_file(name);
    const std::string plain = plain_name(name);
    for (std::string& known : policies().names())
      if (const PolicyEntry& entry = policies().get(known); entry.source.is_built_in() && has_plain_name(entry, plain))
        return std::move(known);
    return std::string(name);
  }
  return python_policy_reader()(std::string(name.substr(0, file)), std::string(name.substr(file + 1)));
}

bool is_press(std::string_view name) {
  if (end_of_file(name) != std::string_view::npos || policies().find(name) != nullptr) return false;
  return letters_of(name).ends_with(press) && policies().find(registered_policy(name)) != nullptr;
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
