// Experiments, what they exclude, lists of traces and shards.

#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "policies/text/yaml_file.h"
#include "tools/cli/exclusion.h"
#include "tools/cli/experiment.h"
#include "tools/cli/replay_traces.h"
#include "tools/cli/trace_list.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

using Texts = std::vector<std::string>;

class Experiments : public TraceFiles {
 protected:
  std::string written(const std::string& text, const std::string& name = "sweep.yaml") {
    std::ofstream(file(name), std::ios::binary) << text;
    return file(name).string();
  }

  Asked asked_by(const std::string& text, Texts words = {}) {
    words.insert(words.begin(), "@" + written(text));
    return asked(Arguments(replay_command, "kvreplay", words));
  }

  /// What `call` throws, without the folder.
  template <class Call>
  std::string refusal_of(Call call) {
    try {
      call();
      return "accepted";
    } catch (const Error& error) {
      std::string line = error.what();
      for (std::size_t at; (at = line.find(folder().string() + "/")) != std::string::npos;)
        line.erase(at, folder().string().size() + 1);
      return line;
    }
  }

  std::string refusal(const std::string& text) {
    return refusal_of([&] { asked_by(text); });
  }

  void make(const std::string& name, std::size_t bytes = 1) { written(std::string(bytes, 'x'), name); }
};

TEST_F(Experiments, KeysAreOptions) {
  const Asked all = asked_by(
      "traces: a.h5\npolicies:\n  - h2o\n  - {policy: snapkv, window: [3, 4]}\nbudgets: [0.1, 512]\n"
      "metrics: [attention_recall, kv_bytes]\nsave: [scores, attention]\neval: last:3\nno-text: true\n"
      "exclude: [{budget: 512, window: 4}, {policy: [h2o, snapkv], budget: 0.1}]\nseed: 7\noutput: out\n");
  const Arguments& arguments = all.arguments;
  EXPECT_EQ(arguments.all("policy"), (Texts{"h2o", "snapkv:window=3", "snapkv:window=4"}));
  EXPECT_EQ(arguments.all("budget"), (Texts{"0.1", "512"}));
  EXPECT_EQ(arguments.all("exclude"), (Texts{"budget=512,window=4", "h2o:budget=0.1", "snapkv:budget=0.1"}));
  EXPECT_EQ(arguments.all("metrics"), (Texts{"attention_recall", "kv_bytes"}));
  EXPECT_EQ(arguments.text("save"), "scores,attention");
  EXPECT_EQ(arguments.text("eval"), "last:3");
  EXPECT_TRUE(arguments.given("no-text"));
  EXPECT_EQ(arguments.seed("seed"), 7U);
  EXPECT_EQ(arguments.text("output"), file("out").string());
  EXPECT_EQ(arguments.text("detail"), "layer");
  ASSERT_EQ(all.traces.size(), 1U);
  EXPECT_EQ(all.traces[0].path, file("a.h5").string());
}

TEST_F(Experiments, TheCommandLineWins) {
  const std::string text = "traces: a.h5\npolicies: h2o\nbudgets: [0.1, 512]\ndetail: head\nno-text: false\n";
  const Asked all = asked_by(text, {"b.h5", "--budget", "3", "--detail", "summary"});
  EXPECT_EQ(all.arguments.all("policy"), Texts{"h2o"});
  EXPECT_EQ(all.arguments.all("budget"), Texts{"3"});
  EXPECT_EQ(all.arguments.text("detail"), "summary");
  EXPECT_FALSE(all.arguments.given("no-text"));
  EXPECT_EQ(all.arguments.operands(), Texts{"b.h5"});
  EXPECT_EQ(all.arguments.command_line().back(), "summary") << "the record holds what was typed";
}

TEST_F(Experiments, TracesOfOneNameAreRefusedInEveryShard) {
  const std::string text = "traces: [a.h5, b.h5, x/a.h5]\npolicies: h2o\nbudgets: 4\n";
  for (const char* shard : {"1/3", "2/3", "3/3"})
    EXPECT_EQ(refusal_of([&] { asked_by(text, {"--shard", shard}); }),
              "x/a.h5: another trace has the same name: expected unique trace names, found a");
  EXPECT_EQ(asked_by("traces: [a.h5, b.h5, c.h5]\n", {"--shard", "1/3"}).traces.size(), 1U);
}

