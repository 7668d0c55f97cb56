#include <fmt/format.h>

#include "analysis/read_run.h"
#include "arguments.h"
#include "commands.h"
#include "run_output.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    in_group("selection",
             with_plural("policies", {"policy", 'p', "POLICY,...", "",
                                      "policies to show: NAME, as tables and replay name them, or NAME:KEY=VALUE; "
                                      "repeatable",
                                      true})),
    with_plural("budgets", {"budget", 'b', "BUDGET,...", "",
                            "budgets to show, in any spelling that replay takes, or in tokens; repeatable", true}),
    with_plural("traces", {"trace", 0, "NAME,...", "", "traces to show (default: all); repeatable", true}),
    in_group("table", table_options[0]),
    table_options[1],
    table_options[2],
    table_options[3],
    table_options[4],
    in_group("format", markdown_option),
    {"latex", 0, "", "", "print LaTeX (package booktabs)"},
    {"csv", 0, "", "", "print all rows and columns as CSV in full precision, with the names of the metrics"},
    json_option,
};

int run(const Arguments& arguments) {
  print_run(arguments, show_options_of(arguments), read_run(arguments.operands().front()));
  return 0;
}

std::string details() {
  return "Prints the cells of all calls of kvreplay replay that wrote into RUN. Several traces: means with 95 % "
         "intervals.\n"
         "CSV and JSON have every row and column that is selected; Markdown and LaTeX have those of the text.\n";
}

}  // namespace

const Command show_command{"show",
                           "prints the table of a finished run: one trace, or means over several",
                           "RUN",
                           options,
                           run,
                           details,
                           "kvreplay show out -p snapkv,h2o -b 0.1 --wide\n"
                           "kvreplay show out --all --columns kept,recall,output_error --latex\n"};

}  // namespace kvreplay
