#include "trace/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "hdf5/child_process.h"
#include "hdf5/hdf5.h"
#include "hdf5/partial_file.h"
#include "trace/validate.h"

namespace kvreplay {
namespace {

using hdf5::Handle, hdf5::Type;

constexpr std::size_t largest_attribute = std::size_t{1} << 16;  // bytes

/// Elements whose type has one size.
struct Elements {
  Type type;
  std::size_t size;  // of one
  std::vector<std::byte> bytes;
};

/// Strings by their addresses in memory; none may be null.
Elements fixed_strings(const std::byte* first, std::size_t stride, std::size_t count) {
  std::vector<std::string_view> texts;
  std::size_t longest = 1;
  for (std::size_t i = 0; i < count; ++i) {
    const char* text = nullptr;
    std::memcpy(&text, first + i * stride, sizeof text);
    texts.emplace_back(text == nullptr ? "" : text);
    longest = std::max(longest, texts.back().size());
  }
  Elements strings{Type::utf8(longest), longest, std::vector<std::byte>(count * longest)};
  for (std::size_t i = 0; i < count; ++i) std::memcpy(&strings.bytes[i * longest], texts[i].data(), texts[i].size());
  return strings;
}

Elements fixed_length(const Type& type, const std::byte* first, std::size_t stride, std::size_t count,
                      const std::string& where);

/// A compound's members, one behind the other.
Elements fixed_members(const Type& type, const std::byte* first, std::size_t stride, std::size_t count,
                       const std::string& where) {
  std::vector<std::pair<std::string, Elements>> members;
  std::size_t size = 0;
  for (int m = 0; m < H5Tget_nmembers(type.id()); ++m) {
    const auto index = static_cast<unsigned>(m);
    char* name = H5Tget_member_name(type.id(), index);
    const std::string member_name = name == nullptr ? "" : name;
    H5free_memory(name);
    const Type member{H5Tget_member_type(type.id(), index), H5Tclose};
    const std::size_t offset = H5Tget_member_offset(type.id(), index);
    if (offset > type.bytes() || member.bytes() > type.bytes() - offset)
      throw Error{Refusal::input, where, "type", "members within their compound", member_name + " ends outside it"};
    members.emplace_back(member_name, fixed_length(member, first + offset, stride, count, where));
    size += members.back().second.size;
  }
  Elements compound{Type::compound(size), size, std::vector<std::byte>(count * size)};
  std::size_t at = 0;
  for (const auto& [name, elements] : members) {
    compound.type.insert(name.c_str(), at, elements.type);
    for (std::size_t i = 0; i < count; ++i)
      std::memcpy(&compound.bytes[i * size + at], &elements.bytes[i * elements.size], elements.size);
    at += elements.size;
  }
  return compound;
}

Elements fixed_length(const Type& type, const std::byte* first, std::size_t stride, std::size_t count,
                      const std::string& where) {
  if (type.is_variable_length_string()) return fixed_strings(first, stride, count);
  if (type.is_compound() && type.has_variable_length()) return fixed_members(type, first, stride, count, where);
  const std::size_t size = type.bytes();
  Elements flat{Type{H5Tcopy(type.id()), H5Tclose}, size, std::vector<std::byte>(count * size)};
  for (std::size_t i = 0; i < count; ++i) std::memcpy(&flat.bytes[i * size], first + i * stride, size);
  return flat;
}

/// Numbers, strings, and compounds of them.
bool can_be_copied(const Type& type) {
  if (type.is_variable_length_string() || type.is_flat()) return true;
  if (!type.is_compound()) return false;
  for (int m = 0; m < H5Tget_nmembers(type.id()); ++m)
    if (!can_be_copied(Type{H5Tget_member_type(type.id(), static_cast<unsigned>(m)), H5Tclose})) return false;
  return true;
}

/// What `read` puts into memory. The strings are the child's to its end.
template <class Read>
Elements elements_of(const Type& type, std::size_t count, const std::string& where, Read read) {
  const std::size_t size = type.bytes();
  std::vector<std::byte> bytes(count * size);
  if (count > 0 && read(bytes.data()) < 0) throw hdf5::failure(where, "cannot be read");
  if (!type.has_variable_length()) return {Type{H5Tcopy(type.id()), H5Tclose}, size, std::move(bytes)};
  return fixed_length(type, bytes.data(), size, count, where);
}

/// Copies everything that hard links lead to.
class Copy {
 public:
  Copy(const hdf5::File& made, PartialFile& room) : made_(made), room_(room) { room_.reserve_again(); }

