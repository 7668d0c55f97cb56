#include "policies/text/policy_source.h"

#include <algorithm>
#include <vector>

#include "error.h"

namespace kvreplay {
namespace {

/// The end of the file's name in "mine.py:my_policy", and what reads such files; nowhere and null for other names.
struct File {
  std::size_t end = std::string_view::npos;
  const PolicySource* source = nullptr;
};

File file_of(std::string_view text) {
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos) return {};
  for (const std::string& ending : policy_sources().names())
    if (text.substr(0, colon).ends_with(ending)) return {colon, policy_sources().find(ending)};
  return {};
}

/// Whether a word between separators names a file; `next` is what ends it.
bool is_file(std::string_view word, char next) {
  if (word.ends_with(".npy")) return true;
  const std::vector<std::string> endings = policy_sources().names();
  return next == ':' && std::ranges::any_of(endings, [&](const std::string& ending) { return word.ends_with(ending); });
}

}  // namespace

Registry<PolicySource>& policy_sources() {
  static Registry<PolicySource> registry{"kind of file"};
  return registry;
}

std::size_t end_of_policy_name(std::string_view text) {
  const File file = file_of(text);
  const std::size_t colon = text.find(':', file.source == nullptr ? 0 : file.end + 1);
  return colon == std::string_view::npos ? text.size() : colon;
}

std::string registered_policy(std::string_view name) {
  const File file = file_of(name);
  if (file.source == nullptr) return std::string(name);
  return file.source->load(std::string(name.substr(0, file.end)), std::string(name.substr(file.end + 1)));
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
        throw Error{Refusal::usage, folder.string(), "files in this folder cannot be named in a policy",
                    std::string("a folder without any of ") + separators, std::string(word)};
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
