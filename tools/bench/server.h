// Timing on request, so that another program can take turns: lines in, lines of JSON out.
#pragma once

#include <istream>
#include <ostream>

#include "benchmark_case.h"

namespace kvreplay::bench {

/// Answers until the input ends. A request is one of
///   list                       {"cases": [...]}
///   time CASE CALLS            {"seconds": [one a call]}
///   check CASE                 {"problem": ""}: what float64 says
///   result CASE FILE           {}: the answer is in FILE, as float64 in native order
/// and what cannot be done is {"error": text}. The data of a case stay until another is asked for.
void serve(const Cases& cases, std::istream& in, std::ostream& out);

}  // namespace kvreplay::bench
