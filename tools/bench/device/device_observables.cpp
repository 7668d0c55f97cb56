// What each observable costs on this machine's device, and what the device itself can do: a line of JSON each.
//
//     device_observables [TEXT...]     the cases whose names contain one of the texts; all without any
//     device_observables --list        their names
//     device_observables --device      which device that is
//
// Each is first compared with the CPU backend on a shorter layer of the same shape. Then it is timed on a layer that is
// held, so without copies, and on one that is not.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "device_rates.h"
#include "error.h"
#include "positions.h"
#include "tools/bench/layer_data.h"

namespace kvreplay::bench {
namespace {

constexpr int checked_tokens = 640;
constexpr double wanted_seconds = 1.0;
constexpr std::size_t most_calls = 20;
constexpr int window = 32;

/// Numbers of one kind, which are compared with each other's size in view.
using Answer = std::vector<std::vector<double>>;
/// Called again and again; its question is made beforehand, and its answer is converted when that is asked for.
using Call = std::function<std::function<Answer()>(Backend&, const LayerTensors&)>;

struct Observable {
  std::string name;
  double tolerance = 0;  // of the difference from the CPU backend, relative to a number or to the mean
  std::function<Call(const RandomShape&)> ask;
  std::function<double(const RandomShape&)> operations;
  std::function<double(const RandomShape&)> bytes;  // that must be read
};

double bytes_of(int heads, const RandomShape& shape) {
  return static_cast<double>(heads) * shape.tokens * shape.dim * static_cast<double>(size_of(shape.dtype));
}
double none(const RandomShape&) { return 0; }

/// Pairs of a query and a key that it sees, of the last queries of all heads.
double causal_pairs(const RandomShape& shape, int queries) {
  const double first = shape.tokens - queries + 1;
  return shape.query_heads * (first + shape.tokens) * queries / 2;
}

std::vector<double> plain(std::span<const double> numbers) { return {numbers.begin(), numbers.end()}; }
std::vector<double> plain(const std::vector<std::int32_t>& numbers) { return {numbers.begin(), numbers.end()}; }

Observable attention_of(const std::string& name, std::function<int(const RandomShape&)> queries) {
  return {.name = name,
          .tolerance = 1e-5,
          .ask = [queries](const RandomShape& shape) -> Call {
            return [asked = position_range(shape.tokens - queries(shape), shape.tokens), columns = shape.tokens](
                       Backend& backend, const LayerTensors& layer) {
              return [sums = backend.attention_sums(layer, {.queries = asked, .columns = columns})]() -> Answer {
                return {plain(sums.values())};
              };
            };
          },
          // Each product twice: once for the sum of its row, once for that of its column.
          .operations =
              [queries](const RandomShape& shape) { return 4.0 * shape.dim * causal_pairs(shape, queries(shape)); },
          .bytes = [](const RandomShape& shape) { return bytes_of(shape.kv_heads, shape); }};
}

Observable kept_moments_of(const std::string& name, MomentParts parts) {
  return {
      .name = name,
      .tolerance = 2e-5,
      .ask = [parts](const RandomShape& shape) -> Call {
        const int boundary = shape.tokens - window;
        return [parts, boundary, sets = random_sets(shape.kv_heads, boundary),
                queries = position_range(boundary, shape.tokens)](Backend& backend, const LayerTensors& layer) {
          std::vector<KeptSets> kept;
          for (const KeptSet& set : sets) kept.push_back({&set, 1});
          return [found = backend.kept_moments(layer, queries, boundary, kept, parts)] {
            Answer answer(7);
            for (const Moments& moments : found.kept) {
              answer[0].push_back(moments.mass);
              answer[1].push_back(moments.square);
              answer[2].push_back(moments.prompt_mass);
              answer[3].push_back(moments.output_square);
              answer[4].push_back(std::sqrt(moments.error_square));
              answer[5].push_back(moments.logit_square);
              answer[6].push_back(moments.unaligned_dot);
            }
            return answer;
          };
        };
      },
      .operations = none,
      .bytes = [parts](const RandomShape& shape) { return bytes_of(shape.kv_heads, shape) * (parts.outputs ? 2 : 1); }};
}

const std::vector<Observable>& observables() {
  static const std::vector<Observable> all{
      attention_of("cumulative_attention", [](const RandomShape& shape) { return shape.tokens; }),
      attention_of("window_attention", [](const RandomShape&) { return window; }),
      kept_moments_of("kept_moments", {}),
      kept_moments_of("kept_moments_outputs", {.outputs = true}),
      kept_moments_of("kept_moments_all", all_moments),
      {.name = "similarity_row_maxima",
       .tolerance = 2e-6,
       .ask = [](const RandomShape& shape) -> Call {
         return [tokens = shape.tokens](Backend& backend, const LayerTensors& layer) {
           return [maxima = backend.similarity_row_maxima(layer.k, tokens)]() -> Answer { return {maxima}; };
         };
       },
       // One triangle.
       .operations =
           [](const RandomShape& shape) { return 1.0 * shape.tokens * shape.tokens * shape.kv_heads * shape.dim; },
       .bytes = none},
      {.name = "least_redundant",
       .ask = [](const RandomShape& shape) -> Call {
         return [resident = position_range(0, shape.tokens)](Backend& backend, const LayerTensors& layer) {
           const RedundancyElimination what{
               .resident = resident, .recent = 128, .keep = static_cast<int>(resident.size()) / 2};
           return [kept = backend.least_redundant(layer, what)]() -> Answer { return {plain(kept)}; };
         };
       },
       .operations =
           [](const RandomShape& shape) { return 2.0 * shape.tokens * shape.tokens * shape.kv_heads * shape.dim; },
       .bytes = none},
      {.name = "online_eviction",
       .ask = [](const RandomShape& shape) -> Call {
         return [tokens = shape.tokens](Backend& backend, const LayerTensors& layer) {
           const OnlineEviction what{.tokens = tokens, .budget = tokens / 2, .recent = tokens / 4};
           return [evicted = backend.online_eviction(layer, what)]() -> Answer { return {plain(evicted)}; };
         };
       },
       .operations =
           [](const RandomShape& shape) {
             double pairs = 0;
             for (int token = 0; token < shape.tokens; ++token) pairs += std::min(token + 1, shape.tokens / 2 + 1);
             return 2.0 * shape.dim * shape.query_heads * pairs;
           },
       .bytes = none},
  };
  return all;
}

struct Case {
  const Observable* observable;
  RandomShape shape;

