// Well-formed HDF5 files whose contents are hostile: copies of a sound file in which objects and attributes are
// replaced as a fuzzer's bytes say, by other kinds, types, shapes, layouts, links and values.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>
#include <hdf5.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "hdf5/hdf5.h"

namespace kvreplay {

class HostileFile {
 public:
  explicit HostileFile(const std::filesystem::path& sound) {
    std::ifstream stream(sound, std::ios::binary);
    image_.assign(std::istreambuf_iterator<char>(stream), {});
    const hdf5::File file = hdf5::File::open(sound);
    list(file, "");
  }

  /// A copy at `path` with some changes.
  void write(FuzzedDataProvider& bytes, const std::filesystem::path& path) const {
    hdf5::Handle file = opened();
    const int changes = bytes.ConsumeIntegralInRange(1, most_changes);
    for (int change = 0; change < changes && bytes.remaining_bytes() > 0; ++change)
      apply(file.id(), places_[bytes.ConsumeIntegralInRange<std::size_t>(0, places_.size() - 1)], bytes);
    H5Fflush(file.id(), H5F_SCOPE_GLOBAL);
    std::vector<char> image(static_cast<std::size_t>(H5Fget_file_image(file.id(), nullptr, 0)));
    H5Fget_file_image(file.id(), image.data(), image.size());
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(image.data(), static_cast<std::streamsize>(image.size()));
  }

 private:
  static constexpr int most_changes = 6;

  struct Place {
    std::string parent;  // path of the group or dataset that has it
    std::string name;    // of a link, or of an attribute
    bool attribute = false;
  };

  void list(const hdf5::Group& group, const std::string& path) {
    const std::string own = path.empty() ? "/" : path;
    for (const std::string& name : group.attribute_names()) places_.push_back({own, name, true});
    for (const std::string& name : group.names()) {
      places_.push_back({own, name});
      if (group.member(name) == hdf5::Group::Member::group) list(group.group(name), path + "/" + name);
      if (group.member(name) == hdf5::Group::Member::dataset)
        for (const std::string& attribute : group.dataset(name).attribute_names())
          places_.push_back({path + "/" + name, attribute, true});
    }
  }

  hdf5::Handle opened() const {
    const hdf5::Handle access{H5Pcreate(H5P_FILE_ACCESS), H5Pclose};
    H5Pset_fapl_core(access.id(), std::size_t{1} << 16, false);
    H5Pset_libver_bounds(access.id(), H5F_LIBVER_V18, H5F_LIBVER_V110);
    H5Pset_file_image(access.id(), const_cast<char*>(image_.data()), image_.size());
    return {H5Fopen("hostile", H5F_ACC_RDWR, access.id()), H5Fclose};
  }

  template <class Item>
  static const Item& pick(FuzzedDataProvider& bytes, const std::vector<Item>& items) {
    return items[bytes.ConsumeIntegralInRange<std::size_t>(0, items.size() - 1)];
  }

  // Any of these calls may fail, since earlier changes have removed what it needs: then it changes nothing.
  void apply(hid_t file, const Place& place, FuzzedDataProvider& bytes) const {
    const hdf5::Handle parent{H5Oopen(file, place.parent.c_str(), H5P_DEFAULT), H5Oclose};
    if (parent.id() < 0) return;
    switch (bytes.ConsumeIntegralInRange(0, 7)) {
      case 0:
        return remove(parent.id(), place);
      case 1:
      case 2:
      case 3:
        return change_values(parent.id(), place, bytes);
      case 4:
      case 5:
        return replace(parent.id(), place, bytes);
      case 6:
        if (place.attribute) return replace(parent.id(), place, bytes);
        return link(file, parent.id(), place, bytes);
      default:
        return add(parent.id(), place, bytes);
    }
  }

  static void remove(hid_t parent, const Place& place) {
    if (place.attribute)
      H5Adelete(parent, place.name.c_str());
    else
      H5Ldelete(parent, place.name.c_str(), H5P_DEFAULT);
  }

