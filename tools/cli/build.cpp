#include "build.h"

#include "build_commit.h"
#include "build_configured.h"

namespace kvreplay {

std::string build_version() { return configured::version; }
std::string build_commit() { return configured::commit; }
std::string build_compiler() { return configured::compiler; }

std::vector<std::pair<std::string, std::string>> build_libraries() {
  std::vector<std::pair<std::string, std::string>> all;
  for (const configured::Library& library : configured::libraries)
    all.emplace_back(library.name, *library.version == '\0' ? "unknown" : library.version);
  return all;
}

std::string build_line() { return build_version() + " (" + build_commit() + ")"; }

}  // namespace kvreplay
