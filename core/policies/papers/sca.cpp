#include <memory>
#include <string>

#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/selectors/redundancy.h"
#include "policies/sharing/sharing.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

/// Positions of kept tokens.
enum class Place { automatic, original, cache };

constexpr Choice<Place> place_words[] = {
    {"auto", Place::automatic}, {"original", Place::original}, {"cache", Place::cache}};

/// The value of parameters whose default depends on other parameters.
const std::string automatic = "auto";

std::string normal_schedule(std::string_view text) {
  const std::unique_ptr<PlanPart> part = make_part(PartKind::schedule, text);
  const std::string_view name = text.substr(0, text.find('('));
  if (name == "once") return "once";
  if (name != "threshold")
    throw Error{Refusal::usage, "sca:schedule", "unknown value", "once, or threshold(PEAK,KEEP)", std::string(text)};
  const Parameters values = part->parameters();
  const bool whole_prompt = values.find("whole_prompt")->text() == "true";
  return "threshold(" + values.find("peak")->text() + "," + values.find("keep")->text() +
         (whole_prompt ? ",true)" : ")");
}

std::string normal_recent(std::string_view text) {
  return text == automatic ? automatic : Amount::parse("sca:recent", text).text();
}

std::string normal_sinks(std::string_view text) {
  return text == automatic ? automatic : std::to_string(parse_int("sca:sinks", text, 0));
}

std::string normal_share(std::string_view text) {
  return text == "all" ? "all" : std::to_string(parse_int("sca:share", text, 1));
}

struct Sca {
  static constexpr Card card{
      .name = "sca",
      .summary =
          "Greedy redundancy elimination by cosine similarity of keys and values (last layer; one set for all layers)",
      .paper = "SCA, eq. 1, section 4 and algorithm 1",
      .score = "none: while fewer than B tokens are kept, adds the token least similar to the kept ones, eq. 1",
      .family = Family::geometry,
  };

  std::string schedule = "once";
  std::string recent = automatic;
  Place positions = Place::automatic;
  std::string sinks = automatic;
  Redundancy redundancy = {};
  int layer = -1;
  std::string share = "all";

  void parameters(Parameters& p) {
    p.add("schedule", schedule, "once | threshold(PEAK,KEEP)", normal_schedule,
          "once after the prompt, or down to KEEP tokens whenever PEAK are resident, which ignores the budget");
    p.add("recent", recent, "auto, tokens 0..P, or a fraction 0.0..1.0 of the budget", normal_recent,
          "recent window: last tokens, always kept; auto: 0.25 (at least 1 token), or 128 with schedule=threshold",
          UpTo::prompt);
    p.add<Place>("positions", positions, place_words,
                 "positions of kept tokens; auto: original, or cache with schedule=threshold");
    redundancy.parameters(p);
    p.add("sinks", sinks, "auto, or 0..P", normal_sinks,
          "attention sinks: first tokens, always kept; auto: 0, or 4 with objective=max", UpTo::prompt);
    const auto read = p.of_part("share");
    p.add("layer", layer, any_layer, "layer whose set all layers use (share=all); -1 is the last layer");
    p.add("share", share, "all, or 1..L", normal_share,
          "number of adjacent layers that use the set of the last of them", UpTo::layers);
    p.preset({"sca", "SCA, section 5.1", {{"schedule", "threshold(4000,2000)"}}});
    p.preset({"l-eval", "SCA on L-Eval", {{"schedule", "threshold(4000,3000)"}}});
  }

  Plan plan() const {
    const bool once = schedule == "once";
    const bool most = redundancy.objective == Objective::most;
    Plan plan{
        .grouping = {.heads = Heads::layer},
        .protect = {.sinks = sinks == automatic ? (most ? 4 : 0) : parse_int("sca:sinks", sinks),
                    .recent = recent != automatic ? Amount::parse("sca:recent", recent)
                              : once              ? Amount::fraction(0.25)
                                                  : Amount::tokens(128),
                    .least_recent = 1},
        .select = redundancy.selector(),
        .share = share == "all" ? one_layer(layer) : last_of(parse_int("sca:share", share)),
        .store = store_at(positions == Place::cache || (positions == Place::automatic && !once) ? Positions::cache
                                                                                                : Positions::original),
    };
    if (plan.protect.sinks == 0 && plan.protect.recent.count == 0)
      throw Error{Refusal::usage, "sca", "no protected tokens to compare with", "recent or sinks of 1 or more", "0"};
    make_part(PartKind::schedule, schedule)->fill(plan);
    return plan;
  }
};

const Registered<Sca> registered;

}  // namespace
}  // namespace kvreplay
