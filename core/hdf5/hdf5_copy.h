// Copies within and between HDF5 files.
#pragma once

#include <string>

#include "hdf5/hdf5.h"

namespace kvreplay::hdf5 {

/// The object of that name, and what lies in it, becomes one of `to`: attributes, groups, and datasets, which become
/// contiguous. Error{input}: a group that two names lead to, or elements without a fixed size.
void copy(const Group& from, const std::string& name, Group& to);

}  // namespace kvreplay::hdf5
