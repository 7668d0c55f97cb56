#include "policies/parts/dynamic_allocation.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

#include "policies/parts/apportion.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<MidTotal> mid_total_words[] = {{"full", MidTotal::full}, {"proportional", MidTotal::proportional}};
constexpr Choice<CountNormalisation> norm_words[] = {{"sum", CountNormalisation::sum},
                                                     {"minmax", CountNormalisation::minmax}};

struct DynamicPart : DynamicAllocation {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "dynamickv";
  static constexpr const char* summary = "by how many of the best entries a layer has, layer by layer";

  void fill(Plan& plan) const { plan.allocate = allocator(); }
};

const RegisteredPart<DynamicPart> registered;

/// The candidates of layers that come one after another, and how the best of them lie in the layers.
class BestEntries {
 public:
  /// No more than the `most` best are ever asked for.
  BestEntries(const Division& division, std::int64_t most)
      : sinks_(static_cast<std::size_t>(division.sinks)),
        candidates_(static_cast<std::size_t>(division.candidates())),
        most_(static_cast<std::size_t>(most)) {}

  void add(const Matrix& layer) {
    layers_.push_back(&layer);
    for (int head = 0; head < layer.rows(); ++head) {
      const std::span<const double> row = candidates(layer, head);
      best_.insert(best_.end(), row.begin(), row.end());
    }
    if (best_.size() < 2 * most_) return;  // so that the selections of all layers together stay linear
    std::ranges::nth_element(best_, best_.begin() + static_cast<std::ptrdiff_t>(most_), std::greater{});
    best_.resize(most_);
  }

  /// How many of the `wanted` best lie in each layer.
  std::vector<std::int64_t> counts(std::int64_t wanted) {
    std::vector<std::int64_t> above(layers_.size()), ties(layers_.size());
    if (wanted == 0) return above;
    const auto last = best_.begin() + static_cast<std::ptrdiff_t>(wanted - 1);
    std::ranges::nth_element(best_, last, std::greater{});
    const double cut = *last;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      for (int head = 0; head < layers_[l]->rows(); ++head)
        for (const double score : candidates(*layers_[l], head)) {
          above[l] += score > cut ? 1 : 0;
          ties[l] += score == cut ? 1 : 0;
        }
      wanted -= above[l];
    }
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const std::int64_t taken = std::min(ties[l], wanted);
      above[l] += taken;
      wanted -= taken;
    }
    return above;
  }

 private:
  std::span<const double> candidates(const Matrix& layer, int head) const {
    return layer.row(head).subspan(sinks_, candidates_);
  }

  std::size_t sinks_, candidates_, most_;
  std::vector<const Matrix*> layers_;
  std::vector<double> best_;  // the `most` best so far are among them, in any order
};

}  // namespace

void DynamicAllocation::parameters(Parameters& p) {
  p.add("r_max", r_max, RealRange{1.0, 1e9}, "how many times the mean a layer may hold before the first update");
  p.add("update", update, IntRange{.least = 1}, "layers between two updates");
  p.add<MidTotal>("mid_total", mid_total, mid_total_words,
                  "what the layers so far share at an update: the slots of all layers, or their own");
  p.add<CountNormalisation>("norm", norm, norm_words, "how counts become weights");
  p.add("progressive", progressive, "update while layers are still to come, and not only after the last one");
}

AcrossLayers DynamicAllocation::allocator() const {
  return [part = *this](const Division& division, std::span<const Matrix> scores) {
    const int rows = scores.front().rows(), layers = static_cast<int>(scores.size()), slots = division.slots();
    const int buffer =
        static_cast<int>(std::min(std::floor(slots * part.r_max), static_cast<double>(division.candidates())));
    const auto of_layers = [slots](int n) { return std::int64_t{slots} * n; };
    BestEntries entries(division, of_layers(layers) * rows);

    std::vector<int> caps;
    for (int done = 1; done <= layers; ++done) {
      entries.add(scores[static_cast<std::size_t>(done - 1)]);
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