  std::string name() const {
    return fmt::format("{}/{}-{}-{}/n:{}/{}", observable->name, shape.query_heads, shape.kv_heads, shape.dim,
                       shape.tokens, name_of(shape.dtype));
  }
};

std::vector<Case> cases() {
  const auto& all = observables();
  const Observable &cumulative = all[0], &of_window = all[1], &similarity = all[5], &redundancy = all[6],
                   &online = all[7];
  const auto wide = [](int tokens, DType dtype) { return RandomShape{32, 8, 128, tokens, dtype}; };
  const auto narrow = [](int tokens, DType dtype) { return RandomShape{9, 3, 64, tokens, dtype}; };
  // The last queries alone are stored, where others are not asked for.
  const auto last = [&](int tokens, DType dtype) {
    RandomShape shape = wide(tokens, dtype);
    shape.last_queries = window;
    return shape;
  };
  std::vector<Case> made;
  for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32}) {
    for (const int tokens : {4096, 32768}) {
      made.push_back({&cumulative, wide(tokens, dtype)});
      made.push_back({&cumulative, narrow(tokens, dtype)});
    }
    made.push_back({&cumulative, {4, 1, 128, 131072, dtype}});
    made.push_back({&cumulative, {3, 1, 64, 131072, dtype}});
    for (const int tokens : {32768, 131072}) made.push_back({&of_window, last(tokens, dtype)});
    for (const int part : {2, 3, 4}) made.push_back({&all[static_cast<std::size_t>(part)], last(32768, dtype)});
    made.push_back({&similarity, last(32768, dtype)});
    made.push_back({&redundancy, last(8192, dtype)});
    made.push_back({&online, wide(8192, dtype)});
  }
  return made;
}

/// The largest distance of a number from the expected one, relative to it or to the mean.
double difference(const Answer& found, const Answer& expected) {
  double largest = 0;
  for (std::size_t part = 0; part < expected.size(); ++part) {
    const std::vector<double>&numbers = found[part], &wanted = expected[part];
    if (numbers.size() != wanted.size()) return HUGE_VAL;
    double mean = 0;
    for (const double number : wanted) mean += std::abs(number) / static_cast<double>(wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double distance = std::abs(numbers[i] - wanted[i]);
      if (!(distance <= HUGE_VAL) || !std::isfinite(numbers[i])) return HUGE_VAL;
      if (distance > 0) largest = std::max(largest, distance / std::max(mean, std::abs(wanted[i])));
    }
  }
  return largest;
}

double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Times {
  double median = 0;
  double spread = 0;  // (slowest - fastest) / median
};

/// After one call that is not counted.
Times times_of(const std::function<void()>& call) {
  call();
  std::vector<double> seconds;
  double sum = 0;
  while (seconds.empty() || (sum < wanted_seconds && seconds.size() < most_calls)) {
    seconds.push_back(seconds_of(call));
    sum += seconds.back();
  }
  std::ranges::sort(seconds);
  const double median = seconds[seconds.size() / 2];
  return {median, (seconds.back() - seconds.front()) / median};
}

void print(const std::string& fields) {
  fmt::print("{{{}}}\n", fields);
  std::fflush(stdout);
}

