#include <string>
#include <vector>

#include "companions.h"
#include "policies/policy_source.h"
#include "program.h"

int main(int argc, char** argv) {
  using namespace kvreplay;
  const std::vector<std::string> words(argv + 1, argv + argc);
  // A policy in Python runs inside Python, beside the same engine: it is given the whole command line. Policies are
  // read before anything else is done.
  policy_sources().add(
      {".py", [&words](const std::string&, const std::string&) -> std::string { run_companion("python", words); }});
  return run_program(argv[0], words);
}
