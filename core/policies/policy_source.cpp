#include "policies/policy_source.h"

#include <algorithm>
#include <vector>

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
  if (word.ends_with(".npy") || word.starts_with('@')) return true;
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
  std::string all;
  while (!policies.empty()) {
    const std::size_t end = std::min(policies.find_first_of(",=():"), policies.size());
    const std::string_view word = policies.substr(0, end);
    if (is_file(word, end < policies.size() ? policies[end] : '\0')) {
      const bool list = word.starts_with('@');
      all += (list ? "@" : "") + (folder / word.substr(list ? 1 : 0)).string();
    } else {
      all += word;
    }
    if (end < policies.size()) all += policies[end];
    policies.remove_prefix(std::min(end + 1, policies.size()));
  }
  return all;
}

}  // namespace kvreplay