/// An error of one case is its line; the others follow.
void print_case(const std::string& name, const std::function<std::string()>& fields) {
  try {
    print(fmt::format("\"case\": {:?}, {}", name, fields()));
  } catch (const Error& error) {
    if (error.refusal() == Refusal::capability) throw;
    print(fmt::format("\"case\": {:?}, \"problem\": {:?}", name, std::string_view(error.what())));
  }
}

std::string rate_fields(const DeviceRate& found, double tolerance) {
  return fmt::format("\"rate\": {:.6g}, \"error\": {:.3g}, \"tolerance\": {:.3g}, \"problem\": \"{}\"", found.rate,
                     found.error, tolerance, found.error <= tolerance ? "" : "wrong numbers");
}

std::string observable_fields(Backend& device, const Case& wanted) {
  const RandomShape& shape = wanted.shape;
  RandomShape shorter = shape;
  shorter.tokens = std::min(shape.tokens, checked_tokens);
  double error = 0;
  {
    const auto data = random_layer(shorter).load();
    const LayerTensors& layer = data->tensors;
    const Call call = wanted.observable->ask(shorter);
    error = difference(call(device, layer)(), call(*make_backend("cpu", 0), layer)());
  }
  const bool wrong = !(error <= wanted.observable->tolerance);
  const auto data = random_layer(shape).load();
  const LayerTensors& layer = data->tensors;
  const Call call = wanted.observable->ask(shape);
  device.hold(layer, true);
  const Times held = times_of([&] { call(device, layer); });
  device.let_go(layer);
  const Times copied = times_of([&] { call(device, layer); });
  return fmt::format(
      "\"observable\": {:?}, \"query_heads\": {}, \"kv_heads\": {}, \"dim\": {}, \"tokens\": {}, \"dtype\": \"{}\", "
      "\"device\": {:?}, \"error\": {}, \"tolerance\": {:.3g}, \"seconds\": {:.6g}, \"spread\": {:.3g}, "
      "\"seconds_with_copies\": {:.6g}, \"operations\": {:.6g}, \"bytes\": {:.6g}, \"problem\": \"{}\"",
      wanted.observable->name, shape.query_heads, shape.kv_heads, shape.dim, shape.tokens, name_of(shape.dtype),
      device.description(), std::isfinite(error) ? fmt::format("{:.3g}", error) : "null", wanted.observable->tolerance,
      held.median, held.spread, copied.median, wanted.observable->operations(shape), wanted.observable->bytes(shape),
      wrong ? "not what the CPU backend says" : "");
}

/// The device's own rates, by name, and how exact what they computed must be.
struct RateCase {
  std::string name;
  double tolerance = 0;
  std::function<DeviceRate()> rate;
};

std::vector<RateCase> rates() {
  std::vector<RateCase> all;
  for (const auto& [name, products] : {std::pair{"warp-groups", Products::warp_groups}, {"warps", Products::warps}}) {
    if (!has(products)) continue;
    for (const DType dtype : {DType::bfloat16, DType::float16})
      all.push_back({fmt::format("products/{}/{}", name, name_of(dtype)), 1e-6,
                     [products, dtype] { return product_rate(products, dtype); }});
  }
  all.push_back({"products/plain/float32", 1e-6, float_rate});
  all.push_back({"copies/device", 0, device_copy_rate});
  all.push_back({"copies/to_device", 0, to_device_rate});
  all.push_back({"copies/from_device", 0, from_device_rate});
  return all;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments == std::vector<std::string>{"--list"}) {
    for (const Case& one : cases()) fmt::print("{}\n", one.name());
    return 0;
  }
  const bool only_device = arguments == std::vector<std::string>{"--device"};
  const auto wanted = [&](const std::string& name) {
    return arguments.empty() || std::ranges::any_of(arguments, [&](const std::string& text) {
             return name.find(text) != std::string::npos;
           });
  };
  const std::unique_ptr<Backend> device = make_backend("cuda", 0);
  const DeviceFacts facts = device_facts();
  print(
      fmt::format("\"device\": {:?}, \"capability\": {:?}, \"processors\": {}, \"memory_bytes\": {:.6g}, "
                  "\"driver\": {:?}, \"runtime\": {:?}",
                  facts.name, facts.capability, facts.processors, facts.memory_bytes, facts.driver, facts.runtime));
  if (only_device) return 0;
  for (const RateCase& one : rates())
    if (wanted(one.name)) print_case(one.name, [&] { return rate_fields(one.rate(), one.tolerance); });
  for (const Case& one : cases())
    if (wanted(one.name())) print_case(one.name(), [&] { return observable_fields(*device, one); });
  return 0;
}

}  // namespace
}  // namespace kvreplay::bench

int main(int count, char** arguments) {
  try {
    return kvreplay::bench::run({arguments + 1, arguments + count});
  } catch (const kvreplay::Error& error) {
    fmt::print(stderr, "device_observables: {}\n", error.what());
    return error.exit_code();
  }
}
