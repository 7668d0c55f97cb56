#include "hdf5/hdf5.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>

#include "hdf5/superblock.h"
#include "open_file.h"

namespace kvreplay::hdf5 {
namespace {

/// Deflate cannot make more than this of one byte.
constexpr hsize_t largest_inflation = 1032;
/// Bytes of an object's header.
constexpr std::size_t largest_header = std::size_t{1} << 16;

// A file that a full disk keeps from closing stays behind in the library, whose clean-up at exit then crashes (1.10.8).
// All handles close themselves, so there is nothing to clean up. This has to come before every other call.
[[maybe_unused]] const herr_t no_clean_up_at_exit = H5dont_atexit();

struct Innermost {
  std::string message;
  int lacking = 0;  // errno where the system has no more of something
};

herr_t visit_error(unsigned depth, const H5E_error2_t* error, void* result) {
  Innermost& innermost = *static_cast<Innermost*>(result);
  const std::string_view text = error->desc != nullptr ? error->desc : "";
  if (depth == 0) innermost.message = text;
  for (const int lacking : {ENOSPC, EDQUOT, EFBIG, EMFILE, ENFILE, ENOMEM})
    if (text.find(fmt::format("errno = {},", lacking)) != std::string_view::npos) innermost.lacking = lacking;
  return 0;
}

/// Whether an identifier or a status is good; otherwise the failure is thrown.
template <class Status>
Status require(Status status, const std::string& where, const std::string& what) {
  if (status < 0) throw failure(where, what);
  return status;
}

Handle property_list(hid_t kind) { return {require(H5Pcreate(kind), "HDF5", "cannot make a property list"), H5Pclose}; }

Handle access_properties() {
  // The environment reaches every version of HDF5 that has not begun yet; the property, from 1.10.7 on, any.
  setenv("HDF5_USE_FILE_LOCKING", "FALSE", 0);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  Handle access = property_list(H5P_FILE_ACCESS);
#if H5_VERSION_GE(1, 10, 7)
  H5Pset_file_locking(access.id(), false, true);
#endif
  H5Pset_libver_bounds(access.id(), H5F_LIBVER_V18, H5F_LIBVER_V110);
  H5Pset_alignment(access.id(), 65536, 4096);
  return access;
}

/// Elements, or parts of them, that are of any length, or of none, are refused.
void require_fixed_size(const Type& type, const std::string& where) {
  if (type.has_variable_length() || type.bytes() == 0)
    throw Error{Refusal::input, where, "type", "elements of fixed size", type.name()};
}

Handle untimed(hid_t kind) {
  Handle creation = property_list(kind);
  H5Pset_obj_track_times(creation.id(), false);
  return creation;
}

Type copy_of(hid_t type) { return {require(H5Tcopy(type), "HDF5", "cannot copy a type"), H5Tclose}; }

/// An IEEE-like little-endian float of 16 bits: sign, exponent, mantissa from the top.
Type half_float(std::size_t exponent_bits, std::size_t mantissa_bits, std::size_t bias) {
  const Lock lock;
  Type type = copy_of(H5T_IEEE_F32LE);
  // Fields first, size last: HDF5 refuses fields that reach beyond the size.
  H5Tset_fields(type.id(), 15, mantissa_bits, exponent_bits, 0, mantissa_bits);
  H5Tset_precision(type.id(), 16);
  H5Tset_size(type.id(), 2);
  H5Tset_ebias(type.id(), bias);
  return type;
}

const char* class_name(H5T_class_t type_class) {
  static constexpr std::pair<H5T_class_t, const char*> names[] = {{H5T_TIME, "time"},
                                                                  {H5T_BITFIELD, "bitfield"},
                                                                  {H5T_OPAQUE, "opaque"},
                                                                  {H5T_COMPOUND, "compound"},
                                                                  {H5T_REFERENCE, "reference"},
                                                                  {H5T_ENUM, "enumeration"},
                                                                  {H5T_VLEN, "variable-length sequence"},
                                                                  {H5T_ARRAY, "array"}};
  const auto found = std::ranges::find(names, type_class, &std::pair<H5T_class_t, const char*>::first);
  return found == std::end(names) ? "unknown type" : found->second;
}

/// HDF5 converts numbers of its own types alone: those whose bits lie anywhere else crash 1.10.8.
void require_convertible(hid_t from, hid_t to, const std::string& where) {
  const hid_t own[] = {H5T_STD_I8LE,  H5T_STD_I16LE,  H5T_STD_I32LE,  H5T_STD_I64LE,  H5T_STD_U8LE,
                       H5T_STD_U16LE, H5T_STD_U32LE,  H5T_STD_U64LE,  H5T_STD_I8BE,   H5T_STD_I16BE,
                       H5T_STD_I32BE, H5T_STD_I64BE,  H5T_STD_U8BE,   H5T_STD_U16BE,  H5T_STD_U32BE,
                       H5T_STD_U64BE, H5T_IEEE_F32LE, H5T_IEEE_F32BE, H5T_IEEE_F64LE, H5T_IEEE_F64BE};
  const auto is = [from](hid_t type) { return H5Tequal(from, type) > 0; };
  if (!is(to) && !is(Type::float16().id()) && !is(Type::bfloat16().id()) && std::ranges::none_of(own, is))
    throw Error{Refusal::input, where, "type", "integers or floats of 8 to 64 bits", "another number of bits"};
}

/// No step of a path is followed out of the file, or to where another name leads.
void require_hard_links(hid_t group, const std::string& path, const std::string& where) {
  for (std::size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    H5L_info_t link;
    require(H5Lget_info(group, path.substr(0, end).c_str(), &link, H5P_DEFAULT), where, "cannot be looked up");
    if (link.type != H5L_TYPE_HARD)
      throw Error{Refusal::input, where, "link", "an object of this file",
                  link.type == H5L_TYPE_SOFT ? "a soft link" : "an external link"};
  }
}

Handle created_file(const std::string& path, const Handle& access, const std::string& where) {
  const Handle creation = untimed(H5P_FILE_CREATE);
  return {require(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.id(), access.id()), where, "cannot be made"),
          H5Fclose};
}

herr_t add_link_name(hid_t, const char* name, const H5L_info_t*, void* names) {
  static_cast<std::vector<std::string>*>(names)->emplace_back(name);
  return 0;
}

herr_t add_attribute_name(hid_t, const char* name, const H5A_info_t*, void* names) {
  static_cast<std::vector<std::string>*>(names)->emplace_back(name);
  return 0;
}

}  // namespace

