#include "policies/store.h"

#include <utility>

namespace kvreplay {

Store changing_store(std::string name, Store::Apply apply) {
  return {.name = std::move(name),
          .required = {{Property::decided_once, "a store changes tokens at the end of the prompt", "schedule=once"},
                       {Property::sets_of_kv_heads, "a store that changes tokens needs one copy of a token per KV head",
                        "heads=kv or heads=layer"}},
          .has_exact_size = false,
          .apply = std::move(apply)};
}

}  // namespace kvreplay
