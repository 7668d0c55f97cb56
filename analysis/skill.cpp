#include "analysis/skill.h"

#include <limits>
#include <vector>

namespace kvreplay {
namespace {

constexpr double undefined = std::numeric_limits<double>::quiet_NaN();
const MetricName recall{"attention_recall", ""}, best_recall{"attention_recall", "oracle"};

}  // namespace

std::map<std::string, double> skills(std::span<const CellRecord> cells) {
  std::map<std::string, std::vector<double>> twins;  // recalls, by the id of the cell whose twins they are
  for (const CellRecord& cell : cells)
    if (!cell.twin_of.empty()) twins[cell.twin_of].push_back(cell.value(recall));
  std::map<std::string, double> all;
  for (const CellRecord& cell : cells) {
    const auto of_twins = twins.find(cell.id);
    if (of_twins == twins.end()) continue;
    const double twin = mean(of_twins->second);
    const double margin = cell.value(best_recall) - twin;
    all[cell.id] = margin > least_margin ? (cell.value(recall) - twin) / margin : undefined;
  }
  return all;
}

}  // namespace kvreplay