hsize_t elements(const Shape& shape) { return bytes(shape, 1); }

hsize_t bytes(const Shape& shape, std::size_t element) {
  if (std::ranges::find(shape, hsize_t{0}) != shape.end()) return 0;
  hsize_t product = element;
  for (const hsize_t size : shape)
    if (__builtin_mul_overflow(product, size, &product)) return std::numeric_limits<hsize_t>::max();
  return product;
}

std::string to_string(const Shape& shape) {
  return shape.empty() ? "scalar" : fmt::format("[{}]", fmt::join(shape, ", "));
}

Error failure(const std::string& where, const std::string& what) {
  const Lock lock;
  Innermost innermost;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, visit_error, &innermost);
  H5Eclear2(H5E_DEFAULT);
  if (means_disk_full(innermost.lacking)) return {Refusal::resources, where, "disk full"};
  if (innermost.lacking != 0) return {Refusal::resources, where, what + ": " + std::strerror(innermost.lacking)};
  return {Refusal::input, where, innermost.message.empty() ? what : what + ": " + innermost.message};
}

Type Type::int32() {
  const Lock lock;
  return copy_of(H5T_STD_I32LE);
}
Type Type::int64() {
  const Lock lock;
  return copy_of(H5T_STD_I64LE);
}
Type Type::float32() {
  const Lock lock;
  return copy_of(H5T_IEEE_F32LE);
}
Type Type::float64() {
  const Lock lock;
  return copy_of(H5T_IEEE_F64LE);
}
Type Type::float16() { return half_float(5, 10, 15); }
Type Type::bfloat16() { return half_float(8, 7, 127); }

Type Type::of(DType type) {
  return type == DType::float16 ? float16() : type == DType::bfloat16 ? bfloat16() : float32();
}

Type Type::utf8(std::size_t bytes) {
  const Lock lock;
  Type type = copy_of(H5T_C_S1);
  H5Tset_size(type.id(), std::max(bytes, std::size_t{1}));
  H5Tset_cset(type.id(), H5T_CSET_UTF8);
  H5Tset_strpad(type.id(), H5T_STR_NULLPAD);
  return type;
}

