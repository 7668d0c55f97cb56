// Copies within and between HDF5 files of strangers.
#pragma once

#include <string>

#include "hdf5/hdf5.h"

namespace kvreplay::hdf5 {

/// The object of that name, and what lies in it, becomes one of `to`: attributes, groups, and datasets, which become
/// contiguous. Calls nothing that child_walk.h has not tried on the same objects: H5Ocopy of HDF5 1.10.8 crashes at
/// headers that all else survives. Error{input}: a group that two names lead to, or elements without a fixed size.
void copy(const Group& from, const std::string& name, Group& to);

}  // namespace kvreplay::hdf5