  /// Some bytes of the stored elements become others.
  static void change_values(hid_t parent, const Place& place, FuzzedDataProvider& bytes) {
    const char* name = place.name.c_str();
    const hdf5::Handle object = place.attribute ? hdf5::Handle{H5Aopen(parent, name, H5P_DEFAULT), H5Aclose}
                                                : hdf5::Handle{H5Dopen2(parent, name, H5P_DEFAULT), H5Dclose};
    if (object.id() < 0) return;
    const hdf5::Type type{place.attribute ? H5Aget_type(object.id()) : H5Dget_type(object.id()), H5Tclose};
    const hdf5::Handle space{place.attribute ? H5Aget_space(object.id()) : H5Dget_space(object.id()), H5Sclose};
    const hssize_t count = H5Sget_simple_extent_npoints(space.id());
    if (count < 1 || count > 1 << 16 || !type.is_flat()) return;
    std::vector<std::uint8_t> elements(static_cast<std::size_t>(count) * type.bytes());
    if (place.attribute)
      H5Aread(object.id(), type.id(), elements.data());
    else
      H5Dread(object.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, elements.data());
    std::size_t at = bytes.ConsumeIntegralInRange<std::size_t>(0, elements.size() - 1);
    if (bytes.ConsumeBool()) at -= at % type.bytes();
    for (const std::uint8_t byte : value(bytes)) {
      if (at == elements.size()) break;
      elements[at++] = byte;
    }
    if (place.attribute)
      H5Awrite(object.id(), type.id(), elements.data());
    else
      H5Dwrite(object.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, elements.data());
  }

  /// The little-endian bytes of a number at some edge, or a few of the fuzzer's own.
  static std::vector<std::uint8_t> value(FuzzedDataProvider& bytes) {
    if (bytes.ConsumeBool()) return bytes.ConsumeBytes<std::uint8_t>(bytes.ConsumeIntegralInRange<std::size_t>(1, 24));
    static const std::vector<std::int64_t> edges = {0,
                                                    1,
                                                    -1,
                                                    2,
                                                    3,
                                                    4,
                                                    5,
                                                    63,
                                                    64,
                                                    65,
                                                    65536,
                                                    65537,
                                                    INT32_MAX,
                                                    INT32_MIN,
                                                    INT64_MAX,
                                                    INT64_MIN,
                                                    1LL << 32,
                                                    0x7ff0000000000000LL,
                                                    0x7ff8000000000000LL,
                                                    1};
    const std::int64_t edge = pick(bytes, edges);
    const bool wide = bytes.ConsumeBool();
    std::vector<std::uint8_t> raw;
    for (unsigned i = 0; i < (wide ? 8U : 4U); ++i)
      raw.push_back(static_cast<std::uint8_t>(static_cast<std::uint64_t>(edge) >> (8 * i)));
    return raw;
  }

  static hdf5::Type any_type(FuzzedDataProvider& bytes, bool nested = false) {
    const std::vector<hid_t> plain = {
        H5T_STD_I32LE,      H5T_STD_I64LE, H5T_IEEE_F32LE, H5T_IEEE_F64LE, H5T_STD_I8LE,       H5T_STD_U8LE,
        H5T_STD_U64LE,      H5T_STD_I32BE, H5T_IEEE_F64BE, H5T_STD_B16LE,  H5T_STD_I16LE,      H5T_STD_REF_OBJ,
        H5T_NATIVE_LDOUBLE, H5T_STD_U32LE, H5T_VAX_F64,    H5T_UNIX_D32LE, H5T_STD_REF_DSETREG};
    switch (bytes.ConsumeIntegralInRange(0, nested ? 5 : 9)) {
      case 0:
      case 1:
        return {H5Tcopy(pick(bytes, plain)), H5Tclose};
      case 2:
        return hdf5::Type::float16();
      case 3:
        return hdf5::Type::bfloat16();
      case 4: {  // strings: fixed
        hdf5::Type type{H5Tcopy(H5T_C_S1), H5Tclose};
        H5Tset_size(type.id(), pick(bytes, std::vector<std::size_t>{1, 2, 7, 16, 32, 300, 60000}));
        H5Tset_strpad(type.id(), pick(bytes, std::vector{H5T_STR_NULLTERM, H5T_STR_NULLPAD, H5T_STR_SPACEPAD}));
        H5Tset_cset(type.id(), bytes.ConsumeBool() ? H5T_CSET_UTF8 : H5T_CSET_ASCII);
        return type;
      }
      case 5: {
        hdf5::Type type{H5Tcopy(H5T_C_S1), H5Tclose};
        H5Tset_size(type.id(), H5T_VARIABLE);
        return type;
      }
      case 6: {
        const hdf5::Handle element = any_type(bytes, true);
        const hsize_t size = bytes.ConsumeIntegralInRange<hsize_t>(1, 4);
        return {bytes.ConsumeBool() ? H5Tarray_create2(element.id(), 1, &size) : H5Tvlen_create(element.id()),
                H5Tclose};
      }
      case 7: {
        hdf5::Type type{H5Tcreate(H5T_OPAQUE, bytes.ConsumeIntegralInRange<std::size_t>(1, 16)), H5Tclose};
        return type;
      }
      case 8: {
        hdf5::Type type{H5Tenum_create(H5T_STD_I32LE), H5Tclose};
        const std::int32_t one = 1;
        H5Tenum_insert(type.id(), "one", &one);
        return type;
      }
      default: {  // a compound, as spans are
        std::vector<std::pair<const char*, hdf5::Type>> members;
        std::size_t size = 0;
        for (const char* name : {"name", "kind", "begin", "end", "else"}) {
          if (bytes.ConsumeIntegralInRange(0, 7) == 0) continue;
          const bool number = name[0] == 'b' || name[0] == 'e';
          hdf5::Type member = bytes.ConsumeIntegralInRange(0, 7) == 0 ? any_type(bytes, true)
                              : number                                ? hdf5::Type::int32()
                                       : hdf5::Type::utf8(bytes.ConsumeIntegralInRange<std::size_t>(1, 9));
          size += member.bytes();
          members.emplace_back(name, std::move(member));
        }
        hdf5::Type type{H5Tcreate(H5T_COMPOUND, std::max<std::size_t>(1, size)), H5Tclose};
        std::size_t offset = 0;
        for (const auto& [name, member] : members) {
          H5Tinsert(type.id(), name, offset, member.id());
          offset += member.bytes();
        }
        return type;
      }
    }
  }