std::string Type::name() const {
  const Lock lock;
  const H5T_class_t type_class = H5Tget_class(id());
  const std::size_t size = bytes();
  if (type_class == H5T_STRING)
    return H5Tis_variable_str(id()) > 0 ? variable_length_string : fmt::format("string of {} bytes", size);
  if (type_class == H5T_OPAQUE) return fmt::format("opaque of {} bytes", size);
  if (type_class != H5T_INTEGER && type_class != H5T_FLOAT) return class_name(type_class);

  const H5T_order_t byte_order = H5Tget_order(id());
  const std::string order = byte_order == H5T_ORDER_BE && size > 1 ? "big-endian "
                            : byte_order == H5T_ORDER_VAX          ? "VAX-order "
                                                                   : "";
  if (type_class == H5T_INTEGER)
    return fmt::format("{}{}int{}", order, H5Tget_sign(id()) == H5T_SGN_NONE ? "u" : "", H5Tget_precision(id()));
  std::size_t sign = 0, exponent = 0, exponent_bits = 0, mantissa = 0, mantissa_bits = 0;
  H5Tget_fields(id(), &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits);
  if (size == 2 && exponent_bits == 8) return order + "bfloat16";
  if (exponent_bits == (size == 2 ? 5U : size == 4 ? 8U : 11U)) return fmt::format("{}float{}", order, size * 8);
  return fmt::format("{}float of {} bytes with {} exponent and {} mantissa bits", order, size, exponent_bits,
                     mantissa_bits);
}

std::size_t Type::bytes() const {
  const Lock lock;
  return H5Tget_size(id());
}

bool Type::is_fixed_string() const {
  const Lock lock;
  return H5Tget_class(id()) == H5T_STRING && H5Tis_variable_str(id()) == 0;
}

bool Type::is_variable_length_string() const {
  const Lock lock;
  return H5Tget_class(id()) == H5T_STRING && H5Tis_variable_str(id()) > 0;
}

bool Type::is_flat() const {
  const Lock lock;
  return H5Tdetect_class(id(), H5T_REFERENCE) <= 0 && !has_variable_length();
}

bool Type::is_compound() const {
  const Lock lock;
  return H5Tget_class(id()) == H5T_COMPOUND;
}

bool Type::operator==(const Type& other) const {
  const Lock lock;
  return H5Tequal(id(), other.id()) > 0;
}

bool Type::has_variable_length() const {
  const Lock lock;
  switch (H5Tget_class(id())) {
    case H5T_STRING:
      return H5Tis_variable_str(id()) > 0;
    case H5T_VLEN:
      return true;
    case H5T_ARRAY:
      return Type{H5Tget_super(id()), H5Tclose}.has_variable_length();
    case H5T_COMPOUND:
      for (int m = 0; m < H5Tget_nmembers(id()); ++m)
        if (Type{H5Tget_member_type(id(), static_cast<unsigned>(m)), H5Tclose}.has_variable_length()) return true;
      return false;
    default:
      return false;
  }
}

Type Type::compound(std::size_t bytes) {
  const Lock lock;
  return {require(H5Tcreate(H5T_COMPOUND, bytes), "HDF5", "cannot make a compound type"), H5Tclose};
}

void Type::insert(const char* name, std::size_t offset, const Type& member) {
  const Lock lock;
  require(H5Tinsert(id(), name, offset, member.id()), "HDF5", "cannot extend a compound type");
}

std::optional<Type> Type::member(const char* name) const {
  const Lock lock;
  const int index = H5Tget_member_index(id(), name);
  if (index < 0) {
    H5Eclear2(H5E_DEFAULT);
    return std::nullopt;
  }
  return Type{require(H5Tget_member_type(id(), static_cast<unsigned>(index)), "HDF5", "cannot read a compound type"),
              H5Tclose};
}

std::size_t Type::member_offset(const char* name) const {
  const Lock lock;
  return H5Tget_member_offset(id(), static_cast<unsigned>(H5Tget_member_index(id(), name)));
}

Space Space::of(const Shape& shape) {
  const Lock lock;
  const hid_t id =
      shape.empty() ? H5Screate(H5S_SCALAR) : H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
  return {require(id, "HDF5", "cannot make a shape " + to_string(shape)), H5Sclose};
}

