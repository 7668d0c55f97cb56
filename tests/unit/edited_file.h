// HDF5 files that tests change: the program writes each file once.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "hdf5/hdf5.h"

namespace kvreplay {

inline hdf5::Group open_writable(const std::filesystem::path& path) {
  hdf5::Handle file{H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose};
  EXPECT_GE(file.id(), 0) << path;
  return {std::move(file), path.string() + ":/"};
}

inline void remove(const hdf5::Group& group, const std::string& name) {
  EXPECT_GE(H5Ldelete(group.id(), name.c_str(), H5P_DEFAULT), 0) << group.where() << " " << name;
}

/// Chunked, shuffled and deflated.
inline hdf5::Dataset create_deflated(const hdf5::Group& group, const std::string& name, const hdf5::Type& type,
                                     const hdf5::Shape& shape, const hdf5::Shape& chunk) {
  const hdf5::Handle creation{H5Pcreate(H5P_DATASET_CREATE), H5Pclose};
  H5Pset_chunk(creation.id(), static_cast<int>(chunk.size()), chunk.data());
  H5Pset_shuffle(creation.id());
  H5Pset_deflate(creation.id(), 9);
  const hdf5::Space space = hdf5::Space::of(shape);
  hdf5::Handle made{
      H5Dcreate2(group.id(), name.c_str(), type.id(), space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT), H5Dclose};
  EXPECT_GE(made.id(), 0) << group.where() << " " << name;
  return {std::move(made), group.where() + "/" + name};
}

}  // namespace kvreplay
