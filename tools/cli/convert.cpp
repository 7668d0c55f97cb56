#include "trace/convert.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <vector>

#include "arguments.h"
#include "commands.h"
#include "interruption.h"
#include "output.h"
#include "trace/staging.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    {"output", 'o', "FILE", "", "trace to write"},
    {"force", 0, "", "", "overwrite an existing file"},
};

int run(const Arguments& arguments) {
  if (!arguments.given("output")) throw Error{Refusal::usage, "convert", "no output file", "-o FILE"};
  const std::string path = arguments.text("output");
  const Existing existing = arguments.given("force") ? Existing::replace : Existing::refuse;
  heed_interruptions();
  const std::vector<std::filesystem::path> inputs(arguments.operands().begin(), arguments.operands().end());
  if (is_staged(inputs.front())) {
    join_staged(inputs, path, existing, interrupted);
  } else if (inputs.size() > 1) {
    throw Error{Refusal::usage, "convert", "several inputs", "one trace, or files of the staging format",
                inputs[1].string()};
  } else {
    const std::vector<Error> broken = convert(inputs.front(), path, existing, interrupted);
    for (const Error& violation : broken) say("kvreplay: {}\n", violation.what());
    if (!broken.empty()) return broken.front().exit_code();
  }
  fmt::print("{}  {}\n", path, size_text(std::filesystem::file_size(path)));
  return 0;
}

std::string details() {
  return "HDF5 and h5py write old superblocks and strings of variable length by default. The new file has\n"
         "superblock 2, strings of fixed length and contiguous datasets. Numbers keep their types and bits.\n"
         "If the new file would still violate the trace format, convert lists all violations, writes nothing and\n"
         "ends with exit code 3.\n"
         "A folder or files of safetensors in the staging format (docs/staging.md) become one trace: convert joins\n"
         "their pieces along the positions and rejects gaps, overlaps and tensors of other shapes or types.\n";
}

}  // namespace

const Command convert_command{"convert",
                              "rewrites a trace of another program, or tensors in the staging format, as a trace",
                              "TRACE|DIR|FILE...",
                              options,
                              run,
                              details,
                              "kvreplay convert h5py.h5 -o trace.h5\nkvreplay convert h5py.h5 -o trace.h5 --force\n"
                              "kvreplay convert staged -o trace.h5\n",
                              true};

}  // namespace kvreplay
