// How fast numbers come out of memory and of a mapped file.
#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>

#include "cpu/tile.h"
#include "float64.h"
#include "float_types.h"
#include "positions.h"
#include "subjects.h"
#include "trace/synth.h"

namespace kvreplay::bench {
namespace {

/// A trace of one layer in the folder for temporary files, gone when nobody needs it.
class TemporaryTrace {
 public:
  TemporaryTrace(DType dtype, int kv_heads, int tokens, int dim)
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("kvreplay-bench-{}-{}.h5", getpid(), name_of(dtype))) {
    synthesise({.layers = 1,
                .query_heads = kv_heads,
                .kv_heads = kv_heads,
                .head_dim = dim,
                .prefill = tokens,
                .continuation = 0,
                .dtype = dtype,
                .last_queries = 1,
                .existing = Existing::replace},
               path_);
  }
  ~TemporaryTrace() { std::filesystem::remove(path_); }
  TemporaryTrace(const TemporaryTrace&) = delete;
  TemporaryTrace& operator=(const TemporaryTrace&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace

void add_key_norms(Cases& cases, const LayerSource& source) {
  const std::string name = fmt::format("key_norms/{}", source.name);
  add_at_every_level(cases, name, Rate::bytes, [=](const std::shared_ptr<Backend>& backend) {
    const std::shared_ptr<const LayerData> layer = source.load();
    const auto norms = std::make_shared<Matrix>();
    return Prepared{.call = [=] { *norms = backend->norms(layer->tensors.k, source.tokens, 2.0); },
                    .check =
                        [=] {
                          double error = 0;
                          const Matrix keys = vectors_of(layer->tensors.k, 0, position_range(0, source.tokens));
                          for (int token = 0; token < source.tokens; ++token) {
                            const std::span<const double> key = keys.row(token);
                            const double square = std::inner_product(key.begin(), key.end(), key.begin(), 0.0);
                            error = std::max(error, distance((*norms)(0, token) / std::sqrt(square), 1.0));
                          }
                          return verdict_of(error, 1e-6);
                        },
                    .result = [=] { return std::vector<double>(norms->values().begin(), norms->values().end()); },
                    .result_bytes = product_bytes(source.kv_heads, source.tokens),
                    .work = static_cast<double>(layer->tensors.k.bytes())};
  });
}

void add_mapped_bytes(Cases& cases, DType dtype, int tokens) {
  constexpr int kv_heads = 4, dim = 128;
  const std::string name = fmt::format("mapped_bytes/n:{}/{}", tokens, name_of(dtype));
  for (const int threads : {1, omp_get_num_procs()}) {
    cases.push_back({fmt::format("{}/threads:{}", name, threads), Rate::bytes, threads, [=] {
                       const TemporaryTrace file(dtype, kv_heads, tokens, dim);
                       const auto sums = std::make_shared<std::vector<double>>(static_cast<std::size_t>(kv_heads));
                       const auto trace = std::make_shared<const Trace>(Trace::open(file.path()));  // which holds it
                       const auto read = [=] {
                         trace->release(0);  // page faults are part of reading
                         const LayerTensors layer = trace->layer(0);
                         const TileKernels& kernels = tile_kernels();
#pragma omp parallel for schedule(static) num_threads(threads)
                         for (int head = 0; head < kv_heads; ++head) {
                           alignas(64) float row[dim];
                           double sum = 0;
                           for (const TensorView& tensor : {layer.k, layer.v}) {
                             for (int token = 0; token < tokens; ++token) {
                               kernels.widen(tensor.row(head, token), dtype, dim, row);
                               sum += static_cast<double>(row[token % dim]);
                             }
                           }
                           (*sums)[static_cast<std::size_t>(head)] = sum;
                         }
                       };
                       return Prepared{.call = read,
                                       .check =
                                           [=] {
                                             const LayerTensors layer = trace->layer(0);
                                             double expected = 0;
                                             for (const TensorView& tensor : {layer.k, layer.v})
                                               for (int token = 0; token < tokens; ++token)
                                                 expected +=
                                                     static_cast<double>(load(tensor.row(0, token), dtype,
                                                                              static_cast<std::size_t>(token % dim)));
                                             const double error = distance(sums->front(), expected);
                                             return Verdict{.relative_error = error,
                                                            .problem = error > 1e-9 ? "numbers were read wrongly" : ""};
                                           },
                                       .result = [=] { return *sums; },
                                       .result_bytes = 0,  // resident memory would count the file's pages
                                       .work = 2.0 * kv_heads * tokens * dim * static_cast<double>(size_of(dtype))};
                     }});
  }
}

}  // namespace kvreplay::bench
