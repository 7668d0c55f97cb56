#include <algorithm>
#include <numeric>
#include <set>

#include "analysis/metrics/metric.h"
#include "listed_names.h"

namespace kvreplay {
namespace {

struct Title {
  const char* title;
  MetricName metric;
};

/// In the order of the columns of a table.
const std::vector<Title>& titles() {
  static const std::vector<Title> all{
      {"kept", {"kept_tokens", ""}},
      {"held", {"held_tokens", ""}},
      {"KiB", {"kv_bytes", ""}},
      {"recall", {"attention_recall", ""}},
      {"att.cos", {"attention_cosine", ""}},
      {"att.l1", {"attention_l1", ""}},
      {"out.cos", {"output_cosine", ""}},
      {"out.err", {"output_error", "pooled"}},
      {"head.err", {"output_error", ""}},
      {"kv.l1", {"kv_l1_loss", ""}},
      {"jaccard", {"jaccard_adjacent", "mean"}},
      {"needle", {"span_recall", "needle.mean"}},
      {"answer", {"span_recall", "answer.mean"}},
      {"question", {"span_recall", "question.mean"}},
      {"select", {"select_seconds", ""}},
      {"live.kld", {"kld", ""}},
      {"live.top1", {"same_top_p", ""}},
      {"live.nll", {"nll_increase", ""}},
      {"live.answer", {"contains", ""}},
  };
  return all;
}

std::vector<std::string> variant_names(const MetricCard& card) {
  std::vector<std::string> names;
  for (const MetricVariant& variant : card.variants) names.push_back(variant.name);
  return names;
}

const MetricVariant* variant_of(const MetricCard& card, std::string_view name) {
  for (const MetricVariant& variant : card.variants)
    if (variant.name == name) return &variant;
  return nullptr;
}

bool is_of_span(const MetricVariant& variant) {
  return std::holds_alternative<OfSpan>(variant.measure) || std::holds_alternative<OfSpanInAllLayers>(variant.measure);
}

/// "needle.any" is the variant "any" of the span "needle".
std::string_view without_span(std::string_view variant) { return variant.substr(variant.rfind('.') + 1); }

void add_variants(const MetricCard& card, std::string_view asked, std::vector<MetricName>& names) {
  const MetricName name{card.name, std::string(asked)};
  if (find_variant(name) != nullptr || (is_live(card) && !asked.empty())) return names.push_back(name);
  if (!asked.empty())
    throw Error{Refusal::usage, card.name, "unknown variant", nearest(asked, variant_names(card)), std::string(asked)};
  for (const MetricVariant& variant : card.variants) names.push_back({card.name, variant.name});
}

}  // namespace

double sum(std::span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

double mean(std::span<const double> values) { return sum(values) / static_cast<double>(values.size()); }

double harmonic_mean(std::span<const double> values) {
  double reciprocals = 0;
  for (const double value : values) reciprocals += 1.0 / value;
  return static_cast<double>(values.size()) / reciprocals;
}

Registry<MetricCard>& metrics() {
  static Registry<MetricCard> registry{"metric"};
  return registry;
}

const MetricCard& metric_card(std::string_view name) {
  const MetricCard* const card = metrics().find(name);
  if (card == nullptr)
    throw Error{Refusal::usage, name.empty() ? "metric" : std::string(name),
                name.empty() ? "no name" : "unknown metric",
                nearest_listed(name, metrics().names(), "kvreplay metrics"), std::string(name)};
  return *card;
}

std::string why_no_sample_of_queries(const Measure& measure) {
  if (std::holds_alternative<OfBestSet>(measure)) return "reads the attention of all eval queries";
  if (std::holds_alternative<OfEvalAttention>(measure)) return "is a quotient of sums over all eval queries";
  const auto* of = std::get_if<OfMoments>(&measure);
  return of != nullptr && of->over_queries != nullptr ? "is a percentile over all eval queries" : "";
}

std::string why_no_sample_of_heads(const Measure& measure) {
  if (std::holds_alternative<OfProjectedOutput>(measure)) return "reads the outputs of all heads";
  return std::holds_alternative<OfAllQueries>(measure) ? "is measured in a pass over all heads" : "";
}

std::string why_no_sample_of_layers(const Measure& measure) {
  if (std::holds_alternative<OfSpan>(measure)) return "differs in few layers, which a sample can miss";
  const bool combines = std::holds_alternative<OfCell>(measure) || std::holds_alternative<OfSpanInAllLayers>(measure);
  return combines ? "combines the kept sets of all layers" : "";
}

bool is_mean_over_queries(const Measure& measure) {
  const auto* of = std::get_if<OfMoments>(&measure);
  return (of != nullptr && of->over_queries == nullptr) || std::holds_alternative<OfPooledMoments>(measure) ||
         std::holds_alternative<OfProjectedOutput>(measure) || std::holds_alternative<OfLayerAtQuery>(measure);
}

const char* word(Better better) {
  return better == Better::higher ? "higher" : better == Better::lower ? "lower" : "neither";
}

const MetricVariant* find_variant(const MetricName& name) {
  const MetricCard* card = metrics().find(name.metric);
  if (card == nullptr) return nullptr;
  if (const MetricVariant* variant = variant_of(*card, name.variant)) return variant;
  const MetricVariant* of_span = variant_of(*card, without_span(name.variant));
  return of_span != nullptr && is_of_span(*of_span) ? of_span : nullptr;
}

bool is_of_span(const MetricName& name) {
  const MetricVariant* const variant = find_variant(name);
  return variant != nullptr && is_of_span(*variant);
}

bool is_live(const MetricCard& card) { return std::holds_alternative<OfLiveModel>(card.variants.front().measure); }

bool is_live(const MetricName& name) {
  const MetricCard* const card = metrics().find(name.metric);
  return card != nullptr && is_live(*card);
}

Better better_of(const MetricCard& card, const MetricVariant& variant) { return variant.better.value_or(card.better); }

Better better_of(const MetricName& name) {
  const MetricCard& card = metrics().get(name.metric);
  const MetricVariant* const variant = find_variant(name);
  return variant != nullptr ? better_of(card, *variant) : card.better;
}

const std::string& unit_of(const MetricCard& card, const MetricVariant& variant) {
  return variant.unit ? *variant.unit : card.unit;
}

const std::string& unit_of(const MetricName& name) {
  const MetricCard& card = metrics().get(name.metric);
  const MetricVariant* variant = find_variant(name);
  return variant != nullptr ? unit_of(card, *variant) : card.unit;
}

std::string title_of(const MetricName& name) {
  const auto found = std::ranges::find(titles(), name, &Title::metric);
  if (found != titles().end()) return found->title;
  return is_live(name) ? std::string(live_prefix) + name.text() : "";
}

std::optional<MetricName> find_title(std::string_view title) {
  const auto found = std::ranges::find(titles(), title, &Title::title);
  if (found != titles().end()) return found->metric;
  if (!title.starts_with(live_prefix)) return std::nullopt;
  title.remove_prefix(live_prefix.size());
  const std::size_t colon = std::min(title.find(':'), title.size());
  const MetricName name{std::string(title.substr(0, colon)),
                        std::string(title.substr(std::min(colon + 1, title.size())))};
  return is_live(name) ? std::optional(name) : std::nullopt;
}

std::vector<std::string> metric_titles() {
  std::vector<std::string> all;
  for (const Title& one : titles()) all.emplace_back(one.title);
  return all;
}

std::vector<MetricName> parse_metrics(std::string_view text) {
  std::vector<MetricName> names;
  if (text.empty()) {
    for (const std::string& name : metrics().names())
      for (const MetricVariant& variant : metrics().get(name).variants)
        if (variant.by_default) names.push_back({name, variant.name});
    return names;
  }
  for (const std::string_view piece : split_list("metric", text)) {
    if (const std::optional<MetricName> titled = find_title(piece)) {
      names.push_back(*titled);
      continue;
    }
    const std::size_t colon = std::min(piece.find(':'), piece.size());
    const MetricCard& card = metric_card(piece.substr(0, colon));
    add_variants(card, colon == piece.size() ? "" : piece.substr(colon + 1), names);
  }
  return names;
}

MetricName parse_metric(const std::string& where, const std::string& text) {
  const std::vector<MetricName> names = parse_metrics(text);
  if (names.size() != 1) throw Error{Refusal::usage, where, "not one metric", "NAME[:VARIANT]", text};
  return names.front();
}

std::vector<MetricName> parse_replayed_metrics(const std::string& where, std::string_view text) {
  std::vector<MetricName> names = parse_metrics(text);
  for (const MetricName& name : names)
    if (is_live(name))
      throw Error{Refusal::usage, where, name.text() + " is measured in the live model",
                  "metrics of a replay; run kvreplay live RUN --model MODEL after it"};
  return names;
}

std::vector<MetricName> metrics_of_trace(std::span<const MetricName> asked, std::span<const Span> spans, int boundary) {
  std::set<MetricName> names;
  const auto add = [&](const MetricName& name) {
    const MetricVariant& variant = *find_variant(name);
    if (!is_of_span(variant)) {
      names.insert(name);
      return;
    }
    for (const Span& span : spans) {
      const std::string spelled = span.name + "." + variant.name;
      const bool first = &span == find_span(spans, span.name);
      if (first && span.end <= boundary && (name.variant == variant.name || name.variant == spelled))
        names.insert({name.metric, spelled});
    }
  };
  for (const MetricName& name : asked) add(name);
  for (const MetricVariant& variant : metrics().get("jaccard_adjacent").variants)
    add({"jaccard_adjacent", variant.name});
  if (names.contains({"attention_recall", ""})) add({"attention_recall", "oracle"});
  return {names.begin(), names.end()};
}

}  // namespace kvreplay
