#include <memory>
#include <string>

#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/selectors/redundancy.h"
#include "policies/sharing/sharing.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

/// Where kept tokens stand.
enum class Place { automatic, original, cache };

constexpr Choice<Place> place_words[] = {
    {"auto", Place::automatic}, {"original", Place::original}, {"cache", Place::cache}};

/// "auto", or a value that the user gave.
const std::string automatic = "auto";

std::string normal_schedule(std::string_view text) {
  const std::unique_ptr<PlanPart> part = make_part(PartKind::schedule, text);
  const std::string_view name = text.substr(0, text.find('('));
  if (name == "once") return "once";
  if (name != "threshold")
    throw Error{Refusal::usage, "sca:schedule", "unknown value", "once, or threshold(PEAK,KEEP)", std::string(text)};
  const Parameters values = part->parameters();
  return "threshold(" + values.find("peak")->text() + "," + values.find("keep")->text() + ")";
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
          "the tokens least like those that stay: similarity of keys and values of the last layer, for all layers",
      .paper = "SCA, eq. 1, section 4 and algorithm 1",
      .score = "none: while fewer than B stay, the token least similar to those that do joins them, eq. 1",
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
          "at the end of the prompt, or whenever PEAK tokens are held, down to KEEP; no budget binds that");
    p.add("recent", recent, "auto, tokens 0..P, or a fraction 0.0..1.0 of the budget", normal_recent,
          "last tokens that always stay; auto: 0.25, at least 1, or at a threshold 128", UpTo::prompt);
    p.add<Place>("positions", positions, place_words,
                 "where kept tokens stand; auto: original, or at a threshold cache");
    redundancy.parameters(p);
    p.add("sinks", sinks, "auto, or 0..P", normal_sinks, "first tokens that always stay; auto: 0, with objective=max 4",
          UpTo::prompt);
    const auto read = p.of_part("share");
    p.add("layer", layer, any_layer, "the layer whose set all layers use (share=all); -1 is the last one");
    p.add("share", share, "all, or 1..L", normal_share,
          "of so many neighbouring layers the last one selects for all of them", UpTo::layers);
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
      throw Error{Refusal::usage, "sca", "nothing stays that others could be like", "recent or sinks of 1 or more",
                  "0"};
    make_part(PartKind::schedule, schedule)->fill(plan);
    return plan;
  }
};

const Registered<Sca> registered;

}  // namespace
}  // namespace kvreplay
