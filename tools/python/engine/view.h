// A layer as Python sees it: in a policy while the engine asks it, or opened by hand.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "arrays.h"
#include "observables/layer_view.h"

namespace kvreplay::python {

class View {
 public:
  /// `keeps` owns what `view` lives in; null: whoever made it calls let_go() when it ends.
  explicit View(const LayerView& view, std::shared_ptr<const void> keeps = nullptr)
      : view_(&view), keeps_(std::move(keeps)) {}

  /// Observables are remembered in the layer: its user holds this lock, and not the interpreter's.
  std::mutex& lock() const { return *lock_; }
  /// Throws Error{usage} when the layer is closed.
  const LayerView& operator*() const;
  const LayerView* operator->() const { return &**this; }
  void let_go() { view_ = nullptr; }

 private:
  const LayerView* view_;
  std::shared_ptr<const void> keeps_;
  std::shared_ptr<std::mutex> lock_ = std::make_shared<std::mutex>();
};

void bind_view(nanobind::module_& module);

}  // namespace kvreplay::python
