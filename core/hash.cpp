#include "hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <new>

namespace kvreplay {
namespace {

std::string digits_of(XXH128_hash_t hash) { return fmt::format("{:016x}{:016x}", hash.high64, hash.low64); }

}  // namespace

void Hash::Free::operator()(void* state) const { XXH3_freeState(static_cast<XXH3_state_t*>(state)); }

Hash::Hash() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_128bits_reset(static_cast<XXH3_state_t*>(state_.get()));
}

void Hash::update(std::span<const std::byte> bytes) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state_.get()), bytes.data(), bytes.size());
}

std::string Hash::digits() const {
  return digits_of(XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state_.get())));
}

std::string hash_of(std::span<const std::byte> bytes) { return digits_of(XXH3_128bits(bytes.data(), bytes.size())); }

}  // namespace kvreplay
