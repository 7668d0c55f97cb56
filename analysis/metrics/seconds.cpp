// Time of scoring and selection.
#include "analysis/metrics/metric.h"

namespace kvreplay {
namespace {

double score_and_select(const CellSeconds& seconds) { return seconds.score + seconds.select; }
double score(const CellSeconds& seconds) { return seconds.score; }
double select(const CellSeconds& seconds) { return seconds.select; }

const RegisteredMetric select_seconds_metric{{
    .name = "select_seconds",
    .summary = "wall time of scoring and selection, in seconds.csv",
    .unit = "s",
    .better = Better::lower,
    .formula = "per layer; excludes observables that policies share (observable_seconds); scores that cells share "
               "count in full for each cell",
    .source = "ChunkKV, Fig. 4",
    .edges = "a layer that reuses another layer's set costs the copy; cells that run in parallel on several threads "
             "overlap in time; times are not in results.csv, so that results of two runs can be compared",
    .variants = {{"", "scoring and selection", OfSeconds{score_and_select}, true},
                 {"score", "scoring alone", OfSeconds{score}, true},
                 {"select", "selection alone", OfSeconds{select}, true}},
}};

}  // namespace
}  // namespace kvreplay
