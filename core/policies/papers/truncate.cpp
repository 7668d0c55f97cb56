#include "policies/policy.h"
#include "policies/selectors/rules.h"

namespace kvreplay {
namespace {

struct Truncate {
  static constexpr Card card{
      .name = "truncate",
      .summary =
          "the head and the tail of the prompt (their keys have seen the middle, which a cut text would not have)",
      .paper = "FINCH, section 6",
      .score = "none: the first ceil(B/2) and the last floor(B/2) tokens, beside a marked question",
      .family = Family::rule,
  };

  bool keep_question = true;

  void parameters(Parameters& p) {
    const auto read = p.of_part("select");
    p.add("keep_question", keep_question, "a marked question that ends the prompt stays whole, beside the two halves");
  }

  Plan plan() const { return {.select = head_and_tail(keep_question)}; }
};

const Registered<Truncate> registered;

}  // namespace
}  // namespace kvreplay
