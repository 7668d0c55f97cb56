// Arrays of files, and the policies that read tables of heads.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "error.h"
#include "policies/text/array_file.h"
#include "policies/text/configured.h"
#include "tests/table_file.h"

namespace kvreplay {
namespace {

std::string refusal_of(const std::string& bytes) {
  const TemporaryFile file(bytes);
  try {
    read_array(file.path());
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::input);
    EXPECT_EQ(error.where(), file.path());
    return error.problem() + ": " + error.expected() + ", " + error.found();
  }
  return "read";
}

TEST(ArrayFiles, AreReadInBothWidthsAndAllVersions) {
  for (const int version : {1, 2, 3}) {
    const TemporaryFile file(npy(dictionary("<f4", "(2, 3)"), numbers<float>({1, 2, 3, -4, 0.5, 6}), version));
    const Array array = read_array(file.path());
    EXPECT_EQ(array.shape, (std::vector<int>{2, 3}));
    EXPECT_EQ(array.numbers, (std::vector<double>{1, 2, 3, -4, 0.5, 6}));
    EXPECT_EQ(array.source.path, file.path());
    EXPECT_EQ(array.source.hash.size(), 32U);
  }
  const TemporaryFile wide(npy(dictionary("<f8", "(2,)"), numbers<double>({0.1, 1e300})));
  EXPECT_EQ(read_array(wide.path()).numbers, (std::vector<double>{0.1, 1e300}));
  EXPECT_EQ(read_array(wide.path()).shape, (std::vector<int>{2}));
  EXPECT_EQ(refusal_of(npy(dictionary("<f8", "()"), numbers<double>({3}))), "read");
  EXPECT_EQ(refusal_of(npy(dictionary("<f8", "(0, 4)"), "")), "read");
}

TEST(ArrayFiles, SayWhatIsWrongWithThem) {
  const std::string six = numbers<float>({1, 2, 3, 4, 5, 6});
  const std::string good = npy(dictionary("<f4", "(2, 3)"), six);
  EXPECT_EQ(refusal_of(""), "not an .npy file: an .npy file of version 1 to 3, another file format");
  EXPECT_EQ(refusal_of("PK\x03\x04 an archive of arrays"),
            "not an .npy file: an .npy file of version 1 to 3, another file format");
  EXPECT_EQ(refusal_of(npy(dictionary("<f4", "(2, 3)"), six, 4)),
            "not an .npy file: an .npy file of version 1 to 3, another file format");
  EXPECT_EQ(refusal_of(good.substr(0, good.size() - 1)),
            "size: the numbers of shape [2, 3], 23 bytes after the header");
  EXPECT_EQ(refusal_of(good + "x"), "size: the numbers of shape [2, 3], 25 bytes after the header");
  EXPECT_EQ(refusal_of(good.substr(0, 40)).substr(0, 8), "truncate");
  EXPECT_EQ(refusal_of(npy(dictionary("<i8", "(2, 3)"), six)),
            "unsupported array: numbers of type '<f4' or '<f8', "
            "{'descr': '<i8', 'fortran_order': False, 'shape': (2, 3), }");
  EXPECT_EQ(refusal_of(npy(dictionary(">f4", "(2, 3)"), six)).substr(0, 57),
            "unsupported array: numbers of type '<f4' or '<f8', {'desc");
  EXPECT_EQ(refusal_of(npy(dictionary("<f4", "(2, 3)", "True"), six)).substr(0, 58),
            "unsupported array: C order, fortran_order False, {'descr':");
  const std::string no_shape = "unsupported array: a shape of at most 8 sizes below 1000000000, ";
  for (const char* shape : {"(-2, 3)", "(1000000000,)", "(12345678901234567890,)", "(1,1,1,1,1,1,1,1,1)", "(2 3)", "2"})
    EXPECT_EQ(refusal_of(npy(dictionary("<f4", shape), six)).substr(0, no_shape.size()), no_shape) << shape;
  EXPECT_EQ(refusal_of(npy(dictionary("<f4", "(999999999, 999999999, 999999999, 3)"), six)).substr(0, 5), "size:");
  EXPECT_EQ(refusal_of(npy("{'descr': '<f4'}", six)), no_shape + "{'descr': '<f4'}");
  EXPECT_EQ(refusal_of(npy("{'shape': (2, 3", six)), no_shape + "{'shape': (2, 3");
  EXPECT_EQ(refusal_of(npy(std::string(2000, ' '), six)).substr(0, 38), "size of the header: at most 1024 bytes");
  EXPECT_EQ(refusal_of(npy(dictionary("<f4", "(3,)"), numbers<float>({1, NAN, 2}))), "number 1: a finite number, nan");
  EXPECT_EQ(refusal_of(npy(dictionary("<f4", "(3,)"), numbers<float>({1, 2, -INFINITY}))),
            "number 2: a finite number, -inf");
  EXPECT_THROW(read_array("/nowhere/table.npy"), Error);
  EXPECT_THROW(read_array(std::filesystem::temp_directory_path().string()), Error);
}

/// No prefix of a file and no byte of its header makes more of it than an error.
TEST(ArrayFiles, DamagedOnesAreRefusedOrRead) {
  const std::string good = npy(dictionary("<f4", "(2, 3)"), numbers<float>({1, 2, 3, 4, 5, 6}));
  for (std::size_t length = 0; length < good.size(); ++length) EXPECT_NE(refusal_of(good.substr(0, length)), "read");
  for (std::size_t i = 0; i < good.size(); ++i)
    for (const char other : {'\0', '\xFF', '9', '(', ')'}) {
      std::string damaged = good;
      damaged[i] = other;
      refusal_of(damaged);
    }
}

std::vector<std::vector<int>> counts(const std::string& policy, const Division& division) {
  return ConfiguredPolicy::parse(policy).plans(division.layers).front().plan.allocate->counts(division);
}

TEST(HeadKv, DividesTheBudgetByImportance) {
  // Two layers of four query heads, shares 0.4, 0, 0.1, 0.1 and 0.1, 0.1, 0.1, 0.1.
  const TemporaryFile table(npy(dictionary("<f8", "(2, 4)"), numbers<double>({8, 0, 2, 2, 2, 2, 2, 2})));
  const std::string policy = "head-kv:table=" + table.path() + ",window=2,beta=2";
  const Division by_query{.layers = 2, .prompt = 100, .budget = 12, .recent = 2, .rows = 4, .query_heads = 4};
  // b = 10: 80 slots, 5 of each equal, and 40 by importance.
  EXPECT_EQ(counts(policy + ",heads=query", by_query),
            (std::vector<std::vector<int>>{{2 + 5 + 16, 2 + 5, 2 + 5 + 4, 2 + 5 + 4}, {11, 11, 11, 11}}));
  Division by_group = by_query;
  by_group.rows = 2;
  EXPECT_EQ(counts(policy, by_group), (std::vector<std::vector<int>>{{2 + 5 + 8, 2 + 5 + 4}, {11, 11}}));
  Division by_layer = by_query;
  by_layer.rows = 1;
  EXPECT_EQ(counts(policy + ",heads=layer", by_layer), (std::vector<std::vector<int>>{{2 + 5 + 6}, {2 + 5 + 4}}));
  // No row holds more than there is; what it cannot take goes to the others.
  Division tight = by_query;
  tight.prompt = 16;
  const auto limited = counts(policy + ",heads=query", tight);
  int sum = 0;
  for (const std::vector<int>& of_layer : limited)
    for (const int count : of_layer) {
      EXPECT_LE(count, 16);
      sum += count;
    }
  EXPECT_EQ(limited[0][0], 16);
  EXPECT_EQ(sum, 8 * 12);
}

TEST(HeadKv, RefusesTablesThatDoNotFit) {
  const auto refusal = [](const std::string& policy, const Division& division) -> std::string {
    try {
      counts(policy, division);
    } catch (const Error& error) {
      return error.what();
    }
    return "taken";
  };
  const Division division{.layers = 2, .prompt = 100, .budget = 12, .recent = 2, .rows = 4, .query_heads = 4};
  EXPECT_EQ(refusal("head-kv", division),
            "head-kv:table: missing table: expected an .npy file of shape [treated layers, query heads] = [2, 4], "
            "found none");
  const TemporaryFile narrow(npy(dictionary("<f8", "(2, 2)"), numbers<double>({1, 1, 1, 1})));
  EXPECT_EQ(refusal("head-kv:table=" + narrow.path(), division),
            narrow.path() +
                ": shape for head-kv:table: expected an .npy file of shape [treated layers, query heads] = "
                "[2, 4], found [2, 2]");
  const TemporaryFile negative(npy(dictionary("<f8", "(2, 4)"), numbers<double>({1, -1, 1, 1, 1, 1, 1, 1})));
  EXPECT_EQ(refusal("head-kv:table=" + negative.path(), division),
            negative.path() + ": importance of a head: expected 0 or more, found -1.000000");
  const TemporaryFile zeros(npy(dictionary("<f8", "(2, 4)"), numbers<double>(std::vector<double>(8))));
  EXPECT_NE(refusal("head-kv:table=" + zeros.path(), division).find("all importances are 0"), std::string::npos);
  EXPECT_THROW(ConfiguredPolicy::parse("head-kv:table=/nowhere.npy"), Error);
}

TEST(HeadKv, ResultsKnowTheTableByItsContent) {
  const std::string bytes = npy(dictionary("<f8", "(1, 2)"), numbers<double>({1, 2}));
  const TemporaryFile one(bytes), same(bytes), other(npy(dictionary("<f8", "(1, 2)"), numbers<double>({1, 3})));
  const auto hash = [](const TemporaryFile& file) {
    return ConfiguredPolicy::parse("head-kv:table=" + file.path()).source_hash();
  };
  EXPECT_EQ(hash(one).size(), 32U);
  EXPECT_EQ(hash(one), hash(same));
  EXPECT_NE(hash(one), hash(other));
  EXPECT_EQ(ConfiguredPolicy::parse("head-kv").source_hash(), "");
}

}  // namespace
}  // namespace kvreplay
