#include "policies/parts/sharing.h"

namespace kvreplay {
namespace {

const RegisteredPart registered_none{{"none", PartKind::sharing, "every layer selects for itself"}};
const RegisteredPart registered_every{{"every", PartKind::sharing, "the first of every n layers selects for all n"}};

}  // namespace

Sharing no_sharing() {
  return [](int layer, int) { return layer; };
}

Sharing every(int n) {
  return [n](int layer, int) { return layer / n * n; };
}

}  // namespace kvreplay
