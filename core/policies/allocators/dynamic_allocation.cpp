#include "policies/allocators/dynamic_allocation.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "policies/arithmetic/apportion.h"
#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<MidTotal> mid_total_words[] = {{"full", MidTotal::full}, {"proportional", MidTotal::proportional}};
constexpr Choice<CountNormalisation> norm_words[] = {{"sum", CountNormalisation::sum},
                                                     {"minmax", CountNormalisation::minmax}};

struct DynamicPart : DynamicAllocation {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "dynamickv";
  static constexpr const char* summary =
      "per-layer budgets by the number of highest scores in each layer, updated progressively";

  void fill(Plan& plan) const { plan.allocate = across_layers(allocator()); }
};

const RegisteredPart<DynamicPart> registered;

/// The candidates of layers added one after another, and the distribution of the highest ones over the layers. A
/// histogram of leading bits is updated with each layer, so that only candidates near the cut are read again.
class BestEntries {
 public:
  explicit BestEntries(const Division& division)
      : sinks_(static_cast<std::size_t>(division.sinks)),
        candidates_(static_cast<std::size_t>(division.candidates())),
        of_leading_(std::size_t{1} << leading_bits) {}

  void add(const Matrix& layer) {
    layers_.push_back(&layer);
    for (int head = 0; head < layer.rows(); ++head)
      for (const double score : candidates(layer, head)) ++of_leading_[leading(score)];
  }

  /// Number of the `wanted` highest candidates in each layer.
  std::vector<std::int64_t> counts(std::int64_t wanted) const {
    std::vector<std::int64_t> best(layers_.size());
    if (wanted == 0) return best;
    std::size_t of_cut = of_leading_.size() - 1;
    for (; wanted > of_leading_[of_cut]; --of_cut) wanted -= of_leading_[of_cut];

    std::vector<double> near;
    std::vector<std::size_t> end;  // of each layer's scores in `near`
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      for (int head = 0; head < layers_[l]->rows(); ++head)
        for (const double score : candidates(*layers_[l], head)) {
          const std::size_t bits = leading(score);
          best[l] += bits > of_cut ? 1 : 0;
          if (bits == of_cut) near.push_back(score);
        }
      end.push_back(near.size());
    }
    Cut cut = cut_after(near, wanted);
    for (std::size_t l = 0, i = 0; l < layers_.size(); ++l)
      for (; i < end[l]; ++i) {
        const bool ties = near[i] == cut.score && cut.equal > 0;
        cut.equal -= ties ? 1 : 0;
        best[l] += near[i] > cut.score || ties ? 1 : 0;
      }
    return best;
  }

 private:
  static constexpr int leading_bits = 16;

  static std::size_t leading(double score) { return score_key(score) >> (64 - leading_bits); }
  std::span<const double> candidates(const Matrix& layer, int head) const {
    return layer.row(head).subspan(sinks_, candidates_);
  }

  std::size_t sinks_, candidates_;
  std::vector<std::int64_t> of_leading_;
  std::vector<const Matrix*> layers_;
};

}  // namespace

void DynamicAllocation::parameters(Parameters& p) {
  const auto read = p.of_part("allocate");
  p.add("r_max", r_max, RealRange{1.0, 1e9},
        "limit of a layer's budget before the first update, as a multiple of the mean");
  p.add("update", update, IntRange{.least = 1}, "number of layers between two updates");
  p.add<MidTotal>("mid_total", mid_total, mid_total_words,
                  "slots that an update allocates to the layers so far: those of all layers, or of these layers alone");
  p.add<CountNormalisation>("norm", norm, norm_words, "normalisation of counts to weights");
  p.add("progressive", progressive, "updates while layers are processed, not only after the last one");
}

AcrossLayers DynamicAllocation::allocator() const {
  return [part = *this](const Division& division, std::span<const Matrix* const> scores) {
    const int rows = scores.front()->rows(), layers = static_cast<int>(scores.size()), slots = division.slots();
    const int buffer =
        static_cast<int>(std::min(std::floor(slots * part.r_max), static_cast<double>(division.candidates())));
    const auto of_layers = [slots](int n) { return std::int64_t{slots} * n; };
    BestEntries entries(division);

    std::vector<int> caps;
    for (int done = 1; done <= layers; ++done) {
      entries.add(*scores[static_cast<std::size_t>(done - 1)]);
      caps.push_back(buffer);
      if (done < layers && (!part.progressive || done % part.update != 0)) continue;
      std::vector<std::int64_t> weights = entries.counts(of_layers(done) * rows);
      if (part.norm == CountNormalisation::minmax) {
        const std::int64_t least = std::ranges::min(weights);
        for (std::int64_t& weight : weights) weight -= least;
      }
      const int sharing = part.mid_total == MidTotal::full ? layers : done;
      caps = apportion(of_layers(sharing), weights, 0, caps);
    }

    std::vector<std::vector<int>> counts;
    for (const int cap : caps) counts.emplace_back(static_cast<std::size_t>(rows), division.by_rule() + cap);
    return counts;
  };
}

}  // namespace kvreplay
