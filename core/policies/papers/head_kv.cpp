#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "policies/arithmetic/apportion.h"
#include "policies/policy.h"
#include "policies/scores/window_score.h"
#include "policies/text/array_file.h"

namespace kvreplay {
namespace {

struct HeadKv : WindowFamily {
  static constexpr Card card{
      .name = "head-kv",
      .summary = "SnapKV scores with per-head budgets by head importances from a table",
      .paper = "Fu et al. 2024, HeadKV, arXiv:2410.19258",
      .score =
          "as snapkv; head sizes beside the window in proportion to p b/beta L Hq + (b - b/beta), p the head's share "
          "of the total importance",
      .family = Family::budget,
  };

  ArrayFile table{"none"};
  double beta = 1.01;

  void parameters(Parameters& p) {
    WindowFamily::parameters(p);
    const auto read = p.of_part("allocate");
    table.parameter(p, "table", "required: importances [L, Hq] of the query heads of the treated layers, 0 or more");
    p.add("beta", beta, RealRange{1, 1e6}, "1/beta of the budget is allocated by importance, the rest equally");
  }

  std::vector<Source> sources() const { return table.sources(); }

  /// Importances of the rows (sums over their query heads), normalised so that their mean over all rows is 1.
  std::vector<double> shares(const Division& division) const {
    const Array& importance =
        table.of_shape("head-kv:table", {division.layers, division.query_heads}, "[treated layers, query heads]");
    double sum = 0;
    for (const double number : importance.numbers) {
      if (number < 0)
        throw Error{Refusal::input, importance.source.path, "importance of a head", "0 or more",
                    std::to_string(number)};
      sum += number;
    }
    if (sum == 0)
      throw Error{Refusal::input, importance.source.path, "all importances are 0", "a number above 0", "zeros"};
    std::vector<double> of_rows(static_cast<std::size_t>(division.layers) * static_cast<std::size_t>(division.rows));
    // Rows of a layer are adjacent, and so are the query heads of a row.
    for (std::size_t head = 0; head < importance.numbers.size(); ++head)
      of_rows[head * of_rows.size() / importance.numbers.size()] +=
          importance.numbers[head] / sum * static_cast<double>(of_rows.size());
    return of_rows;
  }

  Plan plan() const {
    Plan plan = WindowFamily::plan();
    plan.score.needs.same_query_heads = true;
    plan.allocate = by_head([*this](const Division& division) {
      const double slots = division.slots();
      std::vector<double> weights = shares(division);
      for (double& weight : weights) weight = weight * slots / beta + (slots - slots / beta);
      const std::int64_t all = std::int64_t{division.layers} * division.rows * division.slots();
      const std::vector<int> sizes = apportion(all, weights, 0, division.candidates());
      std::vector<std::vector<int>> counts(static_cast<std::size_t>(division.layers));
      for (std::size_t i = 0; i < sizes.size(); ++i)
        counts[i / static_cast<std::size_t>(division.rows)].push_back(division.by_rule() + sizes[i]);
      return counts;
    });
    return plan;
  }
};

const Registered<HeadKv> registered;

}  // namespace
}  // namespace kvreplay
