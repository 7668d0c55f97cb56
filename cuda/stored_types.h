// The types in which tensors are stored, as kernels know them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tensor.h"

namespace kvreplay {

/// Calls `with` with the type of an element.
template <class With>
void with_element(DType dtype, With with) {
  if (dtype == DType::float16) return with.template operator()<__half>();
  if (dtype == DType::bfloat16) return with.template operator()<__nv_bfloat16>();
  with.template operator()<float>();
}

}  // namespace kvreplay
