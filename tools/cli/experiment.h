// An experiment: traces, policies, budgets and options of a replay in one YAML file.
#pragma once

#include <vector>

#include "arguments.h"
#include "trace_list.h"

namespace kvreplay {

/// What a command line asks for, with what the experiment in it says.
struct Asked {
  Arguments arguments;
  std::vector<ListedTrace> traces;
};

/// `arguments` are of a command whose operands are traces. An operand @FILE.yaml is an experiment: `traces`,
/// `policies`, `budgets`, `exclude`, and options of the command by their names. What the command line says itself,
/// traces too, takes the place of what the file says. Throws Error{usage} at the line of whatever is wrong in it.
Asked asked(const Arguments& arguments);

}  // namespace kvreplay
