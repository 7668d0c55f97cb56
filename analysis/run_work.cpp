#include "analysis/run_work.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "hash.h"

namespace kvreplay {

void TraceWork::warn(const std::string& warning) {
  if (std::ranges::find(warnings, warning) == warnings.end()) warnings.push_back(warning);
}

CellRecord cell_of_policy(const ConfiguredPolicy& policy, const char* role, std::uint64_t seed) {
  const Parameters parameters = policy.parameters();
  CellRecord cell;
  cell.role = role;
  cell.policy = policy.name();
  cell.params = policy.params();
  cell.label = policy.label();
  cell.paper = policy.card().paper;
  cell.agg = parameters.find("agg") != nullptr ? parameters.find("agg")->text() : "";
  cell.seed = seed;
  cell.source = policy.source_hash();
  return cell;
}

double share_of_seen(const CellRecord& cell) { return Budget::parse(cell.budget).of_seen(); }

std::string cell_id(const TraceRecord& trace, const CellRecord& cell) {
  Hash hash;
  hash.update(
      fmt::format("kvreplay cell\nnumerics={}\ntrace={}\npolicy={}\nparams={}\nbudget={}\nboundary={}\neval={}\n"
                  "layers={}\nseed={}\nbackend={}\n",
                  trace.numerics, trace.hash, cell.policy, cell.params, cell.budget_tokens, trace.boundary, trace.eval,
                  fmt::format("{}", fmt::join(trace.treated, ",")), cell.seed, trace.backend));
  if (!cell.source.empty()) hash.update(fmt::format("source={}\n", cell.source));
  if (const double of_seen = share_of_seen(cell); of_seen > 0) hash.update(fmt::format("of_seen={}\n", of_seen));
  if (trace.is_sampled()) hash.update(fmt::format("sample={}\n", trace.sample));
  return hash.digits().substr(0, 16);
}

bool of_another_version(const CellRecord& cell, const CellRecord& other) {
  return cell.policy == other.policy && cell.params == other.params && cell.source != other.source;
}

bool replaces(const CellRecord& now, const CellRecord& earlier) {
  return of_another_version(now, earlier) && now.budget_tokens == earlier.budget_tokens && now.seed == earlier.seed &&
         share_of_seen(now) == share_of_seen(earlier);
}

}  // namespace kvreplay