  static hdf5::Handle any_space(FuzzedDataProvider& bytes, hdf5::Shape& shape) {
    const int rank = bytes.ConsumeIntegralInRange(-1, 4);
    if (rank < 0) return {H5Screate(H5S_NULL), H5Sclose};
    for (int i = 0; i < rank; ++i) {
      const hsize_t small = bytes.ConsumeIntegralInRange<hsize_t>(0, 9);
      shape.push_back(bytes.ConsumeIntegralInRange(0, 5) > 0
                          ? small
                          : pick(bytes, std::vector<hsize_t>{16, 17, 65536, 1ULL << 31, 1ULL << 32, 1ULL << 61}));
    }
    return {rank == 0 ? H5Screate(H5S_SCALAR) : H5Screate_simple(rank, shape.data(), nullptr), H5Sclose};
  }

  /// Another type, shape, or both; the storage, too, where it is a dataset.
  static void replace(hid_t parent, const Place& place, FuzzedDataProvider& bytes) {
    const char* name = place.name.c_str();
    hdf5::Handle old = place.attribute ? hdf5::Handle{H5Aopen(parent, name, H5P_DEFAULT), H5Aclose}
                                       : hdf5::Handle{H5Dopen2(parent, name, H5P_DEFAULT), H5Dclose};
    const bool keeps_type = old.id() >= 0 && bytes.ConsumeBool(), keeps_shape = old.id() >= 0 && bytes.ConsumeBool();
    const hdf5::Type type = keeps_type
                                ? hdf5::Type{place.attribute ? H5Aget_type(old.id()) : H5Dget_type(old.id()), H5Tclose}
                                : any_type(bytes);
    hdf5::Shape shape;
    const hdf5::Handle space =
        keeps_shape ? hdf5::Handle{place.attribute ? H5Aget_space(old.id()) : H5Dget_space(old.id()), H5Sclose}
                    : any_space(bytes, shape);
    if (keeps_shape) {
      shape.resize(static_cast<std::size_t>(std::max(0, H5Sget_simple_extent_ndims(space.id()))));
      H5Sget_simple_extent_dims(space.id(), shape.data(), nullptr);
    }
    old = {};
    remove(parent, place);
    if (place.attribute)
      create_attribute(parent, name, type, space, bytes);
    else
      create_dataset(parent, name, type, space, shape, bytes);
  }

  /// Elements that repeat the fuzzer's bytes; none where there would be too many, or where they are addresses.
  static std::vector<std::uint8_t> elements_for(const hdf5::Type& type, const hdf5::Handle& space,
                                                FuzzedDataProvider& bytes) {
    const hssize_t count = H5Sget_simple_extent_npoints(space.id());
    const std::size_t size = type.bytes();
    if (count < 1 || count > 4096 || size > 65536 || !type.is_flat()) return {};
    const std::vector<std::uint8_t> pattern = value(bytes);
    std::vector<std::uint8_t> elements(static_cast<std::size_t>(count) * size);
    for (std::size_t i = 0; i < elements.size() && !pattern.empty(); ++i) elements[i] = pattern[i % pattern.size()];
    return elements;
  }

