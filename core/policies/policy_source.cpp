#include "policies/policy_source.h"

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

}  // namespace kvreplay
