#include "trace/convert.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <vector>

#include "arguments.h"
#include "commands.h"
#include "interruption.h"
#include "output.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    {"output", 'o', "FILE", "", "the trace to write"},
    {"force", 0, "", "", "replace an existing file"},
};

int run(const Arguments& arguments) {
  if (!arguments.given("output")) throw Error{Refusal::usage, "convert", "no file to write", "-o FILE"};
  const std::string path = arguments.text("output");
  const Existing existing = arguments.given("force") ? Existing::replace : Existing::refuse;
  heed_interruptions();
  const std::vector<Error> broken = convert(arguments.operands().front(), path, existing, interrupted);
  for (const Error& violation : broken) say("kvreplay: {}\n", violation.what());
  if (!broken.empty()) return broken.front().exit_code();
  fmt::print("{}  {}\n", path, size_text(std::filesystem::file_size(path)));
  return 0;
}

std::string details() {
  return "Rewrites a trace with an old superblock or strings of variable length, which HDF5 and h5py write by "
         "default:\n"
         "superblock 2, strings of fixed length, contiguous datasets. Numbers keep their types and bits. Nothing is\n"
         "written where the new file would still break a rule of the format; all violations are listed (exit code "
         "3).\n";
}

}  // namespace

const Command convert_command{"convert", "rewrites a trace that h5py wrote with its defaults in the form of the format",
                              "TRACE",   options,
                              run,       details};

}  // namespace kvreplay
