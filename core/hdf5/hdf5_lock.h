// HDF5 need not be thread-safe, and a process that is forked during a call of HDF5 inherits HDF5's own lock closed: a
// child that uses HDF5 would wait for ever.
#pragma once

namespace kvreplay::hdf5 {

/// No other thread of this process uses HDF5, or forks, while a Lock exists. A thread may hold several. Every function
/// that calls HDF5 holds one.
class Lock {
 public:
  Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock();
};

}  // namespace kvreplay::hdf5
