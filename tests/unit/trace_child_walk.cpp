#include <gtest/gtest.h>
#include <hdf5.h>

#include <numeric>
#include <vector>

#include "trace/child_walk.h"
#include "trace/hdf5.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class ChildWalk : public TraceFiles {};

/// Where a file says so, chunks that reach beyond the shape are stored as they are.
TEST_F(ChildWalk, EdgesNeedNotBeDeflated) {
  std::vector<int> numbers(40);
  std::iota(numbers.begin(), numbers.end(), 0);
  {
    const hdf5::Handle access{H5Pcreate(H5P_FILE_ACCESS), H5Pclose};
    H5Pset_libver_bounds(access.id(), H5F_LIBVER_V110, H5F_LIBVER_V110);
    const hdf5::Handle made{H5Fcreate(file("a.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.id()), H5Fclose};
    const hdf5::Handle creation{H5Pcreate(H5P_DATASET_CREATE), H5Pclose};
    const hsize_t chunk[] = {5, 5};
    H5Pset_chunk(creation.id(), 2, chunk);
    H5Pset_deflate(creation.id(), 4);
    ASSERT_GE(H5Pset_chunk_opts(creation.id(), H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS), 0);
    const hdf5::Space space = hdf5::Space::of({8, 5});
    const hdf5::Handle edges{
        H5Dcreate2(made.id(), "edges", H5T_NATIVE_INT32, space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT),
        H5Dclose};
    ASSERT_GE(H5Dwrite(edges.id(), H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, numbers.data()), 0);
  }
  walk_in_child(file("a.h5"));
  EXPECT_EQ(hdf5::File::open(file("a.h5")).dataset("edges").values<std::int32_t>(), numbers);
}

}  // namespace
}  // namespace kvreplay
