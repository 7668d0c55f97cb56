#include "attention/backend.h"

namespace kvreplay {

Registry<BackendCard>& backends() {
  static Registry<BackendCard> registry("backend");
  return registry;
}

std::unique_ptr<Backend> make_backend(const std::string& name, int threads, DeviceChoice device) {
  return backends().get(name).make(threads, device);
}

}  // namespace kvreplay