TEST_F(Experiments, FilesOfPoliciesLieBesideTheFile) {
  std::filesystem::create_directory(file("in"));
  written("- q-filter:filters=g.npy\n- h2o\n", "in/mine.yaml");
  const Asked all =
      asked_by("traces: a.h5\npolicies: ['local,@in/mine.yaml', 'q-filter:filters=f.npy', '/all/f.npy']\n");
  EXPECT_EQ(all.arguments.all("policy"), (Texts{"local,q-filter:filters=" + file("g.npy").string() + ",h2o",
                                                "q-filter:filters=" + file("f.npy").string(), "/all/f.npy"}))
      << "files in a list of policies, too";
  EXPECT_EQ(refusal("traces: a.h5\npolicies:\n  - '@in/none.yaml'\n"),
            "sweep.yaml:3: in/none.yaml: cannot be read: expected a YAML file with policies");
  EXPECT_EQ(refusal("traces: a.h5\npolicies: 'h2o,,local'\n"),
            "sweep.yaml:2: policies: empty list element: expected a value beside each comma, found "
            "\"h2o,,local\"");
}

TEST_F(Experiments, AFolderWhoseNameWouldEndAFilesIsRefused) {
  for (const char* name : {"a,b", "lr=1", "(x", "x)", "a:b"}) {
    std::filesystem::create_directory(file(name));
    const auto asked_there = [&](const std::string& policies) {
      const Texts words{"@" + written("traces: a.h5\npolicies: '" + policies + "'\n", std::string(name) + "/e.yaml")};
      return asked(Arguments(replay_command, "kvreplay", words)).arguments.all("policy");
    };
    written("h2o\n", std::string(name) + "/mine.yaml");
    EXPECT_EQ(refusal_of([&] { asked_there("q-filter:filters=f.npy"); }),
              std::string(name) + "/e.yaml:2: " + name +
                  ": the name of this folder cannot be part of a policy: expected a name without any of ,=():, found "
                  "f.npy");
    EXPECT_EQ(asked_there("local,q-filter:filters=/f.npy"), Texts{"local,q-filter:filters=/f.npy"});
    EXPECT_EQ(asked_there("@mine.yaml"), Texts{"h2o"}) << "its content is what counts";
  }
}

TEST_F(Experiments, EveryWrongKeyIsNamedWithTheNearest) {
  EXPECT_EQ(refusal("trases: a.h5\n"), "sweep.yaml:1: unknown key trases: did you mean traces?");
  EXPECT_EQ(refusal("traces: a.h5\nbudgts: 3\npolices: h2o\n"),
            "sweep.yaml:2: unknown key budgts; polices at sweep.yaml:3: did you mean budgets? did you mean policies?");
  EXPECT_EQ(refusal("budgt: 3\n"), "sweep.yaml:1: unknown key budgt: did you mean budgets?");
  for (const char* key : {"force", "watch", "shard", "dry-run", "json", "progress", "figure", "quiet", "help"})
    EXPECT_TRUE(refusal(std::string(key) + ": 1\n").starts_with("sweep.yaml:1: unknown key")) << key;
}