  static void create_attribute(hid_t parent, const char* name, const hdf5::Type& type, const hdf5::Handle& space,
                               FuzzedDataProvider& bytes) {
    constexpr hssize_t most_bytes = 60000;  // in an object header
    if (H5Sget_simple_extent_npoints(space.id()) > most_bytes / static_cast<hssize_t>(type.bytes())) return;
    const hdf5::Handle attribute{H5Acreate2(parent, name, type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose};
    if (attribute.id() < 0) return;
    if (const auto elements = elements_for(type, space, bytes); !elements.empty())
      H5Awrite(attribute.id(), type.id(), elements.data());
  }

  static void create_dataset(hid_t parent, const char* name, const hdf5::Type& type, const hdf5::Handle& space,
                             const hdf5::Shape& shape, FuzzedDataProvider& bytes) {
    const hdf5::Handle creation{H5Pcreate(H5P_DATASET_CREATE), H5Pclose};
    switch (bytes.ConsumeIntegralInRange(0, 5)) {
      case 0:
        H5Pset_layout(creation.id(), H5D_COMPACT);
        break;
      case 1:
      case 2: {
        hdf5::Shape chunk;
        for (const hsize_t size : shape) chunk.push_back(std::clamp<hsize_t>(size, 1, 4));
        if (!chunk.empty()) H5Pset_chunk(creation.id(), static_cast<int>(chunk.size()), chunk.data());
        if (bytes.ConsumeBool()) H5Pset_shuffle(creation.id());
        if (bytes.ConsumeBool()) H5Pset_deflate(creation.id(), 1);
        if (bytes.ConsumeIntegralInRange(0, 3) == 0) H5Pset_fletcher32(creation.id());
        break;
      }
      case 3:
        H5Pset_external(creation.id(), "/dev/null", 0, H5F_UNLIMITED);
        break;
      default:
        break;
    }
    const hdf5::Handle dataset{H5Dcreate2(parent, name, type.id(), space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT),
                               H5Dclose};
    if (dataset.id() < 0) return;
    if (const auto elements = elements_for(type, space, bytes); !elements.empty())
      H5Dwrite(dataset.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, elements.data());
  }

  /// Leads to another place of the file, to itself, out of the file, or nowhere.
  void link(hid_t file, hid_t parent, const Place& place, FuzzedDataProvider& bytes) const {
    const char* name = place.name.c_str();
    const Place& other = pick(bytes, places_);
    const std::string target = bytes.ConsumeBool() ? other.parent : other.parent + "/" + other.name;
    const int kind = bytes.ConsumeIntegralInRange(0, 2);
    if (kind == 0) {
      // Not what goes: HDF5 1.10.8 crashes when it links an object again whose last link is gone.
      if (target == place.parent + "/" + place.name) return;
      const hdf5::Handle object{H5Oopen(file, target.c_str(), H5P_DEFAULT), H5Oclose};
      if (object.id() < 0) return;
      H5Ldelete(parent, name, H5P_DEFAULT);
      H5Olink(object.id(), parent, name, H5P_DEFAULT, H5P_DEFAULT);
      return;
    }
    H5Ldelete(parent, name, H5P_DEFAULT);
    if (kind == 1)
      H5Lcreate_soft(target.c_str(), parent, name, H5P_DEFAULT, H5P_DEFAULT);
    else
      H5Lcreate_external("/dev/null", target.c_str(), parent, name, H5P_DEFAULT, H5P_DEFAULT);
  }

  /// Something new, or something of another kind in the place.
  static void add(hid_t parent, const Place& place, FuzzedDataProvider& bytes) {
    const std::vector<std::string> names = {place.name, place.name, "000", "002", "0000", "trace", "else", "", "."};
    const std::string& name = pick(bytes, names);
    if (name == place.name) remove(parent, place);
    if (bytes.ConsumeBool()) {
      const hdf5::Handle group{H5Gcreate2(parent, name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Gclose};
    } else if (bytes.ConsumeBool()) {
      const hdf5::Type type = any_type(bytes);
      H5Tcommit2(parent, name.c_str(), type.id(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    } else {
      hdf5::Shape shape;
      const hdf5::Type type = any_type(bytes);
      const hdf5::Handle space = any_space(bytes, shape);
      create_dataset(parent, name.c_str(), type, space, shape, bytes);
    }
  }

  std::vector<char> image_;
  std::vector<Place> places_;
};

}  // namespace kvreplay