// The object's address in the file, in 1.12 under the name of a token.
std::uint64_t Object::number() const {
  const Lock lock;
#if H5_VERSION_GE(1, 12, 0)
  H5O_info2_t info;
  require(H5Oget_info3(id(), &info, H5O_INFO_BASIC), where(), "cannot be looked up");
  std::uint64_t number = 0;
  std::memcpy(&number, &info.token, sizeof number);
  return number;
#else
  H5O_info_t info;
  require(H5Oget_info2(id(), &info, H5O_INFO_BASIC), where(), "cannot be looked up");
  return info.addr;
#endif
}

void Object::write_attribute(const std::string& name, const Type& type, const void* value) {
  const Lock lock;
  if (has_attribute(name)) require(H5Adelete(id(), name.c_str()), where(name), "cannot be replaced");
  const Space scalar = Space::of({});
  const Handle attribute{require(H5Acreate2(id(), name.c_str(), type.id(), scalar.id(), H5P_DEFAULT, H5P_DEFAULT),
                                 where(name), "cannot be made"),
                         H5Aclose};
  require(H5Awrite(attribute.id(), type.id(), value), where(name), "cannot be written");
}

void Object::set_attribute(const std::string& name, std::string_view text) {
  const std::string stored = text.empty() ? std::string(1, '\0') : std::string(text);
  write_attribute(name, Type::utf8(stored.size()), stored.data());
}

void Object::set_attribute(const std::string& name, std::int64_t number) {
  write_attribute(name, Type::int64(), &number);
}

void Object::set_attribute(const std::string& name, double number) { write_attribute(name, Type::float64(), &number); }

bool Object::has_attribute(const std::string& name) const {
  const Lock lock;
  return require(H5Aexists(id(), name.c_str()), where(name), "cannot be looked up") > 0;
}

std::vector<std::string> Object::attribute_names() const {
  const Lock lock;
  std::vector<std::string> names;
  hsize_t next = 0;
  require(H5Aiterate2(id(), H5_INDEX_NAME, H5_ITER_INC, &next, add_attribute_name, &names), where(),
          "attributes cannot be listed");
  return names;
}

Handle Object::open_attribute(const std::string& name, H5T_class_t type_class, const char* expected) const {
  const Lock lock;
  if (!has_attribute(name)) throw Error{Refusal::input, where(name), "missing attribute", expected, "none"};
  Handle attribute{require(H5Aopen(id(), name.c_str(), H5P_DEFAULT), where(name), "cannot be opened"), H5Aclose};
  const Type type{require(H5Aget_type(attribute.id()), where(name), "type cannot be read"), H5Tclose};
  if (H5Tget_class(type.id()) != type_class || H5Tis_variable_str(type.id()) > 0 ||
      (type_class != H5T_STRING && type.bytes() > 8))
    throw Error{Refusal::input, where(name), "type", expected, type.name()};
  const Space space{require(H5Aget_space(attribute.id()), where(name), "shape cannot be read"), H5Sclose};
  if (H5Sget_simple_extent_type(space.id()) != H5S_SCALAR) {
    Shape shape(static_cast<std::size_t>(std::max(0, H5Sget_simple_extent_ndims(space.id()))));
    H5Sget_simple_extent_dims(space.id(), shape.data(), nullptr);
    throw Error{Refusal::input, where(name), "shape", "scalar",
                H5Sget_simple_extent_type(space.id()) == H5S_NULL ? "empty" : to_string(shape)};
  }
  return attribute;
}

std::string Object::string_attribute(const std::string& name) const {
  const Lock lock;
  const Handle attribute = open_attribute(name, H5T_STRING, "fixed-length string");
  const Type type{H5Aget_type(attribute.id()), H5Tclose};
  std::string bytes(type.bytes(), '\0');
  require(H5Aread(attribute.id(), type.id(), bytes.data()), where(name), "cannot be read");
  return unpadded(type, bytes);
}

std::int64_t Object::integer_attribute(const std::string& name) const {
  const Lock lock;
  const Handle attribute = open_attribute(name, H5T_INTEGER, "integer");
  long long number = 0;
  require_convertible(Type{H5Aget_type(attribute.id()), H5Tclose}.id(), H5T_NATIVE_LLONG, where(name));
  require(H5Aread(attribute.id(), H5T_NATIVE_LLONG, &number), where(name), "cannot be read");
  return number;
}

