// Where observables of a whole prompt outlive the run that computed them.
#pragma once

#include <optional>
#include <string_view>

#include "matrix.h"

namespace kvreplay {

class ObservableStore {
 public:
  virtual ~ObservableStore() = default;
  /// [rows, columns] of a stored layer, with the very bits that the backend would make; none: not stored.
  virtual std::optional<Matrix> find(std::string_view observable, int layer, int rows, int columns) = 0;
  /// What the backend has made.
  virtual void keep(std::string_view observable, int layer, const Matrix& values) = 0;
};

}  // namespace kvreplay
