// Every registered policy with every schedule, store, structure and granularity that it accepts, and with every other
// part: the same bits twice, from memory that holds other bytes, alone and beside all others. A new file joins by
// itself.

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

#include "policies/plan_part.h"
#include "policies/text/structure.h"
#include "recorded_run.h"
#include "tests/table_file.h"

namespace kvreplay {
namespace {

constexpr int budget = 12;

const Trace& trace() {
  static const TemporaryTrace file([] {
    SynthOptions options = synth_defaults("gaussian");
    options.layers = 2;
    options.query_heads = 4;
    options.kv_heads = 2;
    options.head_dim = 32;  // whole blocks of every number format
    options.prefill = 40;
    options.continuation = 3;
    options.repeated = 16;
    return options;
  }());
  static const Trace opened = file.open();
  return opened;
}

/// What a part's own values are too large for on so short a prompt.
std::string sized(const std::string& part) {
  static const std::map<std::string, std::string> values{
      {"schedule=every", "schedule=every(7)"},
      {"schedule=threshold", "schedule=threshold(20,9)"},
      {"schedule=decoding", "schedule=decoding(2)"},
      {"schedule=question-blocks", "schedule=question-blocks(9),question=last,question_tokens=3"},
      {"select=chunks", "select=chunks,chunk=5"},
      {"store=quantised", "store=quantised,group=4,residual=4"},
      {"store=kv", "store=kv(q8_0,q4_0)"},
      {"store=fewer-channels", "store=fewer-channels,recent=4"},
      {"store=merged-values", "store=merged-values,merge=3"}};
  const auto found = values.find(part);
  return found == values.end() ? part : found->second;
}

/// And what a policy cannot do without.
std::string given(const std::string& policy) {
  static const TemporaryFile table(npy(dictionary("<f8", "(2, 4)"), numbers<double>({1, 2, 3, 4, 4, 3, 2, 1})));
  if (policy == "dms") return policy + ":base=(knorm),threshold=-4,recent=4";
  if (policy == "head-kv") return policy + ":table=" + table.path();
  if (policy == "critical-kv") return policy + ":wo=none";
  if (policy == "random-twin") return policy + ":of=(h2o)";
  if (policy == "finch") return policy + ":blocks=7,question=last,question_tokens=3";
  return policy;
}

std::vector<std::string> parts_of(PartKind kind) {
  const std::string place = std::ranges::find(part_kinds, kind, &Choice<PartKind>::value)->word;
  std::vector<std::string> all;
  for (const std::string& name : parts(kind).names()) all.push_back(sized(place + "=" + name));
  return all;
}

bool accepted(const std::string& policy) {
  try {
    check_policy(trace(), default_conditions(trace()), ConfiguredPolicy::parse(policy), budget);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Policies with such a part, and without.
std::vector<std::string> with_each(const std::vector<std::string>& policies, const std::vector<std::string>& parts) {
  std::vector<std::string> all = policies;
  for (const std::string& policy : policies)
    for (const std::string& part : parts) {
      const std::string text = policy + (policy.find(':') == std::string::npos ? ":" : ",") + part;
      if (accepted(text)) all.push_back(text);
    }
  return all;
}

std::vector<std::string> with_each_structure(const std::vector<std::string>& policies) {
  std::vector<std::string> all = policies;
  for (const std::string& policy : policies)
    for (const char* pages : {"page=5,heads=own", "page=4,heads=layer"}) try {
        const std::string text = Structure::parse(pages).around(policy);
        if (accepted(text)) all.push_back(text);
      } catch (const Error&) {
        continue;  // its parts are taken
      }
  return all;
}

std::vector<std::string> crossed(const std::string& policy) {
  const std::vector<std::string> by_schedule = with_each({policy}, parts_of(PartKind::schedule));
  const std::vector<std::string> by_heads = with_each(by_schedule, {"heads=kv", "heads=query", "heads=layer"});
  std::vector<std::string> all = with_each_structure(with_each(by_heads, parts_of(PartKind::store)));
  for (const std::string& text :
       with_each(by_schedule, {"sinks=3", "protect=(sinks=3,recent=2)", "window_at=question"}))
    if (std::ranges::find(all, text) == all.end()) all.push_back(text);
  for (const PartKind kind : {PartKind::score, PartKind::select, PartKind::allocate, PartKind::share})
    for (const std::string& text : with_each(by_heads, parts_of(kind)))
      if (std::ranges::find(all, text) == all.end()) all.push_back(text);
  return all;
}

/// Memory that is asked for holds such bytes until it is written.
class Filled {
 public:
  explicit Filled(int byte) { mallopt(M_PERTURB, byte); }
  Filled(const Filled&) = delete;
  Filled& operator=(const Filled&) = delete;
  ~Filled() { mallopt(M_PERTURB, 0); }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

void expect_same(const RecordedRun& alone, const RecordedRun& run, int cell) {
  for (const auto& [key, selection] : alone.selections) {
    const RecordedRun::CellLayer there{cell, key.second};
    const LayerSelection& other = run.selections.at(there);
    EXPECT_EQ(selection.set, other.set);
    EXPECT_EQ(selection.evicted_at, other.evicted_at);
    EXPECT_EQ(selection.slots, other.slots);
    EXPECT_TRUE(same_bits(alone.moments.at(key), run.moments.at(there)));
    ASSERT_EQ(alone.compared_at.contains(key), run.compared_at.contains(there));
    if (alone.compared_at.contains(key)) {
      EXPECT_TRUE(same_bits(alone.compared_at.at(key), run.compared_at.at(there)));
    }
    ASSERT_EQ(alone.general_at.contains(key), run.general_at.contains(there)) << "the same query is checked";
    if (alone.general_at.contains(key)) {
      EXPECT_EQ(alone.general_at.at(key), run.general_at.at(there));
      EXPECT_TRUE(same_bits(alone.general.at(key), run.general.at(there)));
    }
    ASSERT_EQ(alone.stored.contains(key), run.stored.contains(there));
    if (alone.stored.contains(key)) {
      EXPECT_TRUE(same_bits(alone.stored.at(key).keys, run.stored.at(there).keys));
      EXPECT_TRUE(same_bits(alone.stored.at(key).values, run.stored.at(there).values));
    }
  }
}

/// Where some cells may fail, such as those that divide by scores below 0.
struct CrossedRun : RecordedRun {
  std::map<int, std::string> failures;
  void failed(int cell, const Error& error) override { failures[cell] = error.what(); }
};

CrossedRun crossed_run(const std::vector<std::string>& all, int threads) {
  std::vector<Cell> cells;
  for (const std::string& policy : all)
    cells.push_back(
        {.policy = ConfiguredPolicy::parse(policy), .budget = budget, .checked_at = std::hash<std::string>{}(policy)});
  CrossedRun run;
  replay(*tested_backend(threads), trace(), default_conditions(trace()), cells, run);
  return run;
}

class CrossedParts : public testing::TestWithParam<std::string> {};

TEST_P(CrossedParts, HaveTheSameBitsTwiceAloneAndInCompany) {
  const std::string policy = given(GetParam());
  ASSERT_TRUE(accepted(policy));
  const std::vector<std::string> all = crossed(policy);
  CrossedRun together;
  {
    const Filled filled(0x55);
    together = crossed_run(all, 2);
  }
  std::size_t failed = 0;
  const Filled filled(0xA9);
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(all[i]);
    const auto cell = static_cast<int>(i);
    const CrossedRun alone = crossed_run({all[i]}, 1);
    ASSERT_EQ(alone.failures.empty(), !together.failures.contains(cell));
    if (!alone.failures.empty()) {
      EXPECT_EQ(alone.failures.at(0), together.failures.at(cell));
      ++failed;
      continue;
    }
    expect_same(alone, together, cell);
    for (const auto& [key, scores] : alone.scores) {
      EXPECT_TRUE(std::ranges::all_of(scores.values(), [](double score) { return !std::isnan(score); }));
    }
  }
  EXPECT_LT(2 * failed, all.size());
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Registry, CrossedParts, testing::ValuesIn(policies().names()), test_name);

}  // namespace
}  // namespace kvreplay
