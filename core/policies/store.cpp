#include "policies/store.h"

#include "error.h"

namespace kvreplay {

std::unique_ptr<StoredLayer> Store::apply(const LayerView&, const KeptSet&, const Partner&) const {
  throw Error{Refusal::internal, name(), "changes no tokens"};
}

Requirements ChangingStore::required() const {
  return {
      {Property::decided_once, "a store changes tokens at the end of the prompt", "schedule=once"},
      {Property::sets_of_kv_heads, "a store that changes tokens holds each once a KV head", "heads=kv or heads=layer"}};
}

}  // namespace kvreplay
