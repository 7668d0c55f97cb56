// What one thread of the CPU backend works in, kept from call to call.
#pragma once

#include <vector>

#include "cpu/aligned_buffer.h"
#include "cpu/moment_block.h"
#include "cpu/softmax_block.h"
#include "cpu/tile.h"

namespace kvreplay {

struct ThreadScratch {
  ThreadScratch(const TileKernels& kernels, const MomentKernels& moment_kernels)
      : block(kernels), moments(kernels, moment_kernels) {}
  SoftmaxBlock block;
  MomentBlock moments;
  std::vector<BlockRow> rows;
  AlignedBuffer<float> staging, keys, values, factors, logits, resident_logits, exponentials;
  AlignedBuffer<double> sums, wide_rows, wide_keys, wide_products;
  // Of the general comparison: the layer's own, those of a set, and those of one query.
  AlignedBuffer<double> full_logits, full_weights, full_outputs, set_weights, set_outputs, query_weights, query_outputs;
};

}  // namespace kvreplay
