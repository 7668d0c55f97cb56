#include "policies/allocator.h"

#include <numeric>
#include <utility>

#include "error.h"

namespace kvreplay {
namespace {

const Requirement divides_scores{Property::has_score, "the allocator divides what is scored",
                                 "a score, or allocate=uniform"};
const Requirement has_count_of_each_layer{Property::own_set_in_each_layer, "layers that share a set have one count",
                                          "share=none, or allocate=uniform"};

class Uniform final : public Allocator {
 public:
  std::string name() const override { return "uniform"; }
  CountsFrom from() const override { return CountsFrom::sizes; }
  bool is_uniform() const override { return true; }
};

class EveryToken final : public Allocator {
 public:
  std::string name() const override { return "all tokens"; }
  CountsFrom from() const override { return CountsFrom::sizes; }
  bool keeps_everything() const override { return true; }
  Requirements required() const override {
    constexpr const char* reason = "every token stays";
    constexpr const char* remedy = "no score and no selector";
    return {{Property::unscored, reason, remedy}, {Property::best_tokens, reason, remedy}};
  }
};

class CountsByLayer final : public Allocator {
 public:
  explicit CountsByLayer(ByLayer counts) : counts_(std::move(counts)) {}

  std::string name() const override { return "counts from the number of layers"; }
  CountsFrom from() const override { return CountsFrom::sizes; }
  bool is_by_layer() const override { return true; }
  Requirements required() const override { return {has_count_of_each_layer}; }
  LayerCounts counts(const Division& division) const override {
    LayerCounts of_rows;
    for (const int count : counts_(division)) of_rows.emplace_back(static_cast<std::size_t>(division.rows), count);
    return of_rows;
  }

 private:
  ByLayer counts_;
};

class CountsByHead final : public Allocator {
 public:
  explicit CountsByHead(ByHead counts) : counts_(std::move(counts)) {}

  std::string name() const override { return "counts from the number of layers and heads"; }
  CountsFrom from() const override { return CountsFrom::sizes; }
  Requirements required() const override { return {has_count_of_each_layer}; }
  LayerCounts counts(const Division& division) const override { return counts_(division); }

 private:
  ByHead counts_;
};

class CountsWithinLayer final : public Allocator {
 public:
  explicit CountsWithinLayer(WithinLayer counts) : counts_(std::move(counts)) {}

  std::string name() const override { return "counts from a layer's scores"; }
  CountsFrom from() const override { return CountsFrom::layer; }
  Requirements required() const override { return {divides_scores}; }
  std::vector<int> counts_of_layer(const Division& division, const Matrix* scores,
                                   std::span<const int>) const override {
    return counts_(division, *scores);
  }

 private:
  WithinLayer counts_;
};

class CountsAcrossLayers final : public Allocator {
 public:
  explicit CountsAcrossLayers(AcrossLayers counts) : counts_(std::move(counts)) {}

  std::string name() const override { return "counts from all layers' scores"; }
  CountsFrom from() const override { return CountsFrom::all_layers; }
  Requirements required() const override { return {divides_scores, has_count_of_each_layer}; }
  LayerCounts counts_of_layers(const Division& division, LayerScores scores, std::int64_t) const override {
    return counts_(division, scores);
  }

 private:
  AcrossLayers counts_;
};

class CountsOfOther final : public Allocator {
 public:
  CountsOfOther(std::shared_ptr<const ConfiguredPolicy> policy, bool has_budget, SlotDivision divide, bool over_layers)
      : policy_(std::move(policy)), has_budget_(has_budget), divide_(std::move(divide)), over_layers_(over_layers) {}

  std::string name() const override { return "another policy's counts"; }
  CountsFrom from() const override { return over_layers_ ? CountsFrom::all_layers : CountsFrom::layer; }
  Requirements required() const override { return {divides_scores}; }
  std::vector<int> counts_of_layer(const Division&, const Matrix* scores, std::span<const int> other) const override {
    if (!divide_) return {other.begin(), other.end()};
    return divide_(std::accumulate(other.begin(), other.end(), std::int64_t{0}), {&scores, 1}).front();
  }
  LayerCounts counts_of_layers(const Division&, LayerScores scores, std::int64_t slots) const override {
    return divide_(slots, scores);
  }
  const ConfiguredPolicy* other() const override { return policy_.get(); }
  bool other_has_budget() const override { return has_budget_; }

 private:
  std::shared_ptr<const ConfiguredPolicy> policy_;
  bool has_budget_;
  SlotDivision divide_;
  bool over_layers_;
};

using Change = std::function<std::vector<std::int32_t>(const Kept&, int prompt, int layer, int row)>;

class SetsOfOther final : public Allocator {
 public:
  SetsOfOther(std::shared_ptr<const ConfiguredPolicy> policy, Change change)
      : policy_(std::move(policy)), change_(std::move(change)) {}

  std::string name() const override { return "another policy's kept sets"; }
  CountsFrom from() const override { return CountsFrom::layer; }
  const ConfiguredPolicy* other() const override { return policy_.get(); }
  bool changes_sets() const override { return true; }
  std::vector<std::int32_t> changed(const Kept& kept, int prompt, int layer, int row) const override {
    return change_(kept, prompt, layer, row);
  }

 private:
  std::shared_ptr<const ConfiguredPolicy> policy_;
  Change change_;
};

}  // namespace

std::vector<int> Allocator::counts_of_layer(const Division&, const Matrix*, std::span<const int>) const {
  throw Error{Refusal::internal, name(), "no counts from one layer"};
}

LayerCounts Allocator::counts_of_layers(const Division&, LayerScores, std::int64_t) const {
  throw Error{Refusal::internal, name(), "no counts from all layers"};
}

std::vector<std::int32_t> Allocator::changed(const Kept&, int, int, int) const {
  throw Error{Refusal::internal, name(), "changes no sets"};
}

AllocatorPtr uniform() {
  static const auto allocator = std::make_shared<const Uniform>();
  return allocator;
}

AllocatorPtr every_token() {
  static const auto allocator = std::make_shared<const EveryToken>();
  return allocator;
}

AllocatorPtr by_layer(ByLayer counts) { return std::make_shared<CountsByLayer>(std::move(counts)); }
AllocatorPtr by_head(ByHead counts) { return std::make_shared<CountsByHead>(std::move(counts)); }
AllocatorPtr within_layer(WithinLayer counts) { return std::make_shared<CountsWithinLayer>(std::move(counts)); }
AllocatorPtr across_layers(AcrossLayers counts) { return std::make_shared<CountsAcrossLayers>(std::move(counts)); }

AllocatorPtr counts_of(std::shared_ptr<const ConfiguredPolicy> policy, bool has_budget, SlotDivision divide,
                       bool over_layers) {
  return std::make_shared<CountsOfOther>(std::move(policy), has_budget, std::move(divide), over_layers);
}

AllocatorPtr sets_of(std::shared_ptr<const ConfiguredPolicy> policy, Change change) {
  return std::make_shared<SetsOfOther>(std::move(policy), std::move(change));
}

}  // namespace kvreplay
