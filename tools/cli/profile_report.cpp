#include "profile_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "output.h"
#include "random.h"

namespace kvreplay {
namespace {

const char* title(Work work) {
  switch (work) {
    case Work::layer:
      return "other work on layers";
    case Work::read:
      return "reading and checking";
    case Work::observable:
      return "observables";
    case Work::score:
      return "policies: scores and schedules";
    case Work::select:
      return "policies: selection";
    case Work::store:
      return "policies: changed stores";
    case Work::comparison:
      return "comparisons of changed or weighted tokens";
    case Work::moments:
      return "attention and outputs of kept sets";
    case Work::metric:
      return "metrics";
    case Work::results:
      return "writing results";
  }
  return "";
}

std::string frame_name(const ProfiledPiece& piece) {
  return piece.name.empty() ? title(piece.work) : fmt::format("{}: {}", title(piece.work), piece.name);
}

/// Pieces of each thread, those that contain others before them.
std::vector<std::vector<ProfiledPiece>> by_thread(const Profile& profile) {
  std::vector<std::vector<ProfiledPiece>> threads;
  for (ProfiledPiece& piece : profile.pieces()) {
    const auto thread = static_cast<std::size_t>(piece.thread);
    if (thread >= threads.size()) threads.resize(thread + 1);
    threads[thread].push_back(std::move(piece));
  }
  for (std::vector<ProfiledPiece>& pieces : threads)
    std::ranges::sort(pieces, {}, [](const ProfiledPiece& piece) { return std::pair(piece.begin, -piece.end); });
  return threads;
}

struct Sum {
  double seconds = 0;
  double multiply_adds = 0;
  int calls = 0;

  void add(const Sum& more) {
    seconds += more.seconds;
    multiply_adds += more.multiply_adds;
    calls += more.calls;
  }
};

struct Sums {
  std::map<Work, std::map<std::string, Sum>> of_work;  // by name, work inside other work apart
  std::map<int, double> of_layers;                     // whole
};

Sums sums_of(const std::vector<std::vector<ProfiledPiece>>& threads) {
  Sums sums;
  for (const std::vector<ProfiledPiece>& pieces : threads) {
    std::vector<const ProfiledPiece*> open;
    for (const ProfiledPiece& piece : pieces) {
      while (!open.empty() && open.back()->end <= piece.begin) open.pop_back();
      const double seconds = piece.end - piece.begin;
      if (!open.empty()) sums.of_work[open.back()->work][open.back()->name].seconds -= seconds;
      sums.of_work[piece.work][piece.name].add({seconds, piece.multiply_adds, 1});
      if (piece.work == Work::layer) sums.of_layers[std::stoi(piece.name)] += seconds;
      open.push_back(&piece);
    }
  }
  return sums;
}

TableRow row(const std::string& name, const Sum& sum, double wall, double peak) {
  const double rate = sum.seconds > 0 ? sum.multiply_adds / sum.seconds : 0;
  return {name, fmt::format("{:.3f}", sum.seconds), fmt::format("{:.1f} %", 100 * sum.seconds / wall),
          std::to_string(sum.calls), rate > 0 ? fmt::format("{:.0f} %", 100 * rate / peak) : ""};
}

}  // namespace

double peak_rate(Backend& backend) {
  constexpr int tokens = 4096, heads = 8, dim = 128;
  std::vector<float> values(static_cast<std::size_t>(tokens) * heads * dim);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(uniform(chain(1, i))) - 0.5F;
  const TensorView tensor{reinterpret_cast<const std::byte*>(values.data()), DType::float32, heads, tokens, dim};
  double shortest = 0;
  for (int repetition = 0; repetition < 3; ++repetition) {  // the first one warms up
    const auto begin = std::chrono::steady_clock::now();
    backend.similarity_row_maxima(tensor, tokens);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (repetition > 0 && (shortest == 0 || seconds < shortest)) shortest = seconds;
  }
  return 0.5 * tokens * tokens * heads * dim / shortest;
}

void print_profile(const Profile& profile, double peak) {
  const std::vector<std::vector<ProfiledPiece>> threads = by_thread(profile);
  const Sums sums = sums_of(threads);
  double wall = 0;
  for (const std::vector<ProfiledPiece>& pieces : threads)
    for (const ProfiledPiece& piece : pieces) wall = std::max(wall, piece.end);
  std::vector<TableRow> rows{{"work", "seconds", "share", "calls", "of peak"}};
  for (const auto& [work, names] : sums.of_work) {
    Sum all;
    for (const auto& [name, sum] : names) all.add(sum);
    rows.push_back(row(title(work), all, wall, peak));
    if (work == Work::layer || names.size() == 1) continue;
    std::vector<std::pair<std::string, Sum>> sorted(names.begin(), names.end());
    std::ranges::sort(sorted, {},
                      [](const auto& of_name) { return std::pair(-of_name.second.seconds, of_name.first); });
    for (const auto& [name, sum] : sorted)
      if (sum.seconds >= 0.002 * wall) rows.push_back(row("  " + name, sum, wall, peak));
  }
  fmt::print(
      "\nprofile: {:.2f} s; peak {:.1f} GFLOP/s (float32 matrix product in this run); names below 0.2 % are "
      "omitted\n",
      wall, 2e-9 * peak);
  print_columns(rows);
  if (sums.of_layers.empty()) return;
  const auto [fastest, slowest] =
      std::ranges::minmax_element(sums.of_layers, {}, [](const auto& of_layer) { return of_layer.second; });
  fmt::print("layers: {}, {:.3f} s (layer {}) to {:.3f} s (layer {})\n", sums.of_layers.size(), fastest->second,
             fastest->first, slowest->second, slowest->first);
}

std::string speedscope_json(const Profile& profile) {
  std::map<std::string, int> frames;
  Json names = Json::array(), threads = Json::array();
  const auto frame = [&](const ProfiledPiece& piece) {
    const auto [found, is_new] = frames.try_emplace(frame_name(piece), static_cast<int>(frames.size()));
    if (is_new) names.push_back({{"name", found->first}});
    return found->second;
  };
  const std::vector<std::vector<ProfiledPiece>> all = by_thread(profile);
  for (std::size_t thread = 0; thread < all.size(); ++thread) {
    Json events = Json::array();
    std::vector<const ProfiledPiece*> open;
    double end = 0;
    const auto close = [&] {
      end = open.back()->end;
      events.push_back({{"type", "C"}, {"frame", frame(*open.back())}, {"at", end}});
      open.pop_back();
    };
    for (const ProfiledPiece& piece : all[thread]) {
      while (!open.empty() && open.back()->end <= piece.begin) close();
      events.push_back({{"type", "O"}, {"frame", frame(piece)}, {"at", piece.begin}});
      open.push_back(&piece);
    }
    while (!open.empty()) close();
    threads.push_back({{"type", "evented"},
                       {"name", fmt::format("thread {}", thread)},
                       {"unit", "seconds"},
                       {"startValue", 0},
                       {"endValue", end},
                       {"events", events}});
  }
  return Json{{"$schema", "https://www.speedscope.app/file-format-schema.json"},
              {"name", "kvreplay replay"},
              {"shared", {{"frames", names}}},
              {"profiles", threads}}
      .dump();
}

}  // namespace kvreplay
