// A YAML file as a small tree. Its tags run nothing, and what it may hold is bounded.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvreplay {

/// Tags are ignored: a number is the text that it is written as.
struct YamlNode {
  enum class Kind { nothing, text, list, mapping };

  Kind kind = Kind::nothing;
  std::string where = {};  // FILE:LINE
  std::string text = {};
  std::vector<YamlNode> items = {};
  std::vector<std::pair<std::string, YamlNode>> entries = {};  // as in the file; no key is there twice

  bool is(Kind other) const { return kind == other; }
  /// Null: there is no such key.
  const YamlNode* find(std::string_view key) const;
};

/// "a text", "a list" ..., for messages.
std::string name_of(YamlNode::Kind kind);

/// The file's one document. `holding` says in messages what the file should hold. Throws Error{input} for a file that
/// cannot be read, Error{usage} for what is not YAML and for one of more than 16 MiB, 100,000 nodes or 32 levels, each
/// alias counted with all that it stands for.
YamlNode read_yaml(const std::filesystem::path& path, const std::string& holding);

}  // namespace kvreplay
