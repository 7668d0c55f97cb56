// Handles over the HDF5 C API that close themselves, and the handful of operations that traces and results need.
// Any thread may use them: each call holds hdf5::Lock.
//
// Files are written with libver bounds 1.8 to 1.10 (superblock >= 2, checksummed headers), fixed-length UTF-8 strings,
// no object times, and contiguous datasets that are allocated early, aligned and never filled. Locking is off.
#pragma once

#include <hdf5.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "hdf5/hdf5_lock.h"
#include "open_file.h"
#include "tensor.h"

namespace kvreplay::hdf5 {

using Shape = std::vector<hsize_t>;

/// The product of the dimensions, and of an element's size; 1 element for a scalar. What does not fit into 64 bits is
/// their largest number.
hsize_t elements(const Shape& shape);
hsize_t bytes(const Shape& shape, std::size_t element);
/// "[8, 4096, 128]"; "scalar".
std::string to_string(const Shape& shape);

/// An HDF5 identifier and the function that closes it.
class Handle {
 public:
  Handle() = default;
  Handle(hid_t id, herr_t (*close)(hid_t)) : id_(id), close_(close) {}
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, H5I_INVALID_HID)), close_(other.close_) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Handle() {
    if (id_ < 0) return;
    const Lock lock;
    close_(id_);
  }
  hid_t id() const { return id_; }
  /// Gives up the identifier: the caller closes it.
  hid_t release() { return std::exchange(id_, H5I_INVALID_HID); }

 private:
  hid_t id_ = H5I_INVALID_HID;
  herr_t (*close_)(hid_t) = nullptr;
};

/// What failed at `where`, with the innermost message of HDF5's error stack: {resources} where the disk is full,
/// {input} otherwise.
Error failure(const std::string& where, const std::string& what);

/// The name of a type whose elements lie in a heap of the file.
inline constexpr const char* variable_length_string = "variable-length string";

class Type : public Handle {
 public:
  using Handle::Handle;
  static Type int32();
  static Type int64();
  static Type float32();
  static Type float64();
  static Type float16();
  static Type bfloat16();  // sign 1, exponent 8, mantissa 7, bias 127
  static Type of(DType type);
  static Type utf8(std::size_t bytes);  // at least 1; padded with NUL

  /// As messages name it: "int32", "bfloat16", "big-endian float32", "variable-length string", "compound" ...
  std::string name() const;
  std::size_t bytes() const;
  bool is_fixed_string() const;
  bool is_variable_length_string() const;
  /// Whether elements, or parts of them, are addresses of what has any length.
  bool has_variable_length() const;
  /// Elements are nothing but their bytes; others have another size in memory than in the file.
  bool is_flat() const;

  static Type compound(std::size_t bytes);
  void insert(const char* name, std::size_t offset, const Type& member);
  bool is_compound() const;
  /// Of a compound, by name; none: it has no such member.
  std::optional<Type> member(const char* name) const;
  std::size_t member_offset(const char* name) const;

  bool operator==(const Type& other) const;
};

/// The HDF5 type of int32, int64, float and double elements.
template <class Element>
Type type_of();
template <>
inline Type type_of<std::int32_t>() {
  return Type::int32();
}
template <>
inline Type type_of<std::int64_t>() {
  return Type::int64();
}
template <>
inline Type type_of<float>() {
  return Type::float32();
}
template <>
inline Type type_of<double>() {
  return Type::float64();
}

class Space : public Handle {
 public:
  using Handle::Handle;
  static Space of(const Shape& shape);  // {}: scalar
};

/// Anything that has attributes. `where` is "FILE:/object/path", for messages.
class Object {
 public:
  Object(Handle handle, std::string where) : handle_(std::move(handle)), where_(std::move(where)) {}

  hid_t id() const { return handle_.id(); }
  const std::string& where() const { return where_; }
  /// Tells the objects of one file apart: two links to one object have the same.
  std::uint64_t number() const;
  /// "FILE:/object/path@name"
  std::string where(std::string_view attribute) const { return where_ + "@" + std::string(attribute); }

  void set_attribute(const std::string& name, std::string_view text);
  void set_attribute(const std::string& name, std::int64_t number);
  void set_attribute(const std::string& name, double number);

