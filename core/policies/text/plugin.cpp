#include "policies/text/plugin.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

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

/// What is registered while it lives comes from this file.
class RegistrationSource {
 public:
  explicit RegistrationSource(const Source& source) { source_of_pending() = source; }
  RegistrationSource(const RegistrationSource&) = delete;
  RegistrationSource& operator=(const RegistrationSource&) = delete;
  ~RegistrationSource() { source_of_pending() = {}; }
};

std::string bytes_of(const std::string& path) {
  std::uint64_t length = 0;
  const FileDescriptor file = open_file(path, length);
  std::string bytes(length, '\0');
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t read = ::read(file.get(), bytes.data() + done, bytes.size() - done);
    if (read <= 0) throw Error{Refusal::input, path, "cannot be read", "", read < 0 ? std::strerror(errno) : "its end"};
    done += static_cast<std::size_t>(read);
  }
  return bytes;
}

template <class Record>
Record record_at(std::string_view bytes, std::uint64_t offset) {
  Record record;
  std::memcpy(&record, bytes.data() + offset, sizeof record);
  return record;
}

std::string machine_of(const ElfW(Ehdr) & header) {
  return fmt::format("ELF machine {}, class {}, byte order {}", header.e_machine, header.e_ident[EI_CLASS],
                     header.e_ident[EI_DATA]);
}

/// Throws unless it is a shared library for this machine, and whole: the system's loader would end the program at the
/// first byte that it maps and that is not there.
void check_library(const std::string& where, std::string_view bytes) {
  if (!bytes.starts_with(ELFMAG)) throw Error{Refusal::input, where, "not a plug-in", how_to_build, "another file"};
  const auto require = [&](std::uint64_t offset, std::uint64_t size) {
    if (offset > bytes.size() || size > bytes.size() - offset)
      throw Error{Refusal::input, where, "cut off", fmt::format("at least {} bytes", offset + size),
                  std::to_string(bytes.size())};
  };
  require(0, sizeof(ElfW(Ehdr)));
  const auto header = record_at<ElfW(Ehdr)>(bytes, 0);
  if (const std::string here = machine_of(__ehdr_start), there = machine_of(header); here != there)
    throw Error{Refusal::capability, where, "made for another machine", here, there};
  require(header.e_phoff, header.e_phnum * sizeof(ElfW(Phdr)));
  for (std::size_t i = 0; i < header.e_phnum; ++i) {
    const auto segment = record_at<ElfW(Phdr)>(bytes, header.e_phoff + i * sizeof(ElfW(Phdr)));
    require(segment.p_offset, segment.p_filesz);
  }
  require(header.e_shoff, std::uint64_t{header.e_shnum} * header.e_shentsize);
}

struct Stamp {
  std::string_view version, abi;
};

std::optional<Stamp> stamp_in(std::string_view bytes) {
  for (std::size_t at = bytes.find(stamp_begin); at != std::string_view::npos; at = bytes.find(stamp_begin, at + 1)) {
    std::string_view text = bytes.substr(at + stamp_begin.size());
    text = text.substr(0, text.find('\0'));
    const std::size_t colon = text.find(':');
    if (colon != std::string_view::npos && colon > 0) return Stamp{text.substr(0, colon), text.substr(colon + 1)};
  }
  return std::nullopt;
}

void check_stamp(const std::string& where, std::string_view bytes) {
  const std::optional<Stamp> stamp = stamp_in(bytes);
  if (!stamp) throw Error{Refusal::input, where, "not a kvreplay plug-in", how_to_build, "a library without its stamp"};
  if (stamp->version != KVREPLAY_VERSION || stamp->abi != KVREPLAY_ABI)
    throw Error{Refusal::capability, where, "made for another kvreplay: build it again with this one's kit",
                fmt::format("{} ({})", KVREPLAY_VERSION, KVREPLAY_ABI),
                fmt::format("{} ({})", stamp->version, stamp->abi)};
}

/// What the system's loader says, without the path that it may begin with.
std::string loader_error(const std::string& path) {
  const char* said = dlerror();
  std::string_view text = said == nullptr ? "no reason" : said;
  if (text.starts_with(path + ": ")) text.remove_prefix(path.size() + 2);
  return std::string(text);
}

void check_names(const std::string& where, const PendingRegistrations& pending) {
  if (pending.names().empty()) throw Error{Refusal::input, where, "registers nothing", "a policy or a part", "none"};
  for (const PendingRegistrations::Name& each : pending.names()) {
    if (each.taken || (each.kind == "policy" && each.name == layer_ranges_name))
      throw Error{Refusal::input, where, each.kind + " \"" + each.name + "\" is there already", "a name of its own"};
    if (!is_name(each.name))
      throw Error{Refusal::input, where, each.kind + " \"" + each.name + "\" cannot be asked for", name_rule};
  }
}

}  // namespace

const Source& current_source() { return source_of_pending(); }

void load_plugin(const fs::path& path) {
  const std::string where = path.string();
  const std::string bytes = bytes_of(where);
  check_library(where, bytes);
  check_stamp(where, bytes);

  const std::string file = fs::canonical(path).string();
  const Source source{file, hash_of(std::as_bytes(std::span(bytes)))};
  static std::map<std::string, std::string> loaded;  // hashes by file
  if (const auto found = loaded.find(file); found != loaded.end()) {
    if (found->second == source.hash) return;
    throw Error{Refusal::input, where, "changed since it was loaded", "a new start of the program"};
  }

  PendingRegistrations pending;
  const RegistrationSource from(source);
  const auto close = [](void* library) { dlclose(library); };
  std::unique_ptr<void, decltype(close)> library(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL), close);
  if (library == nullptr) throw Error{Refusal::input, where, "cannot be loaded", "", loader_error(file)};
  try {
    check_names(where, pending);
  } catch (const Error&) {
    pending.take_back();
    throw;
  }
  library.release();
  loaded.emplace(file, source.hash);
}

}  // namespace kvreplay
