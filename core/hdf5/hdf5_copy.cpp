#include "hdf5/hdf5_copy.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "error.h"

namespace kvreplay::hdf5 {
namespace {

/// Groups that were met.
using Met = std::set<std::uint64_t>;

void copy_attributes(const Object& from, const Object& to) {
  const Lock lock;
  for (const std::string& name : from.attribute_names()) {
    const Handle old{H5Aopen(from.id(), name.c_str(), H5P_DEFAULT), H5Aclose};
    if (old.id() < 0) throw failure(from.where(name), "cannot be read");
    const Type type{H5Aget_type(old.id()), H5Tclose};
    const Space space{H5Aget_space(old.id()), H5Sclose};
    const std::size_t count = attribute_elements(old, from.where(name));
    std::vector<std::byte> bytes(count * type.bytes());
    if (count > 0 && H5Aread(old.id(), type.id(), bytes.data()) < 0) throw failure(from.where(name), "cannot be read");
    const Handle made{H5Acreate2(to.id(), name.c_str(), type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose};
    if (made.id() < 0 || (count > 0 && H5Awrite(made.id(), type.id(), bytes.data()) < 0))
      throw failure(to.where(name), "cannot be written");
  }
}

void copy_dataset(const Dataset& from, const std::string& name, Group& to) {
  from.require_plain_storage();
  const Type type = from.type();
  const std::vector<std::byte> bytes = from.bytes();
  Dataset made = to.create_dataset(name, type, from.shape());
  if (!bytes.empty()) made.write(type, bytes.data());
  copy_attributes(from, made);
}

void copy_member(const Group& from, const std::string& name, Group& to, Met& met);

void copy_group(const Group& from, const std::string& name, Group& to, Met& met) {
  if (!met.insert(from.number()).second)
    throw Error{Refusal::input, from.where(), "link", "a group with one hard link", "a group with several"};
  Group made = to.create_group(name);
  copy_attributes(from, made);
  for (const std::string& member : from.names()) copy_member(from, member, made, met);
}

void copy_member(const Group& from, const std::string& name, Group& to, Met& met) {
  if (from.member(name) == Group::Member::dataset)
    copy_dataset(from.dataset(name), name, to);
  else
    copy_group(from.group(name), name, to, met);
}

}  // namespace

void copy(const Group& from, const std::string& name, Group& to) {
  Met met;
  copy_member(from, name, to, met);
}

}  // namespace kvreplay::hdf5
