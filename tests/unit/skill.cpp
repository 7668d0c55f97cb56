#include "analysis/skill.h"

#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <sstream>

#include "analysis/table.h"

namespace kvreplay {
namespace {

CellRecord cell(const std::string& id, double recall, double oracle) {
  CellRecord made{.id = id, .role = "asked", .policy = id, .label = id, .budget = "0.5"};
  made.values = {{{"attention_recall", ""}, Values(1, 1, recall)},
                 {{"attention_recall", "oracle"}, Values(1, 1, oracle)}};
  made.trace = "t";
  made.state = CellState::done;
  return made;
}

CellRecord twin(const std::string& id, double recall, const std::string& seed = "0") {
  CellRecord made = cell("twin of " + id + ", " + seed, recall, 0.9);
  made.role = "control";
  made.twin_of = id;
  made.policy = "random-twin";
  made.label = "random-twin:of=(" + id + ")";
  return made;
}

TEST(Skill, ByHand) {
  const std::vector<CellRecord> cells{cell("good", 0.8, 0.9),   twin("good", 0.5),       cell("worse", 0.4, 0.9),
                                      twin("worse", 0.5),       cell("same", 0.5, 0.75), twin("same", 0.5),
                                      cell("alone", 0.8, 0.9),  cell("bound", 0.9, 0.9), twin("bound", 0.9),
                                      cell("two", 0.7, 0.8),    twin("two", 0.5, "0"),   twin("two", 0.7, "1"),
                                      cell("failed", 0.7, 0.8), twin("failed", NAN)};
  const std::map<std::string, double> all = skills(cells);
  EXPECT_EQ(all.size(), 6U) << "one has no twin";
  EXPECT_DOUBLE_EQ(all.at("good"), 0.75);
  EXPECT_DOUBLE_EQ(all.at("worse"), -0.25);
  EXPECT_EQ(all.at("same"), 0);
  EXPECT_NEAR(all.at("two"), 0.5, 1e-12) << "of two twins, their mean";
  EXPECT_TRUE(std::isnan(all.at("bound"))) << "oracle - twin <= 1e-9";
  EXPECT_TRUE(std::isnan(all.at("failed")));
  EXPECT_TRUE(skills(std::vector{cell("alone", 0.8, 0.9)}).empty());
}

RunSummary run_of(std::vector<CellRecord> cells) {
  RunSummary summary;
  summary.traces = {{.name = "t", .layers = 1, .treated = {0}}};
  summary.cells = std::move(cells);
  return summary;
}

using Words = std::vector<std::string>;

/// The words of a policy's line.
Words words_of(const std::string& text, const std::string& policy) {
  const std::size_t begin = text.find("\n" + policy + " ") + 1;
  std::istringstream line(text.substr(begin, text.find('\n', begin) - begin));
  return {std::istream_iterator<std::string>(line), {}};
}

const char* const footnote =
    "\nskill = (recall - random twin) / (oracle - random twin), at the same token counts: 0 = random, 1 = best\n";

TEST(SkillInTheTable, StandsBehindRecallAndTwinsAreNotPrinted) {
  const std::string text =
      table(run_of({cell("good", 0.8, 0.9), cell("alone", 0.7, 0.9), twin("good", 0.5)}), {.wide = true});
  EXPECT_EQ(words_of(text, "policy"), (Words{"policy", "heads", "kept", "recall", "skill", "select"})) << text;
  EXPECT_EQ(words_of(text, "good"), (Words{"good", "0.0", "0.800*", "0.750", "0", "us"})) << text;
  EXPECT_EQ(words_of(text, "alone"), (Words{"alone", "0.0", "0.700", "-", "0", "us"})) << text;
  EXPECT_EQ(text.find("random-twin"), std::string::npos) << text;
  EXPECT_NE(text.find(footnote), std::string::npos) << text;
}

TEST(SkillInTheTable, IsNotThereWithoutTwins) {
  const std::string text = table(run_of({cell("good", 0.8, 0.9), cell("alone", 0.7, 0.9)}));
  EXPECT_EQ(text.find("skill"), std::string::npos) << text;
}

TEST(SkillInTheTable, APolicyThatDoesNotBeatItsTwinIsNeverMarked) {
  const std::string text = table(run_of(
      {cell("luck", 0.8, 0.9), cell("good", 0.7, 0.9), cell("alone", 0.6, 0.9), twin("luck", 0.8), twin("good", 0.5)}));
  EXPECT_EQ(text.find("0.800*"), std::string::npos) << text;
  EXPECT_NE(text.find("0.700*"), std::string::npos) << "the best of the others\n" << text;
  const std::string none =
      table(run_of({cell("luck", 0.8, 0.9), cell("worse", 0.7, 0.9), twin("luck", 0.8), twin("worse", 0.75)}));
  EXPECT_EQ(none.find('*'), std::string::npos) << none;
  const std::string undefined = table(run_of({cell("best", 0.9, 0.9), cell("good", 0.7, 0.9), twin("best", 0.9)}));
  EXPECT_NE(undefined.find("0.900*"), std::string::npos) << "skill is undefined\n" << undefined;
}

TEST(SkillInTheTable, ATwinThatWasAskedForIsARow) {
  CellRecord asked = twin("good", 0.5);
  asked.role = "asked";
  const std::string text = table(run_of({cell("good", 0.8, 0.9), asked}));
  EXPECT_NE(text.find("\nrandom-twin:of=(good) "), std::string::npos) << text;
}

}  // namespace
}  // namespace kvreplay