double Object::float_attribute(const std::string& name) const {
  const Lock lock;
  const Handle attribute = open_attribute(name, H5T_FLOAT, "float");
  double number = 0;
  require_convertible(Type{H5Aget_type(attribute.id()), H5Tclose}.id(), H5T_NATIVE_DOUBLE, where(name));
  require(H5Aread(attribute.id(), H5T_NATIVE_DOUBLE, &number), where(name), "cannot be read");
  return number;
}

Type Dataset::type() const {
  const Lock lock;
  return {require(H5Dget_type(id()), where(), "type cannot be read"), H5Tclose};
}

Shape Dataset::shape() const {
  const Lock lock;
  const Space space{require(H5Dget_space(id()), where(), "shape cannot be read"), H5Sclose};
  if (H5Sget_simple_extent_type(space.id()) == H5S_NULL)
    throw Error{Refusal::input, where(), "shape", "elements", "an empty dataspace"};
  const int rank = require(H5Sget_simple_extent_ndims(space.id()), where(), "shape cannot be read");
  Shape shape(static_cast<std::size_t>(rank));
  if (rank > 0) H5Sget_simple_extent_dims(space.id(), shape.data(), nullptr);
  return shape;
}

std::optional<std::uint64_t> Dataset::offset() const {
  const Lock lock;
  const haddr_t address = H5Dget_offset(id());
  if (address == HADDR_UNDEF) {
    H5Eclear2(H5E_DEFAULT);
    return std::nullopt;
  }
  return address;
}

H5D_layout_t Dataset::layout() const {
  const Lock lock;
  const Handle creation{require(H5Dget_create_plist(id()), where(), "layout cannot be read"), H5Pclose};
  return H5Pget_layout(creation.id());
}

bool Dataset::chunked() const { return layout() == H5D_CHUNKED; }
bool Dataset::compact() const { return layout() == H5D_COMPACT; }

std::size_t Dataset::stored_elements() const {
  const Lock lock;
  const Handle file{require(H5Iget_file_id(id()), where(), "has no file"), H5Fclose};
  hsize_t length = 0;
  require(H5Fget_filesize(file.id(), &length), where(), "file has no length");
  const Shape sizes = shape();
  const std::size_t bytes = type().bytes();
  if (bytes == 0) throw Error{Refusal::input, where(), "type", "elements of 1 byte or more", "elements of 0 bytes"};
  const hsize_t most = length * (chunked() ? largest_inflation : 1) / bytes;
  hsize_t count = std::ranges::count(sizes, hsize_t{0}) > 0 ? 0 : 1;
  const auto bound = [&](hsize_t next) {
    if (next > 0 && count > most / next)
      throw Error{Refusal::input, where(), "shape",
                  fmt::format("at most {} elements in a file of {} bytes", most, length), to_string(sizes)};
    count *= next;
  };
  bound(1);  // a scalar may be larger than the file
  std::ranges::for_each(sizes, bound);
  return static_cast<std::size_t>(count);
}

Shape Dataset::chunk() const {
  const Lock lock;
  const Handle creation{require(H5Dget_create_plist(id()), where(), "layout cannot be read"), H5Pclose};
  Shape chunk(shape().size());
  require(H5Pget_chunk(creation.id(), static_cast<int>(chunk.size()), chunk.data()), where(), "chunks cannot be read");
  return chunk;
}

void Dataset::require_written() const {
  const Lock lock;
  const Shape sizes = shape();
  const hsize_t size = hdf5::bytes(sizes, type().bytes());
  if (size == 0 || compact()) return;
  if (!chunked()) {
    if (!offset()) throw Error{Refusal::input, where(), "storage", fmt::format("{} bytes", size), "none allocated"};
    return;
  }
  const Shape one = chunk();
  hsize_t needed = 1, written = 0;
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) needed *= (sizes[axis] + one[axis] - 1) / one[axis];
  const Space space{require(H5Dget_space(id()), where(), "shape cannot be read"), H5Sclose};
  require(H5Dget_num_chunks(id(), space.id(), &written), where(), "chunks cannot be counted");
  if (written < needed)
    throw Error{Refusal::input, where(), "chunks", fmt::format("{} written", needed), fmt::format("{}", written)};
}