  void copy_members(const hdf5::Group& from, hdf5::Group& to) {
    copy_attributes(from, to);
    for (const std::string& name : from.names()) {
      H5L_info_t link;
      if (H5Lget_info(from.id(), name.c_str(), &link, H5P_DEFAULT) < 0)
        throw hdf5::failure(from.where(), "cannot be read");
      if (link.type != H5L_TYPE_HARD) continue;
      const hdf5::Group::Member kind = from.member(name);
      if (kind == hdf5::Group::Member::dataset) copy_dataset(from.dataset(name), name, to);
      if (kind == hdf5::Group::Member::group) copy_group(from.group(name), name, to);
    }
  }

 private:
  /// Room for so many bytes behind all that was written.
  void reserve(std::size_t bytes) {
    hsize_t end = 0;
    if (H5Fget_filesize(made_.id(), &end) < 0) throw hdf5::failure(made_.where(), "has no length");
    room_.reserve(end + bytes);
  }

  void copy_group(const hdf5::Group& from, const std::string& name, hdf5::Group& to) {
    if (!met_.insert(from.number()).second)
      throw Error{Refusal::input, from.where(), "link", "a group with one hard link", "a group with several"};
    reserve(0);
    hdf5::Group made = to.create_group(name);
    copy_members(from, made);
  }

  void copy_attributes(const hdf5::Object& from, const hdf5::Object& to) {
    for (const std::string& name : from.attribute_names()) {
      const Handle old{H5Aopen(from.id(), name.c_str(), H5P_DEFAULT), H5Aclose};
      if (old.id() < 0) throw hdf5::failure(from.where(name), "cannot be read");
      const Type type{H5Aget_type(old.id()), H5Tclose};
      const hdf5::Space space{H5Aget_space(old.id()), H5Sclose};
      if (!can_be_copied(type)) continue;
      const auto count = static_cast<std::size_t>(std::max<hssize_t>(H5Sget_simple_extent_npoints(space.id()), 0));
      if (type.bytes() == 0 || count > largest_attribute / type.bytes())
        throw Error{Refusal::input, from.where(name), "size", fmt::format("at most {} bytes", largest_attribute),
                    fmt::format("{} elements of {}", count, type.bytes())};
      const Elements all = elements_of(type, count, from.where(name),
                                       [&](std::byte* into) { return H5Aread(old.id(), type.id(), into); });
      reserve(all.bytes.size());
      const Handle made{H5Acreate2(to.id(), name.c_str(), all.type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT),
                        H5Aclose};
      if (made.id() < 0 || (count > 0 && H5Awrite(made.id(), all.type.id(), all.bytes.data()) < 0))
        throw hdf5::failure(to.where(name), "cannot be written");
    }
  }

  void copy_dataset(const hdf5::Dataset& from, const std::string& name, hdf5::Group& to) {
    const Type type = from.type();
    if (!can_be_copied(type)) return;
    from.require_plain_storage();
    from.require_written();
    const std::size_t count = from.stored_elements();
    const Elements all = elements_of(type, count, from.where(), [&](std::byte* into) {
      from.read(type, into);
      return herr_t{0};
    });
    reserve(all.bytes.size());
    hdf5::Dataset made = to.create_dataset(name, all.type, from.shape());
    if (count > 0) made.write(all.type, all.bytes.data());
    copy_attributes(from, made);
  }

  const hdf5::File& made_;
  PartialFile& room_;
  std::set<std::uint64_t> met_;
};

/// The same violation at the same object of another file.
Error in_file(const Error& violation, const std::string& from, const std::string& to) {
  const std::string object = violation.where().substr(std::min(from.size(), violation.where().size()));
  return {violation.refusal(), to + object, violation.problem(), violation.expected(), violation.found()};
}

}  // namespace

std::vector<Error> convert(const std::filesystem::path& old, const std::filesystem::path& made, Existing existing,
                           const std::function<bool()>& interrupted) {
  refuse_existing(made, existing);
  PartialFile partial(made);
  const auto copy = [&] {
    const hdf5::File from = hdf5::File::open_unchecked(old);
    hdf5::File to = hdf5::File::create(partial.path());
    Copy(to, partial).copy_members(from, to);
    to.close();
    return std::string();
  };
  run_in_child(old, copy, interrupted);
  partial.trim();
  std::vector<Error> broken;
  for (const Error& violation : violations(partial.path()))
    broken.push_back(in_file(violation, partial.path().string(), old.string()));
  if (broken.empty()) partial.finish();
  return broken;
}

}  // namespace kvreplay