TEST_F(Experiments, WrongTypesAreRefusedAtTheirLine) {
  EXPECT_EQ(refusal(""),
            "sweep.yaml: not an experiment: expected a mapping with the keys traces, policies, budgets, found nothing");
  EXPECT_EQ(
      refusal("- h2o\n"),
      "sweep.yaml:1: not an experiment: expected a mapping with the keys traces, policies, budgets, found a list");
  EXPECT_EQ(refusal("traces:\n  - a.h5\n  - {a: b}\n"),
            "sweep.yaml:3: traces: expected one value, or a list of values, found a mapping");
  EXPECT_EQ(refusal("budgets: []\n"),
            "sweep.yaml:1: budgets: expected one value, or a list of values, found an empty list");
  EXPECT_EQ(refusal("budgets:\npolicies: h2o\n"),
            "sweep.yaml:1: budgets: expected one value, or a list of values, found nothing");
  EXPECT_EQ(refusal("detail: [head]\n"), "sweep.yaml:1: detail: expected one value, found a list");
  EXPECT_EQ(refusal("no-text:\n"), "sweep.yaml:1: no-text: expected true or false, found nothing");
  EXPECT_EQ(refusal("sliding: teat\n"),
            "sweep.yaml:1: sliding: unknown value: expected one of skip, treat, found teat");
  EXPECT_EQ(refusal("exclude: {}\n"),
            "sweep.yaml:1: empty exclusion: expected a policy, a budget or a parameter, found an empty mapping");
  EXPECT_EQ(refusal("output: ''\n"), "sweep.yaml:1: output: expected a folder, found \"\"");
  EXPECT_EQ(refusal("exclude: 3\nexclude: 4\n"), "sweep.yaml:2: duplicate key: expected one value, found exclude");
  EXPECT_EQ(refusal("exclude:\n"),
            "sweep.yaml:1: empty exclusion: expected a policy, a budget or a parameter, found nothing");
}