std::size_t attribute_elements(const Handle& attribute, const std::string& where) {
  const Lock lock;
  const Type type{require(H5Aget_type(attribute.id()), where, "type cannot be read"), H5Tclose};
  require_fixed_size(type, where);
  const Space space{require(H5Aget_space(attribute.id()), where, "shape cannot be read"), H5Sclose};
  const hssize_t count = require(H5Sget_simple_extent_npoints(space.id()), where, "shape cannot be read");
  if (static_cast<std::size_t>(count) > largest_header / type.bytes())
    throw Error{Refusal::input, where, "size", fmt::format("at most {} bytes", largest_header),
                fmt::format("{} elements of {}", count, type.bytes())};
  return static_cast<std::size_t>(count);
}

void Dataset::require_plain_storage() const {
  const Lock lock;
  const Handle creation{require(H5Dget_create_plist(id()), where(), "layout cannot be read"), H5Pclose};
  if (H5Pget_layout(creation.id()) == H5D_VIRTUAL)
    throw Error{Refusal::input, where(), "layout", "contiguous or chunked", "virtual"};
  if (H5Pget_external_count(creation.id()) > 0)
    throw Error{Refusal::input, where(), "layout", "stored in this file", "external files"};
  const int filters = require(H5Pget_nfilters(creation.id()), where(), "filters cannot be read");
  for (int f = 0; f < filters; ++f) {
    unsigned flags = 0, settings = 0;
    std::size_t values = 0;
    char name[64] = "";
    const H5Z_filter_t filter =
        H5Pget_filter2(creation.id(), static_cast<unsigned>(f), &flags, &values, nullptr, sizeof name, name, &settings);
    if (filter != H5Z_FILTER_DEFLATE && filter != H5Z_FILTER_SHUFFLE)
      throw Error{Refusal::input, where(), "filter", "deflate or shuffle",
                  name[0] != '\0' ? std::string(name) : fmt::format("filter number {}", filter)};
  }
}

void Dataset::read(const Type& type, void* elements) const {
  const Lock lock;
  require_convertible(this->type().id(), type.id(), where());
  require(H5Dread(id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, elements), where(), "cannot be read");
}

std::vector<std::byte> Dataset::bytes() const {
  const Type stored = type();
  require_fixed_size(stored, where());
  std::vector<std::byte> all(stored_elements() * stored.bytes());
  if (!all.empty()) read(stored, all.data());
  return all;
}

void Dataset::write(const Type& type, const void* elements) {
  const Lock lock;
  require(H5Dwrite(id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, elements), where(), "cannot be written");
}

void Dataset::require_type(const Type& expected) const {
  const Type found = type();
  if (!(found == expected)) throw Error{Refusal::input, where(), "type", expected.name(), found.name()};
}

std::string Dataset::text() const {
  const Lock lock;
  const Type found = type();
  if (H5Tget_class(found.id()) != H5T_STRING || H5Tis_variable_str(found.id()) > 0)
    throw Error{Refusal::input, where(), "type", "fixed-length string", found.name()};
  if (!shape().empty()) throw Error{Refusal::input, where(), "shape", "scalar", to_string(shape())};
  std::string bytes(stored_elements() * found.bytes(), '\0');
  read(found, bytes.data());
  return unpadded(found, bytes);
}

std::string unpadded(const Type& type, std::string_view bytes) {
  const Lock lock;
  const H5T_str_t padding = H5Tget_strpad(type.id());
  if (padding == H5T_STR_NULLTERM) return std::string(bytes.substr(0, bytes.find('\0')));
  const auto last = bytes.find_last_not_of(padding == H5T_STR_SPACEPAD ? ' ' : '\0');
  return std::string(bytes.substr(0, last == std::string_view::npos ? 0 : last + 1));
}

std::string Group::where_of(const std::string& name) const {
  return where() + (where().ends_with('/') ? "" : "/") + name;
}

Group::Member Group::member(const std::string& name) const {
  const Lock lock;
  if (require(H5Lexists(id(), name.c_str(), H5P_DEFAULT), where_of(name), "cannot be looked up") == 0)
    return Member::none;
  require_hard_links(id(), name, where_of(name));
  const Handle object{require(H5Oopen(id(), name.c_str(), H5P_DEFAULT), where_of(name), "cannot be opened"), H5Oclose};
  const H5I_type_t type = H5Iget_type(object.id());
  return type == H5I_GROUP ? Member::group : type == H5I_DATASET ? Member::dataset : Member::other;
}

