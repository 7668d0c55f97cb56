#include "policies/text/plugin.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hash.h"
#include "open_file.h"
#include "policies/plugin_stamp.h"
#include "policies/policy.h"
#include "policies/text/layer_ranges.h"

/// The ELF header of the program or library that this is part of: what the machine runs.
extern "C" [[gnu::visibility("hidden")]] const ElfW(Ehdr) __ehdr_start;

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view stamp_begin = KVREPLAY_STAMP_BEGIN;
constexpr const char* how_to_build = "a shared library built by kvreplay_add_plugin";

Source& source_of_pending() {
  static Source source;
  return source;
}

/// Throws unless it is a shared library for this machine, and whole: the system's loader would end the program at the
/// first byte that it maps and that is not there. The table of sections is the last part of a library.
void check_library(const std::string& where, std::string_view bytes) {
  if (!bytes.starts_with(ELFMAG)) throw Error{Refusal::input, where, "not a plug-in", how_to_build, "another file"};
  const auto require = [&](std::uint64_t size) {
    if (size > bytes.size())
      throw Error{Refusal::input, where, "truncated", fmt::format("at least {} bytes", size),
                  std::to_string(bytes.size())};
  };
  ElfW(Ehdr) header;
  require(sizeof header);
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.e_machine != __ehdr_start.e_machine)
    throw Error{Refusal::capability, where, "built for another processor",
                fmt::format("ELF machine {}", __ehdr_start.e_machine), std::to_string(header.e_machine)};
  require(header.e_shoff + std::uint64_t{header.e_shnum} * header.e_shentsize);
}

/// "VERSION (ABI)"; empty: there is no stamp.
std::string_view stamp_in(std::string_view bytes) {
  std::string_view stamp;
  for (std::size_t at = bytes.find(stamp_begin); at != std::string_view::npos && stamp.empty();
       at = bytes.find(stamp_begin, at + 1)) {
    stamp = bytes.substr(at + stamp_begin.size());
    stamp = stamp.substr(0, stamp.find('\0'));
  }
  return stamp;
}

void check_stamp(const std::string& where, std::string_view bytes) {
  constexpr std::string_view expected = KVREPLAY_VERSION " (" KVREPLAY_ABI ")";
  const std::string_view stamp = stamp_in(bytes);
  if (stamp.empty())
    throw Error{Refusal::input, where, "not a kvreplay plug-in", how_to_build, "a library without version stamp"};
  if (stamp != expected)
    throw Error{Refusal::capability, where,
                "built for another version of kvreplay; rebuild it with the kit of this version", std::string(expected),
                std::string(stamp)};
}

/// What the system's loader says, without the path that it may begin with.
std::string loader_error(const std::string& path) {
  const char* said = dlerror();
  std::string_view text = said == nullptr ? "no reason" : said;
  if (text.starts_with(path + ": ")) text.remove_prefix(path.size() + 2);
  return std::string(text);
}

void check_names(const std::string& where, const std::vector<Registration>& registrations) {
  if (registrations.empty())
    throw Error{Refusal::input, where, "registers no policy and no part", "a policy or a part", "none"};
  for (const Registration& each : registrations) {
    if (each.is_taken || (each.kind == "policy" && each.name == layer_ranges_name))
      throw Error{Refusal::input, where, each.kind + " \"" + each.name + "\" exists", "another name"};
    if (!is_name(each.name))
      throw Error{Refusal::input, where, each.kind + " \"" + each.name + "\" is not a valid name", name_rule};
  }
}

}  // namespace

const Source& current_source() { return source_of_pending(); }

std::string load_plugin(const fs::path& path) {
  static std::mutex loading;
  const std::scoped_lock lock(loading);
  const std::string where = path.string();
  const std::string bytes = read_file(where);
  check_library(where, bytes);
  check_stamp(where, bytes);

  const std::string file = fs::canonical(path).string();
  const Source source{file, hash_of(std::as_bytes(std::span(bytes)))};
  static std::map<std::string, std::string> loaded;  // hashes by file
  if (const auto found = loaded.find(file); found != loaded.end()) {
    if (found->second == source.hash) return source.hash;
    throw Error{Refusal::input, where, "changed since it was loaded; restart the program"};
  }

  std::vector<Registration> registrations;
  pending_registrations = &registrations;
  source_of_pending() = source;
  const auto close = [](void* library) { dlclose(library); };
  std::unique_ptr<void, decltype(close)> library(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL), close);
  pending_registrations = nullptr;
  source_of_pending() = {};
  if (library == nullptr) throw Error{Refusal::input, where, "cannot be loaded", "", loader_error(file)};
  try {
    check_names(where, registrations);
  } catch (const Error&) {
    for (const Registration& each : registrations) each.take_back();
    throw;
  }
  library.release();
  return loaded.emplace(file, source.hash).first->second;
}

}  // namespace kvreplay
