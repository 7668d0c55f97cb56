#include "policies/text/structure.h"

#include <algorithm>

#include "policies/text/configured.h"
#include "policies/text/layer_ranges.h"

namespace kvreplay {
namespace {

using Pages = Structure::Pages;

constexpr Choice<Pages> pages_words[] = {
    {"layer", Pages::layer}, {"kv", Pages::kv}, {"query", Pages::query}, {"own", Pages::own}};

Pages pages_of(Heads heads) {
  return heads == Heads::layer ? Pages::layer : heads == Heads::kv ? Pages::kv : Pages::query;
}

}  // namespace

void Structure::parameters(Parameters& p) {
  p.add("page", page, IntRange{.least = 1}, "tokens per page");
  p.add<Pages>("heads", heads, pages_words,
               "page tables: one per layer, per KV head, per query head, or with the policy's own granularity");
}

Structure Structure::parse(std::string_view text) {
  Structure structure;
  Parameters parameters{"--structure"};
  structure.parameters(parameters);
  parameters.set_list(text, "page=16,heads=layer");
  return structure;
}

std::string Structure::around(const std::string& policy) const {
  const ConfiguredPolicy plain = ConfiguredPolicy::parse(policy);
  if (plain.name() == layer_ranges_name)
    throw Error{Refusal::usage, plain.name(), "has a separate plan for each range of layers",
                "parts in the policies of the ranges, as in layers:0-14=(h2o:select=chunks),15-29=snapkv",
                "--structure"};
  std::string text = policy + (plain.name() == policy ? ":" : ",") + "select=chunks,chunk=" + std::to_string(page) +
                     ",window_mode=whole";
  // A policy that can score for these heads does; of any other the rows' scores are added up.
  constexpr int some_layers = 2;
  const Heads own_heads = plain.plans(some_layers).front().plan.grouping.heads;
  const bool chooses = plain.parameters().find("heads") != nullptr;
  if (heads != Pages::own && (chooses || pages_of(own_heads) != heads))
    text += std::string(",heads=") + std::ranges::find(pages_words, heads, &Choice<Pages>::value)->word;
  ConfiguredPolicy::parse(text);
  return text;
}

}  // namespace kvreplay
