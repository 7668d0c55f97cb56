// kvreplay_bench: how fast the CPU backend is. Options of Google Benchmark, and
//   --trace FILE [--layers 0,10,29]   the same subjects on layers of a trace (default: its first)
//   --serve                           times on request, for other programs (server.h)
// Every case is checked against float64 before it is timed; the exit code is 1 when an answer is wrong.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstring>
#include <iostream>

#include "error.h"
#include "layer_data.h"
#include "measurement.h"
#include "parameters.h"
#include "server.h"
#include "subjects.h"

namespace kvreplay::bench {
namespace {

constexpr DType dtypes[] = {DType::float32, DType::float16, DType::bfloat16};

/// A shape that takes no time: it shows that the program works.
constexpr RandomShape tiny{.query_heads = 4, .kv_heads = 2, .dim = 40, .tokens = 333};
/// SmolLM2-135M, and models of 8 billion parameters.
constexpr RandomShape small_model{.query_heads = 9, .kv_heads = 3, .dim = 64};
constexpr RandomShape large_model{.query_heads = 32, .kv_heads = 8, .dim = 128};
/// One KV head of the latter.
constexpr RandomShape large_group{.query_heads = 4, .kv_heads = 1, .dim = 128};

LayerSource layer(RandomShape shape, int tokens, DType dtype, int last_queries = 0) {
  shape.tokens = tokens;
  shape.dtype = dtype;
  shape.last_queries = last_queries;
  return random_layer(shape);
}

/// [tokens, heads * 1 * dim] token vectors.
LayerSource vectors(int heads, int dim, int tokens, DType dtype) {
  return layer({.query_heads = heads, .kv_heads = heads, .dim = dim}, tokens, dtype, 1);
}

/// All subjects that the stored queries of a layer allow.
void add_all(Cases& cases, const LayerSource& source) {
  const auto last_stored = [&](int queries) { return source.first_query <= source.tokens - queries; };
  if (last_stored(source.tokens)) add_cumulative_attention(cases, source);
  for (const int window : {8, 32})
    if (last_stored(window)) add_window_attention(cases, source, window);
  if (last_stored(32)) add_resident_attention(cases, source);
  if (last_stored(32)) add_kept_moments(cases, source);
  add_similarity_row_maxima(cases, source);
  add_least_redundant(cases, source);
  if (last_stored(source.tokens)) add_online_eviction(cases, source);
  add_key_norms(cases, source);
}

Cases random_cases() {
  Cases cases;
  for (const DType dtype : dtypes) {
    add_all(cases, layer(tiny, tiny.tokens, dtype));
    add_mapped_bytes(cases, dtype, tiny.tokens);
    for (const RandomShape& shape : {small_model, large_model})
      for (const int tokens : {4096, 8192, 16384}) add_cumulative_attention(cases, layer(shape, tokens, dtype));
    add_cumulative_attention(cases, layer(large_group, 131072, dtype));
    for (const int tokens : {8192, 32768, 131072}) {
      for (const int window : {8, 32}) add_window_attention(cases, layer(large_model, tokens, dtype, 32), window);
      add_resident_attention(cases, layer(large_model, tokens, dtype, 32));
    }
    for (const RandomShape& shape : {small_model, large_model})
      for (const int tokens : {4096, 8192}) {
        add_kept_moments(cases, layer(shape, tokens, dtype));
        add_online_eviction(cases, layer(shape, tokens, dtype));
      }
    for (const LayerSource& source : {vectors(3, 64, 4000, dtype), vectors(8, 128, 4000, dtype)}) {
      add_similarity_row_maxima(cases, source);
      add_least_redundant(cases, source);
    }
    add_similarity_row_maxima(cases, vectors(32, 128, 4000, dtype));
    add_similarity_row_maxima(cases, vectors(3, 64, 16384, dtype));
    add_key_norms(cases, layer(large_model, 32768, dtype, 1));
    add_mapped_bytes(cases, dtype, 65536);
  }
  return cases;
}

struct Options {
  std::string trace;
  std::string layers = "0";
  bool serve = false;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 == argc) throw Error{Refusal::usage, std::string(word), "no value"};
      return argv[++i];
    };
    if (word == "--trace") {
      options.trace = value();
    } else if (word == "--layers") {
      options.layers = value();
    } else if (word == "--serve") {
      options.serve = true;
    } else {
      throw Error{Refusal::usage, "kvreplay_bench", "unknown option", "--trace, --layers, --serve or --benchmark_...",
                  std::string(word)};
    }
  }
  return options;
}

void run(benchmark::State& state, const Case& some, Sgemm& sgemm, bool& wrong) {
  for (auto _ : state) {
    const Prepared prepared = some.prepare();
    const FirstCall first = first_call(prepared);
    const Verdict verdict = prepared.check();
    if (!verdict.problem.empty()) {
      wrong = true;
      state.SkipWithError(verdict.problem.c_str());
      return;
    }
    const Rounds rounds = measure(prepared, some.threads, first.seconds, sgemm);
    state.SetIterationTime(rounds.seconds);
    state.counters[some.rate == Rate::operations ? "GF/s" : "GB/s"] = prepared.work / rounds.seconds * 1e-9;
    if (some.rate == Rate::operations) state.counters["of_sgemm"] = rounds.of_sgemm;
    if (prepared.result_bytes > 0) state.counters["extra_MB"] = static_cast<double>(first.extra_bytes) * 1e-6;
    state.counters["max_error"] = verdict.relative_error;
    state.counters["spread"] = rounds.spread;
    for (const Verdict::Counter& counter : verdict.counters) state.counters[counter.name] = counter.value;
  }
}

int main_program(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const Options options = parse(argc, argv);
  Cases cases;
  if (options.trace.empty()) {
    cases = random_cases();
  } else {
    const auto trace = std::make_shared<const Trace>(Trace::open(options.trace));
    for (const std::string_view number : split_list("--layers", options.layers))
      add_all(cases, trace_layer(trace, static_cast<int>(parse_int("--layers", number))));
  }
  if (options.serve) {
    serve(cases, std::cin, std::cout);
    return 0;
  }
  Sgemm sgemm;
  bool wrong = false;
  for (const Case& some : cases)
    benchmark::RegisterBenchmark(some.name.c_str(), [&](benchmark::State& state) { run(state, some, sgemm, wrong); })
        ->UseManualTime()
        ->Iterations(1)
        ->Unit(benchmark::kMillisecond);
  benchmark::AddCustomContext("blas", blas_description());
  benchmark::AddCustomContext("compiler", __VERSION__);
  if (benchmark::RunSpecifiedBenchmarks() == 0) throw Error{Refusal::usage, "--benchmark_filter", "no such case"};
  return wrong ? 1 : 0;
}

}  // namespace
}  // namespace kvreplay::bench

int main(int argc, char** argv) try {
  return kvreplay::bench::main_program(argc, argv);
} catch (const kvreplay::Error& error) {
  std::cerr << "kvreplay_bench: " << error.what() << '\n';
  return 2;
}
