#include "analysis/skill.h"

#include <limits>
#include <vector>

namespace kvreplay {
namespace {

constexpr double undefined = std::numeric_limits<double>::quiet_NaN();

double value_of(const CellSummary& cell, const char* variant) {
  const auto found = cell.values.find({"attention_recall", variant});
  return found == cell.values.end() ? undefined : found->second;
}

}  // namespace

std::map<std::string, double> skills(std::span<const CellSummary> cells) {
  std::map<std::string, std::vector<double>> twins;  // recalls, by the id of the cell whose twins they are
  for (const CellSummary& cell : cells)
    if (!cell.twin_of.empty()) twins[cell.twin_of].push_back(value_of(cell, ""));
  std::map<std::string, double> all;
  for (const CellSummary& cell : cells) {
    const auto of_twins = twins.find(cell.id);
    if (of_twins == twins.end()) continue;
    const double twin = mean(of_twins->second);
    const double margin = value_of(cell, "oracle") - twin;
    all[cell.id] = margin > least_margin ? (value_of(cell, "") - twin) / margin : undefined;
  }
  return all;
}

}  // namespace kvreplay
