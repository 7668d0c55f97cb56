#include "policies/selectors/chunks.h"

#include <algorithm>

#include "policies/arithmetic/best_chunks.h"
#include "policies/arithmetic/ranking.h"
#include "policies/arithmetic/wide_sum.h"
#include "policies/plan_part.h"
#include "positions.h"

namespace kvreplay {
namespace {

constexpr Choice<Fill> fill_words[] = {{"cut", Fill::cut}, {"none", Fill::none}, {"tokens", Fill::tokens}};
constexpr Choice<ChunkScore> score_words[] = {{"sum", ChunkScore::sum}, {"mean", ChunkScore::mean}};
constexpr Choice<WindowMode> window_words[] = {
    {"reserve", WindowMode::reserve}, {"replace", WindowMode::replace}, {"whole", WindowMode::whole}};

std::vector<double> chunk_scores(std::span<const double> scores, int chunk, ChunkScore how) {
  std::vector<double> of_chunks;
  for (std::size_t begin = 0; begin < scores.size(); begin += static_cast<std::size_t>(chunk)) {
    const std::size_t size = std::min(static_cast<std::size_t>(chunk), scores.size() - begin);
    const std::span<const double> members = scores.subspan(begin, size);
    const double sum = wide_sum(members);
    of_chunks.push_back(how == ChunkScore::mean ? sum / static_cast<double>(size) : sum);
  }
  return of_chunks;
}

/// Positions of the best `whole` chunks, and of the first tokens of the next ones up to `slots`, ascending.
std::vector<std::int32_t> take(std::span<const std::int32_t> order, std::size_t whole, int slots, int chunk,
                               int tokens) {
  std::vector<std::int32_t> taken;
  std::vector<int> of_chunk(order.size());
  for (std::size_t i = 0; i < std::min(whole, order.size()) && slots > 0; ++i) {
    const int begin = order[i] * chunk;
    slots -= of_chunk[static_cast<std::size_t>(order[i])] = std::min({chunk, tokens - begin, slots});
  }
  for (std::size_t c = 0; c < of_chunk.size(); ++c) {
    const int begin = static_cast<int>(c) * chunk;
    for (int j = begin; j < begin + of_chunk[c]; ++j) taken.push_back(j);
  }
  return taken;
}

/// Fills `taken` up to `slots` with the best single tokens that are not in it.
void fill_with_tokens(std::vector<std::int32_t>& taken, std::span<const double> scores, int slots) {
  std::vector<std::int32_t> rest;
  std::vector<double> rest_scores;
  auto next = taken.cbegin();
  for (std::int32_t j = 0; j < static_cast<std::int32_t>(scores.size()); ++j) {
    if (next != taken.cend() && *next == j) {
      ++next;
      continue;
    }
    rest.push_back(j);
    rest_scores.push_back(scores[static_cast<std::size_t>(j)]);
  }
  const int missing = slots - static_cast<int>(taken.size());
  for (const std::int32_t i : largest(rest_scores, missing)) taken.push_back(rest[static_cast<std::size_t>(i)]);
  std::ranges::sort(taken);
}

struct ChunksPart : Chunks {
  static constexpr PartKind kind = PartKind::select;
  static constexpr const char* name = "chunks";
  static constexpr const char* summary = "chunks of consecutive tokens, highest scores first";

  void fill(Plan& plan) const {
    plan.select = selector();
    // Recent tokens may take the whole budget beside the sinks. Sinks are rounded up to whole chunks first.
    if (window_mode == WindowMode::whole) plan.protect.sinks = (plan.protect.sinks + chunk - 1) / chunk * chunk;
  }
};

const RegisteredPart<ChunksPart> registered;

}  // namespace

void Chunks::parameters(Parameters& p) {
  const auto read = p.of_part("select");
  p.add("chunk", chunk, IntRange{.least = 1}, "tokens per chunk; the last chunk may be shorter");
  p.add<Fill>("fill", fill, fill_words,
              "slots left over by whole chunks: filled by part of the next chunk, left empty, or filled by single "
              "tokens (not with window_mode=replace)");
  p.add<ChunkScore>("chunk_score", score, score_words, "score of a chunk: sum or mean of its tokens' scores");
  p.add<WindowMode>("window_mode", window_mode, window_words,
                    "recent window: has its own slots, replaces the last selected positions, or keeps its whole chunk");
}

Selector Chunks::selector() const {
  const auto select = [part = *this](const Row& row) {
    int slots = row.budget - row.sinks - row.recent;
    int first_recent = row.tokens - row.recent, end = first_recent;
    if (part.window_mode == WindowMode::whole && row.recent > 0) {
      end = std::max(row.sinks, first_recent / part.chunk * part.chunk);
      const int of_its_chunk = std::min(slots, first_recent - end);
      first_recent -= of_its_chunk;
      slots -= of_its_chunk;
    }
    Kept kept{position_range(0, row.sinks), row.sinks, row.recent};
    const std::vector<std::int32_t> recent = position_range(first_recent, row.tokens);
    if (slots == 0) {
      kept.positions.insert(kept.positions.end(), recent.begin(), recent.end());
      return kept;
    }
    const bool reserve = part.window_mode != WindowMode::replace;
    if (!reserve) end = row.tokens;
    const int to_divide = reserve ? slots : slots + row.recent;

    const std::span<const double> scores =
        row.scores.subspan(static_cast<std::size_t>(row.sinks), static_cast<std::size_t>(end - row.sinks));
    const std::vector<std::int32_t> order = ranked(chunk_scores(scores, part.chunk, part.score));
    const bool only_whole = part.fill != Fill::cut || !reserve;
    const std::size_t whole = only_whole ? static_cast<std::size_t>(to_divide / part.chunk) : order.size();

    std::vector<std::int32_t> taken = take(order, whole, to_divide, part.chunk, end - row.sinks);
    if (part.fill == Fill::tokens && reserve) fill_with_tokens(taken, scores, to_divide);
    taken.resize(std::min(taken.size(), static_cast<std::size_t>(slots)));
    for (std::int32_t& token : taken) token += row.sinks;

    std::ranges::set_union(taken, recent, std::back_inserter(kept.positions));
    return kept;
  };
  // Chunks of all tokens, cut by the window, are the chunks before it: the window mode does not change these sets.
  const auto best = [part = *this](const Row& row) {
    const int slots = row.budget - row.sinks - row.recent, end = row.tokens - row.recent;
    const std::span<const double> scores =
        row.scores.subspan(static_cast<std::size_t>(row.sinks), static_cast<std::size_t>(end - row.sinks));
    const bool tokens = part.fill == Fill::tokens && part.window_mode == WindowMode::reserve;
    Kept kept{position_range(0, row.sinks), row.sinks, row.recent};
    for (const std::int32_t token :
         tokens ? best_chunks_and_tokens(scores, slots, part.chunk) : best_chunks_and_a_part(scores, slots, part.chunk))
      kept.positions.push_back(row.sinks + token);
    std::ranges::copy(position_range(end, row.tokens), std::back_inserter(kept.positions));
    return kept;
  };
  return {.select = select, .fills = window_mode != WindowMode::replace && fill != Fill::none, .best = best};
}

}  // namespace kvreplay
