#include "policies/text/yaml_file.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <set>
#include <string_view>
#include <system_error>

#include "error.h"

namespace kvreplay {
namespace {

constexpr std::size_t most_bytes = std::size_t{16} << 20;
constexpr int most_nodes = 100'000;
constexpr int most_levels = 32;

using Kind = YamlNode::Kind;

/// Copies yaml-cpp's graph, in which aliases share nodes and may stand inside what they stand for.
class Copy {
 public:
  explicit Copy(std::string file) : file_(std::move(file)) {}

  std::string where(const YAML::Mark& mark) const {
    return mark.is_null() ? file_ : fmt::format("{}:{}", file_, mark.line + 1);
  }

  YamlNode operator()(const YAML::Node& node, int level = 1) {
    YamlNode copy{.where = where(node.Mark())};
    if (level > most_levels)
      throw Error{Refusal::usage, copy.where, "too deeply nested", fmt::format("at most {} levels", most_levels),
                  "more"};
    if (++nodes_ > most_nodes)
      throw Error{Refusal::usage, copy.where, "too many values", fmt::format("at most {} values", most_nodes), "more"};
    if (node.IsScalar()) {
      copy.kind = Kind::text;
      copy.text = node.Scalar();
    } else if (node.IsSequence()) {
      copy.kind = Kind::list;
      for (const YAML::Node& item : node) copy.items.push_back((*this)(item, level + 1));
    } else if (node.IsMap()) {
      copy.kind = Kind::mapping;
      std::set<std::string> keys;
      for (const auto& entry : node) {
        if (!entry.first.IsScalar())
          throw Error{Refusal::usage, where(entry.first.Mark()), "invalid key", "a scalar", "a list or mapping"};
        const std::string& key = entry.first.Scalar();
        if (!keys.insert(key).second)
          throw Error{Refusal::usage, where(entry.first.Mark()), "duplicate key", "one value", key};
        YamlNode value = (*this)(entry.second, level + 1);
        // A value that is not there has no place of its own.
        if (value.is(Kind::nothing)) value.where = where(entry.first.Mark());
        copy.entries.emplace_back(key, std::move(value));
      }
    }
    return copy;
  }

 private:
  std::string file_;
  int nodes_ = 0;
};

std::string content_of(const std::filesystem::path& path, const std::string& holding) {
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(path, ignored);
  std::ifstream stream(path, std::ios::binary);
  if (folder || !stream)
    throw Error{Refusal::input, path.string(), "cannot be read", "a YAML file with " + holding,
                folder ? "a folder" : ""};
  std::string text(most_bytes + 1, '\0');
  stream.read(text.data(), std::ssize(text));
  text.resize(static_cast<std::size_t>(stream.gcount()));
  if (text.size() > most_bytes)
    throw Error{Refusal::usage, path.string(), "too large", fmt::format("at most {} MiB", most_bytes >> 20), "more"};
  return text;
}

/// The line of the second "---" that begins a document, or of the first after some content, or of what follows the
/// "..." that ends one; 0: there is none. Nothing else can begin so. (YAML::LoadAll of 0.7 never ends where a document
/// reads nothing, as of ",".)
int second_document(std::string_view text) {
  bool begun = false, ended = false;
  for (int line = 1; !text.empty(); ++line) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view words = text.substr(0, end);
    const auto is = [words](std::string_view marker) {
      constexpr std::string_view blanks = " \t\r";
      return words.starts_with(marker) &&
             (words.size() == marker.size() || blanks.find(words[marker.size()]) != std::string_view::npos);
    };
    const bool begins = is("---"), ends = is("...");
    const std::size_t first = words.find_first_not_of(" \t\r", ends ? 3 : 0);
    const bool content = first != std::string_view::npos && words[first] != '#';
    ended = ended || ends;
    if ((begins && begun) || (content && ended)) return line;
    begun = begun || begins || (content && words[first] != '%');
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return 0;
}

}  // namespace

const YamlNode* YamlNode::find(std::string_view key) const {
  const auto found = std::ranges::find(entries, key, &std::pair<std::string, YamlNode>::first);
  return found == entries.end() ? nullptr : &found->second;
}

std::string name_of(Kind kind) {
  return kind == Kind::text      ? "a text"
         : kind == Kind::list    ? "a list"
         : kind == Kind::mapping ? "a mapping"
                                 : "nothing";
}

YamlNode read_yaml(const std::filesystem::path& path, const std::string& holding) {
  const std::string text = content_of(path, holding);
  Copy copy(path.string());
  if (const int line = second_document(text); line > 0)
    throw Error{Refusal::usage, fmt::format("{}:{}", path.string(), line), "second YAML document",
                "one document with " + holding};
  try {
    return copy(YAML::Load(text));
  } catch (const YAML::Exception& problem) {
    throw Error{Refusal::usage, copy.where(problem.mark), "not YAML", holding, problem.msg};
  }
}

}  // namespace kvreplay