std::vector<std::string> Group::names() const {
  const Lock lock;
  std::vector<std::string> names;
  hsize_t next = 0;
  require(H5Literate(id(), H5_INDEX_NAME, H5_ITER_INC, &next, add_link_name, &names), where(), "cannot be listed");
  return names;
}

Group Group::group(const std::string& name) const {
  const Lock lock;
  const std::string at = where_of(name);
  require_hard_links(id(), name, at);
  return {Handle{require(H5Gopen2(id(), name.c_str(), H5P_DEFAULT), at, "cannot be opened"), H5Gclose}, at};
}

Dataset Group::dataset(const std::string& name) const {
  const Lock lock;
  const std::string at = where_of(name);
  require_hard_links(id(), name, at);
  return {Handle{require(H5Dopen2(id(), name.c_str(), H5P_DEFAULT), at, "cannot be opened"), H5Dclose}, at};
}

Group Group::create_group(const std::string& name) {
  const Lock lock;
  const std::string at = where_of(name);
  const Handle creation = untimed(H5P_GROUP_CREATE);
  return {Handle{require(H5Gcreate2(id(), name.c_str(), H5P_DEFAULT, creation.id(), H5P_DEFAULT), at, "cannot be made"),
                 H5Gclose},
          at};
}

Dataset Group::create_dataset(const std::string& name, const Type& type, const Shape& shape) {
  const Lock lock;
  const std::string at = where_of(name);
  const Handle creation = untimed(H5P_DATASET_CREATE);
  H5Pset_layout(creation.id(), H5D_CONTIGUOUS);
  H5Pset_alloc_time(creation.id(), H5D_ALLOC_TIME_EARLY);
  H5Pset_fill_time(creation.id(), H5D_FILL_TIME_NEVER);
  const Space space = Space::of(shape);
  return {Handle{require(H5Dcreate2(id(), name.c_str(), type.id(), space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT),
                         at, "cannot be made"),
                 H5Dclose},
          at};
}

Dataset Group::write_text(const std::string& name, std::string_view text) {
  const Lock lock;
  const std::string stored = text.empty() ? std::string(1, '\0') : std::string(text);
  const Type type = Type::utf8(stored.size());
  Dataset dataset = create_dataset(name, type, {});
  dataset.write(type, stored.data());
  return dataset;
}

File File::create(const std::filesystem::path& path) {
  const Lock lock;
  return {created_file(path, access_properties(), path), path.string() + ":/"};
}

File File::create_in_memory(const std::string& name) {
  constexpr std::size_t growth = std::size_t{1} << 20;
  const Lock lock;
  const Handle access = access_properties();
  require(H5Pset_fapl_core(access.id(), growth, false), name, "cannot be kept in memory");
  // HDF5 first reads whatever stands under the name.
  return {created_file(name + " in memory", access, name), name + ":/"};
}

File File::open(const std::filesystem::path& path) {
  std::uint64_t length = 0;
  const FileDescriptor file = open_file(path.string(), length);
  return open(path, file, length);
}

File File::open(const std::filesystem::path& path, const FileDescriptor& file, std::uint64_t length) {
  check_superblock(file, length, path.string());
  return open_unchecked(path);
}

File File::open_unchecked(const std::filesystem::path& path) {
  const Lock lock;
  const Handle access = access_properties();
  return {
      Handle{require(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.id()), path.string(), "cannot be opened"), H5Fclose},
      path.string() + ":/"};
}

void File::flush() {
  const Lock lock;
  require(H5Fflush(id(), H5F_SCOPE_GLOBAL), where(), "cannot be flushed");
}

std::span<const std::byte> File::image() {
  const Lock lock;
  flush();
  const ssize_t bytes = require(H5Fget_file_image(id(), nullptr, 0), where(), "has no size");
  void* memory = nullptr;
  require(H5Fget_vfd_handle(id(), H5P_DEFAULT, &memory), where(), "has no image");
  return {*static_cast<const std::byte* const*>(memory), static_cast<std::size_t>(bytes)};
}

void File::close() {
  const Lock lock;
  require(H5Fclose(handle_.release()), where(), "cannot be closed");
}

}  // namespace kvreplay::hdf5
