// What is left where HDF5 crashes in spite of the walk that goes before it (child_walk.h).
#pragma once

namespace kvreplay::hdf5 {

/// From now on a crash below a call of HDF5 ends the process with exit code 3 and one line, which names the file that
/// was opened last: the library reads behind damaged headers, and what lies there differs from process to process. Any
/// other crash stays one.
void refuse_crashes();

}  // namespace kvreplay::hdf5