  bool has_attribute(const std::string& name) const;
  std::vector<std::string> attribute_names() const;
  /// Each refuses a type or shape other than a scalar of its own kind. Integers of any width are read.
  std::string string_attribute(const std::string& name) const;
  std::int64_t integer_attribute(const std::string& name) const;
  double float_attribute(const std::string& name) const;

 protected:
  Handle handle_;

 private:
  Handle open_attribute(const std::string& name, H5T_class_t type_class, const char* expected) const;
  void write_attribute(const std::string& name, const Type& type, const void* value);

  std::string where_;
};

class Dataset : public Object {
 public:
  using Object::Object;

  Type type() const;
  Shape shape() const;
  /// Bytes from the file's first; none: nothing is allocated, or not in one piece.
  std::optional<std::uint64_t> offset() const;
  /// Refuses what is stored outside the file, virtually, or through filters other than deflate and shuffle.
  void require_plain_storage() const;
  bool chunked() const;
  bool compact() const;
  /// The product of the dimensions, which must not be more than a file of this length can hold.
  std::size_t stored_elements() const;
  /// Refuses elements that were never written, which HDF5 reads as zeros: a chunk that is missing, or no storage.
  void require_written() const;

  /// Every element, in `type`, into memory that holds them.
  void read(const Type& type, void* elements) const;
  /// Of every element, as they are stored; elements without a fixed size are refused.
  std::vector<std::byte> bytes() const;
  void write(const Type& type, const void* elements);

  /// All elements; another element type in the file is refused.
  template <class Element>
  std::vector<Element> values() const {
    const Type expected = type_of<Element>();
    require_type(expected);
    std::vector<Element> all(stored_elements());
    read(expected, all.data());
    return all;
  }
  /// A scalar fixed-length string without its padding.
  std::string text() const;

 private:
  void require_type(const Type& expected) const;
  H5D_layout_t layout() const;
  Shape chunk() const;
};

/// The number of an open attribute's elements: of a fixed size, and no more than fit into an object's header.
std::size_t attribute_elements(const Handle& attribute, const std::string& where);

/// A fixed-length string element without its padding: NULs, or blanks where the type says so.
std::string unpadded(const Type& type, std::string_view bytes);

class Group : public Object {
 public:
  using Object::Object;

  enum class Member { none, group, dataset, other };
  /// What `name` is; links that lead out of the file are refused.
  Member member(const std::string& name) const;
  std::vector<std::string> names() const;

  Group group(const std::string& name) const;
  Dataset dataset(const std::string& name) const;

  Group create_group(const std::string& name);
  /// Contiguous, allocated now, not filled.
  Dataset create_dataset(const std::string& name, const Type& type, const Shape& shape);

  template <class Element>
  Dataset write(const std::string& name, std::span<const Element> elements, const Shape& shape) {
    const Type type = type_of<Element>();
    Dataset dataset = create_dataset(name, type, shape);
    dataset.write(type, elements.data());
    return dataset;
  }
  template <class Element>
  Dataset write(const std::string& name, const std::vector<Element>& elements) {
    return write(name, std::span<const Element>(elements), {elements.size()});
  }
  Dataset write_text(const std::string& name, std::string_view text);

 private:
  std::string where_of(const std::string& name) const;
};

class File : public Group {
 public:
  /// An existing file is overwritten.
  static File create(const std::filesystem::path& path);
  /// A file that is never on a disk: `name` is for messages. Writing it cannot fail half-way, which HDF5 survives
  /// badly; its image is written by whoever made it.
  static File create_in_memory(const std::string& name);
  /// For reading. Throws Error{input} for anything but a file whose metadata has checksums (superblock.h).
  static File open(const std::filesystem::path& path);
  /// The same of a file that is open already, under its path.
  static File open(const std::filesystem::path& path, const FileDescriptor& file, std::uint64_t length);
  /// Of any superblock version: damage to it can crash the library, so only in a child process (child_process.h).
  static File open_unchecked(const std::filesystem::path& path);

  void flush();
  /// The bytes of a file in memory, flushed; they lie in it and live as long.
  std::span<const std::byte> image();
  /// Closes now, so that a failure is heard; the destructor's is not.
  void close();

 private:
  using Group::Group;
};

}  // namespace kvreplay::hdf5
