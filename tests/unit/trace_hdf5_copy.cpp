#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "edited_file.h"
#include "error.h"
#include "hdf5/hdf5_copy.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

using hdf5::File;
using hdf5::Group;
using hdf5::Type;

class Hdf5Copy : public TraceFiles {
 protected:
  /// Of the group "given" of another file; what is refused, is by this word.
  std::string refusal(const Group& from) {
    File to = File::create(file("to.h5"));
    try {
      hdf5::copy(from, "given", to);
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::input) << error.what();
      return error.what();
    }
    return "";
  }

  File from_ = File::create(file("from.h5"));
  Group given_ = from_.create_group("given");
};

TEST_F(Hdf5Copy, HasAllThatTheOriginalHas) {
  given_.set_attribute("word", "été");
  given_.set_attribute("number", std::int64_t{-3});
  Group inner = given_.create_group("inner");
  inner.set_attribute("real", 0.25);
  inner.write("numbers", std::vector<float>{1, 2, 3}).set_attribute("unit", "tokens");
  inner.write("nothing", std::vector<double>{});
  given_.write_text("text", "two\nlines");
  create_deflated(given_, "deflated", Type::int32(), {4, 2}, {2, 2}).write(Type::int32(), std::vector(8, 7).data());
  Type span = Type::compound(8);
  span.insert("begin", 0, Type::int32());
  span.insert("end", 4, Type::int32());
  const std::int32_t ends[] = {1, 2, 3, 4};
  given_.create_dataset("spans", span, {2}).write(span, ends);

  EXPECT_EQ(refusal(from_), "");
  const File copied = File::open(file("to.h5"));
  const Group copy = copied.group("given");
  EXPECT_EQ(copy.names(), given_.names());
  EXPECT_EQ(copy.attribute_names(), given_.attribute_names());
  EXPECT_EQ(copy.string_attribute("word"), "été");
  EXPECT_EQ(copy.integer_attribute("number"), -3);
  const Group copied_inner = copy.group("inner");
  EXPECT_EQ(copied_inner.float_attribute("real"), 0.25);
  EXPECT_EQ(copied_inner.dataset("numbers").values<float>(), (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(copied_inner.dataset("numbers").string_attribute("unit"), "tokens");
  EXPECT_TRUE(copied_inner.dataset("nothing").values<double>().empty());
  EXPECT_EQ(copy.dataset("text").text(), "two\nlines");
  EXPECT_EQ(copy.dataset("deflated").values<std::int32_t>(), std::vector<std::int32_t>(8, 7));
  EXPECT_EQ(copy.dataset("deflated").shape(), (hdf5::Shape{4, 2}));
  std::int32_t found[4] = {};
  EXPECT_TRUE(copy.dataset("spans").type() == span);
  copy.dataset("spans").read(span, found);
  EXPECT_TRUE(std::ranges::equal(found, ends));
}

TEST_F(Hdf5Copy, AGroupOfTwoNamesIsRefused) {
  const Group inner = given_.create_group("inner");
  ASSERT_GE(H5Lcreate_hard(from_.id(), "given", inner.id(), "loop", H5P_DEFAULT, H5P_DEFAULT), 0);
  EXPECT_NE(refusal(from_).find("/given/inner/loop: link: expected a group with one hard link"), std::string::npos);
}

TEST_F(Hdf5Copy, LinksToElsewhereAreRefused) {
  ASSERT_GE(H5Lcreate_soft("/", given_.id(), "soft", H5P_DEFAULT, H5P_DEFAULT), 0);
  EXPECT_NE(refusal(from_).find("/given/soft: link: expected an object of this file, found a soft link"),
            std::string::npos);
}

TEST_F(Hdf5Copy, ElementsOfAnyLengthAreRefused) {
  const Type any{H5Tvlen_create(Type::int32().id()), H5Tclose};
  const hdf5::Handle made{
      H5Dcreate2(given_.id(), "lists", any.id(), hdf5::Space::of({2}).id(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
      H5Dclose};
  ASSERT_GE(made.id(), 0);
  EXPECT_NE(refusal(from_).find("/given/lists: type: expected elements of fixed size, found "), std::string::npos);
}

TEST_F(Hdf5Copy, AttributesThatClaimMuchAreRefused) {
  // Dense storage: no attribute of an object's header can be so large.
  const hdf5::Space space = hdf5::Space::of({20'000});
  const hdf5::Handle made{H5Acreate2(given_.id(), "much", Type::int32().id(), space.id(), H5P_DEFAULT, H5P_DEFAULT),
                          H5Aclose};
  ASSERT_GE(made.id(), 0);
  EXPECT_NE(refusal(from_).find("/given@much: size: expected at most 65536 bytes, found 20000 elements of 4"),
            std::string::npos);
}

}  // namespace
}  // namespace kvreplay
