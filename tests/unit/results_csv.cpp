#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "analysis/csv.h"
#include "error.h"

namespace kvreplay {
namespace {

TEST(Csv, FieldsReadBackAsTheyWere) {
  const std::vector<std::string> fields{"plain", "", "a,b", "say \"yes\"", "x\",y", "two\nlines", " kept "};
  EXPECT_EQ(csv_line(fields), "plain,,\"a,b\",\"say \"\"yes\"\"\",\"x\"\",y\",\"two\nlines\", kept \n");
  EXPECT_EQ(parse_csv("x", csv_line(fields) + csv_line({"1", "2"})),
            (std::vector<std::vector<std::string>>{fields, {"1", "2"}}));
}

TEST(Csv, LinesMayEndInTwoCharactersOrNone) {
  EXPECT_EQ(parse_csv("x", "a,b\r\nc,d"), (std::vector<std::vector<std::string>>{{"a", "b"}, {"c", "d"}}));
  EXPECT_THROW(parse_csv("x", "a,\"b"), Error);
}

TEST(Csv, NumbersReadBackAndUndefinedOnesAreEmpty) {
  for (const double value : {0.1, 1.0 / 3, 1e-300, 123456789.125, std::nextafter(1.0, 2.0)})
    EXPECT_EQ(std::stod(csv_number(value)), value);
  EXPECT_EQ(csv_number(1), "1");
  for (const double value : {-0.0, 1e-5, 1e-4, 1e16, 1e17, -123456.0, 5e-324, 1.7976931348623157e308}) {
    char expected[64];
    std::snprintf(expected, sizeof expected, "%.17g", value);
    EXPECT_EQ(csv_number(value), expected);
  }
  EXPECT_EQ(csv_number(std::nan("")), "");
  EXPECT_EQ(csv_number(std::numeric_limits<double>::infinity()), "");
}

}  // namespace
}  // namespace kvreplay
