// Values of the command line: budgets, metrics, precision, samples, detail, structures, boundaries and queries of a
// trace, numbers, lists.
#include <fuzzer/FuzzedDataProvider.h>

#include "analysis/metrics/metric.h"
#include "analysis/precision.h"
#include "analysis/results.h"
#include "parameters.h"
#include "policies/text/configured.h"
#include "policies/text/structure.h"
#include "replay/replay.h"
#include "replay/sample.h"
#include "small_trace.h"
#include "survival.h"

namespace kvreplay {
namespace {

void read_budget(const std::string& text) {
  const Budget budget = Budget::parse(text);
  for (const int prompt : {1, 20, 4096, INT32_MAX}) {
    const int tokens = budget.tokens(prompt, [](int kept) { return 1024.0 * kept; });
    require(tokens >= (budget.bytes > 0 ? 0 : 1), text + " leaves no token");
    require(tokens <= prompt || budget.count > 0, text + " keeps more than there is");
  }
}

void read_queries(const Trace& trace, const std::string& text) {
  const std::vector<std::int32_t> queries = eval_queries(trace, text);
  require(!queries.empty() && queries.front() >= 0 && queries.back() < trace.header().tokens(), text);
}

void read_boundary(const Trace& trace, const std::string& text) {
  const int tokens = boundary(trace, text);
  require(tokens >= 1 && tokens <= trace.header().prefill, text);
}

void read_metrics(const Trace& trace, const std::string& text) {
  for (const MetricName& name : parse_metrics(text)) find_variant(name);
  metrics_of_trace(parse_replayed_metrics("--metrics", text), trace.header().spans, trace.header().prefill);
}

void read_precision(const std::string& text) { require(Precision::parse(text).half_width > 0, text); }

void read_sample(const std::string& text) { require(SampleSizes::parse(text).queries >= 0, text); }

void read_amount(const std::string& text) {
  const Amount amount = Amount::parse("amount", text);
  require(Amount::parse("amount", amount.text()).text() == amount.text(), text);
  for (const int whole : {0, 1, 20, INT32_MAX}) amount.of(whole), amount.of_prompt(whole);
}

}  // namespace
}  // namespace kvreplay

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const SmallTrace small;
  FuzzedDataProvider bytes(data, size);
  const int kind = bytes.ConsumeIntegralInRange(0, 11);
  const std::string text = bytes.ConsumeRemainingBytesAsString();
  survives([&] {
    switch (kind) {
      case 0:
        return read_budget(text);
      case 1:
        return read_metrics(*small, text);
      case 2:
        return read_queries(*small, text);
      case 3:
        return read_boundary(*small, text);
      case 4:
        Structure::parse(text).around("h2o");
        return;
      case 5:
        return read_amount(text);
      case 6:
        parse_int("number", text);
        return;
      case 7:
        parse_real("number", text);
        return;
      case 8:
        split_list("list", text);
        return;
      case 9:
        return read_precision(text);
      case 10:
        return read_sample(text);
      default:
        parse_detail(text);
    }
  });
  return 0;
}
