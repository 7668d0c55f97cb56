#include "policies/store.h"

#include <utility>

namespace kvreplay {

namespace {

constexpr Requirement one_copy{Property::sets_of_kv_heads,
                               "a store that changes tokens needs one copy of a token per KV head",
                               "heads=kv or heads=layer"};

}  // namespace

Store changing_store(std::string name, Store::Apply apply) {
  return {.name = std::move(name),
          .required = {{Property::decided_once, "a store changes tokens at the end of the prompt", "schedule=once"},
                       one_copy},
          .has_exact_size = false,
          .apply = std::move(apply)};
}

Store evolving_store(std::string name, Store::Apply apply, Store::Evolve evolve) {
  return {.name = std::move(name), .required = {one_copy}, .apply = std::move(apply), .evolve = std::move(evolve)};
}

}  // namespace kvreplay
