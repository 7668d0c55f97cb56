#include "hdf5/superblock.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "error.h"

namespace kvreplay {

void check_superblock(const FileDescriptor& file, std::uint64_t length, const std::string& where) {
  constexpr std::string_view signature{"\x89HDF\r\n\x1a\n", 8};
  std::array<unsigned char, 36> bytes{};
  const ssize_t got = ::pread(file.get(), bytes.data(), bytes.size(), 0);
  if (got < 0) throw Error{Refusal::input, where, std::string("cannot be read: ") + std::strerror(errno)};
  if (length == 0) throw Error{Refusal::input, where, "length", "an HDF5 file", "0 bytes"};
  if (std::memcmp(bytes.data(), signature.data(), signature.size()) != 0)
    throw Error{Refusal::input, where, "signature", "an HDF5 file", "another file format"};
  if (static_cast<std::size_t>(got) < bytes.size())
    throw Error{Refusal::input, where, "length", fmt::format("at least {} bytes", bytes.size()),
                fmt::format("{} bytes", length)};
  if (bytes[8] < 2 || bytes[8] > 3)
    throw Error{Refusal::input, where, "superblock version", "2 or 3", fmt::format("{}", bytes[8])};
  if (bytes[9] != 8 || bytes[10] != 8)
    throw Error{Refusal::input, where, "size of offsets and lengths", "8 and 8 bytes",
                fmt::format("{} and {}", bytes[9], bytes[10])};
  std::uint64_t end_of_file = 0;
  std::memcpy(&end_of_file, bytes.data() + 28, sizeof end_of_file);
  if (end_of_file > length)
    throw Error{Refusal::input, where, "length", fmt::format("{} bytes", end_of_file), fmt::format("{} bytes", length)};
}

}  // namespace kvreplay