TEST_F(Experiments, HostileFilesEndInOneLine) {
  std::string bomb = "a0: &a0 [x, x]\n";
  for (int i = 1; i < 30; ++i)
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [*a" + std::to_string(i - 1) + ", *a" +
            std::to_string(i - 1) + "]\n";
  EXPECT_TRUE(refusal(bomb).find("too") != std::string::npos) << refusal(bomb);
  EXPECT_EQ(refusal("policies: &a [*a]\n"), "sweep.yaml:1: too deeply nested: expected at most 32 levels, found more");
  EXPECT_TRUE(refusal(std::string(100'000, '[')).starts_with("sweep.yaml:1: not YAML: ")) << refusal("[[[");
  EXPECT_TRUE(refusal("policies: *nothing\n").starts_with("sweep.yaml:1: not YAML: "));
  EXPECT_EQ(refusal("{[a]: b}\n"), "sweep.yaml:1: invalid key: expected a scalar, found a list or mapping");
  std::string lists = "policies:\n  policy: snapkv\n";
  for (char key = 'a'; key < 'h'; ++key) lists += std::string("  ") + key + ": [1, 2, 3, 4, 5, 6, 7, 8, 9]\n";
  EXPECT_EQ(refusal("traces: a\n" + lists),
            "sweep.yaml:3: too many combinations: expected at most 10000 policies, found more");
  EXPECT_EQ(refusal(std::string(17 << 20, ' ')), "sweep.yaml: too large: expected at most 16 MiB, found more");
  EXPECT_EQ(
      refusal("!!python/object/apply:os.system ['touch x']\n"),
      "sweep.yaml:1: not an experiment: expected a mapping with the keys traces, policies, budgets, found a list");
}

std::vector<ConfiguredPolicy> some_policies() {
  std::vector<ConfiguredPolicy> all;
  for (const char* text : {"h2o", "snapkv:window=8,kernel=7", "snapkv:window=32,kernel=3"})
    all.push_back(ConfiguredPolicy::parse(text));
  return all;
}

/// The policies that an exclusion covers at a budget: "1,2".
std::string covered(const std::string& text, const std::string& budget = "0.1") {
  const Exclusion exclusion({text, "--exclude"});
  const std::vector<ConfiguredPolicy> policies = some_policies();
  std::string all;
  for (std::size_t i = 0; i < policies.size(); ++i)
    if (exclusion.covers(policies[i]) && exclusion.covers(Budget::parse(budget)))
      all += (all.empty() ? "" : ",") + std::to_string(i);
  return all;
}

TEST(Exclusions, CoverWhatHasAllTheirValues) {
  EXPECT_EQ(covered("snapkv"), "1,2");
  EXPECT_EQ(covered("snapkv:window=32"), "2");
  EXPECT_EQ(covered("snapkv:window=8"), "1");
  EXPECT_EQ(covered("snapkv:window=8,kernel=3"), "");
  EXPECT_EQ(covered("window=32"), "2");
  EXPECT_EQ(covered("budget=0.1"), "0,1,2");
  EXPECT_EQ(covered("budget=10%"), "0,1,2") << "the same budget, written otherwise";
  EXPECT_EQ(covered("budget=0.2"), "");
  EXPECT_EQ(covered("budget=512", "512"), "0,1,2");
  EXPECT_EQ(covered("h2o:budget=0.1"), "0");
  EXPECT_EQ(covered("h2o:budget=0.1", "0.1@seen"), "");
  EXPECT_EQ(covered("kernel=3,budget=0.1"), "2");
  EXPECT_EQ(covered("pool=max,window=8"), "1") << "a default counts";
  EXPECT_EQ(covered("window=never"), "");
  EXPECT_EQ(some_policies()[1].params(), ConfiguredPolicy::parse("snapkv:window=8,kernel=7").params());
}

TEST(Exclusions, LeaveThePoliciesAsTheyWere) {
  const ConfiguredPolicy policy = ConfiguredPolicy::parse("snapkv:window=8,kernel=3");
  const std::string before = policy.params();
  EXPECT_FALSE(Exclusion({"snapkv:window=9,kernel=5", "--exclude"}).covers(policy));
  EXPECT_THROW(Exclusion({"snapkv:kernel=4", "--exclude"}).covers(policy), Error);
  EXPECT_EQ(policy.params(), before);
}

TEST(Exclusions, OfNothingSayWhatIsKnown) {
  const auto why = [](const std::string& text) {
    return std::string(Exclusion({text, "--exclude"}).covers_nothing(some_policies()).what());
  };
  EXPECT_EQ(why("snapkw"), "--exclude: unknown policy: expected one of h2o, snapkv, found snapkw");
  EXPECT_EQ(why("snapkv:windw=3"), "--exclude: unknown key windw: did you mean window?");
  EXPECT_EQ(why("snapkv:bugdet=3"), "--exclude: unknown key bugdet: did you mean budget?");
  EXPECT_EQ(why("snapkv:window=3"),
            "--exclude: excludes no cell: expected values that some policy and budget have, found snapkv:window=3");
  for (const char* text : {"", "snapkv:", "snapkv:window", "=3", "window=", "budget=1,budget=2", "budget=x"})
    EXPECT_THROW(Exclusion({text, "--exclude"}), Error) << text;
}

TEST(Exclusions, SayWhoGaveThem) {
  for (const char* text : {"h2o:recent=abc", "budget=8@seen"}) {
    try {
      const Exclusion exclusion({text, "sweep.yaml:3: exclude", "sweep.yaml:3"});
      exclusion.covers(some_policies().front());
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("sweep.yaml:3: exclude: ")) << error.what();
    }
  }
}

class Lists : public Experiments {
 protected:
  Texts listed(const std::vector<std::string>& names) {
    std::vector<GivenValue> given;
    for (const std::string& name : names) given.push_back({name, name});
    Texts paths;
    for (const ListedTrace& trace : list_traces(given, folder()))
      paths.push_back(std::filesystem::path(trace.path).lexically_relative(folder()).string());
    return paths;
  }
};

TEST_F(Lists, FoldersAndGlobsAreSorted) {
  std::filesystem::create_directory(file("in"));
  for (const char* name : {"in/b.h5", "in/a.h5", "in/a.obs.h5", "in/note.txt", "in/c.h5.partial", "[x].h5", "x.h5"})
    make(name);
  EXPECT_EQ(listed({"in"}), (Texts{"in/a.h5", "in/b.h5"}));
  EXPECT_EQ(listed({"*"}), (Texts{"[x].h5", "in/a.h5", "in/b.h5", "x.h5"}));
  EXPECT_EQ(refusal_of([&] { listed({"in/*.txt"}); }), "in/*.txt: no such trace: expected files *.h5");
  EXPECT_EQ(listed({"in/[b-z].h5", "in/a.h5"}), (Texts{"in/b.h5", "in/a.h5"}));
  EXPECT_EQ(listed({"[x].h5"}), Texts{"[x].h5"}) << "a file that is there is no glob";
  EXPECT_EQ(listed({"not-there.h5"}), Texts{"not-there.h5"}) << "opening it says what is wrong";
  EXPECT_EQ(refusal_of([&] { listed({"in/*.hdf5"}); }), "in/*.hdf5: no such trace: expected files *.h5");
  std::filesystem::create_directory(file("empty"));
  EXPECT_EQ(refusal_of([&] { listed({"empty"}); }), "empty: no trace in this folder: expected files *.h5");
}

TEST_F(Lists, AManifestNamesItsTracesFromItsOwnFolder) {
  std::filesystem::create_directory(file("in"));
  const std::string hash(32, 'a'), other = "0123456789abcdef0123456789abcdef";
  written("name,kind,trace_hash\r\nb,\"x, y\"," + hash + "\r\na,z," + other + "\r\n", "in/list.csv");
  EXPECT_EQ(listed({"in/list.csv"}), (Texts{"in/b.h5", "in/a.h5"}));
  const std::vector<ListedTrace> all = list_traces(std::vector<GivenValue>{{"in/list.csv", ""}}, folder());
  EXPECT_NO_THROW(check_hash(all[1], other));
  EXPECT_NO_THROW(check_hash(all[1], "")) << "a trace that cannot be opened says so itself";
  EXPECT_EQ(refusal_of([&] { check_hash(all[1], hash); }),
            "in/list.csv:3: trace_hash of in/a.h5: expected " + other + ", found " + hash);
}

TEST_F(Lists, ManifestsAreReadAsProgramsWriteThem) {
  const std::string hash(32, 'a');
  written("\xEF\xBB\xBFtrace_hash,name,file\n" + hash + ",b,\n" + hash + ",b,c.h5\n\n\n", "list.csv");
  EXPECT_EQ(listed({"list.csv"}), (Texts{"b.h5", "c.h5"}));
  written("\"trace\nhash\",trace_hash,name\n\"x\n\ny\"," + hash + ",b\n\nz,1,c\n", "list.csv");
  EXPECT_EQ(refusal_of([&] { listed({"list.csv"}); }),
            "list.csv:7: trace_hash: expected 32 hexadecimal digits, found \"1\"");
  written("trace_hash,name,file\n" + hash + ",,\n", "list.csv");
  EXPECT_EQ(refusal_of([&] { listed({"list.csv"}); }), "list.csv:2: no trace: expected a value in column file or name");
}

TEST_F(Lists, EveryTraceIsInOneShardAndShardsAreEven) {
  std::vector<ListedTrace> all;
  std::size_t total = 0;
  for (std::size_t i = 0; i < 24; ++i) {
    const std::size_t bytes = 1000 + i * i * 37 % 5000;
    make("t" + std::to_string(i), bytes);
    total += bytes;
    all.push_back({file("t" + std::to_string(i)).string()});
  }
  all.push_back({file("missing").string()});
  for (const int count : {1, 2, 5, 25, 40}) {
    std::multiset<std::string> seen;
    for (int number = 1; number <= count; ++number) {
      std::size_t bytes = 0;
      std::string before;
      const std::vector<ListedTrace> mine = Shard{number, count}.of(all);
      for (const ListedTrace& trace : mine) {
        seen.insert(trace.path);
        std::error_code ignored;
        if (std::filesystem::exists(trace.path)) bytes += std::filesystem::file_size(trace.path, ignored);
      }
      if (count <= 5) {
        EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(total) / count,
                    0.1 * static_cast<double>(total) / count);
      } else {
        EXPECT_LE(mine.size(), 1U);
      }
    }
    EXPECT_EQ(seen.size(), all.size());
    EXPECT_EQ(std::set<std::string>(seen.begin(), seen.end()).size(), all.size());
  }
}

TEST(Shards, AreReadStrictly) {
  EXPECT_EQ(Shard::parse("--shard", "2/8").number, 2);
  EXPECT_EQ(Shard::parse("--shard", "8/8").count, 8);
  for (const char* text : {"", "1", "0/8", "9/8", "1/0", "1/", "/8", "1/8/2", "-1/8", "1.5/8"})
    EXPECT_THROW(Shard::parse("--shard", text), Error) << text;
}

}  // namespace
}  // namespace kvreplay
