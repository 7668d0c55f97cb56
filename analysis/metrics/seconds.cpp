// What choosing costs in time.
#include "analysis/metrics/metric.h"

namespace kvreplay {
namespace {

double score_and_select(const CellSeconds& seconds) { return seconds.score + seconds.select; }
double score(const CellSeconds& seconds) { return seconds.score; }
double select(const CellSeconds& seconds) { return seconds.select; }

const RegisteredMetric select_seconds_metric{{
    .name = "select_seconds",
    .summary = "wall time of scoring and selecting, in seconds.csv",
    .unit = "s",
    .better = Better::lower,
    .formula =
        "per layer; observables that policies share are apart, as observable_seconds; scores that cells share are "
        "charged to each of them in full",
    .source = "ChunkKV, Fig. 4",
    .edges =
        "a layer that reuses another's set costs the copy; cells that choose side by side on several threads overlap; "
        "times are never in results.csv, so that runs compare",
    .variants = {{"", "scoring and selection", OfSeconds{score_and_select}, true},
                 {"score", "scoring alone", OfSeconds{score}, true},
                 {"select", "selection alone", OfSeconds{select}, true}},
}};

}  // namespace
}  // namespace kvreplay
