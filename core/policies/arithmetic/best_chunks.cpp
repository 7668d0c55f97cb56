#include "policies/arithmetic/best_chunks.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>

#include "policies/arithmetic/ranking.h"
#include "policies/arithmetic/wide_sum.h"

namespace kvreplay {
namespace {

constexpr double never = -std::numeric_limits<double>::infinity();

/// Chunks of one size, best first, and the short one behind them, which may be empty.
class Chunked {
 public:
  Chunked(std::span<const double> scores, int chunk)
      : scores_(scores), chunk_(chunk), whole_(static_cast<int>(scores.size()) / chunk) {
    std::vector<double> sums;
    for (int i = 0; i < whole_; ++i) sums.push_back(sum(i * chunk, chunk));
    order_ = ranked(sums);
    for (const std::int32_t i : order_) sums_.push_back(sums[static_cast<std::size_t>(i)]);
  }

  int chunk() const { return chunk_; }
  int whole() const { return whole_; }
  int short_begin() const { return whole_ * chunk_; }
  int short_size() const { return static_cast<int>(scores_.size()) - short_begin(); }
  /// Of the chunk of a rank.
  int begin(int rank) const { return order_[static_cast<std::size_t>(rank)] * chunk_; }
  double sum_of(int rank) const { return sums_[static_cast<std::size_t>(rank)]; }

  double sum(int begin, int count) const {
    return wide_sum(scores_.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)));
  }
  double score(std::int32_t token) const { return scores_[static_cast<std::size_t>(token)]; }

 private:
  std::span<const double> scores_;
  int chunk_, whole_;
  std::vector<std::int32_t> order_;
  std::vector<double> sums_;  // by rank
};

struct Found {
  double sum = never;
  std::vector<std::int32_t> positions = {};

  void add(int begin, int count) {
    for (int j = begin; j < begin + count; ++j) positions.push_back(j);
  }
};

/// With the short chunk whole or without it, the slots that are left say how many chunks are whole, q, and how many
/// tokens the part has, r < chunk. Whatever chunk the part is of, the best q others are the whole ones: the first q by
/// rank, or the first q + 1 but that chunk. So each chunk needs to be tried once.
Found with_a_part(const Chunked& of, int slots, bool short_whole) {
  Found found;
  const int left = slots - (short_whole ? of.short_size() : 0);
  const int whole = left / of.chunk(), part = left % of.chunk();
  if (left < 0 || whole > of.whole()) return found;
  double sum = short_whole ? of.sum(of.short_begin(), of.short_size()) : 0.0;
  for (int rank = 0; rank < whole; ++rank) sum += of.sum_of(rank);

  constexpr int of_short = -1, none = -2;
  int part_of = none;
  if (part == 0) found.sum = sum;
  if (part > 0 && !short_whole && part <= of.short_size()) {
    found.sum = sum + of.sum(of.short_begin(), part);
    part_of = of_short;
  }
  if (part > 0 && whole < of.whole())
    for (int rank = 0; rank < of.whole(); ++rank) {
      const double in_its_place = rank < whole ? of.sum_of(whole) - of.sum_of(rank) : 0.0;
      if (const double here = sum + in_its_place + of.sum(of.begin(rank), part); here > found.sum) {
        found.sum = here;
        part_of = rank;
      }
    }
  if (found.sum == never) return found;
  for (int rank = 0; rank < whole + (0 <= part_of && part_of < whole ? 1 : 0); ++rank)
    if (rank != part_of) found.add(of.begin(rank), of.chunk());
  if (part_of >= 0) found.add(of.begin(part_of), part);
  if (part_of == of_short) found.add(of.short_begin(), part);
  if (short_whole) found.add(of.short_begin(), of.short_size());
  return found;
}

/// `whole` chunks and `loose` tokens of the others. Let F be the chunks that lie before the last whole one by rank and
/// are not whole. Each has a loose token, or exchanging the two would lose nothing; so F has at most `loose` chunks,
/// and every chunk before the last whole one is whole or in F. A table over (rank, chunks of F, loose tokens of them)
/// finds the best of these; what else is loose are the best tokens behind.
class WithTokens {
 public:
  WithTokens(const Chunked& of, int whole, int loose, bool short_whole)
      : of_(of),
        whole_(whole),
        loose_(loose),
        short_whole_(short_whole),
        passed_(std::min(loose, of.whole() - whole)),
        ranks_(whole + passed_) {}

  Found best() {
    const std::vector<std::vector<double>> behind = best_behind();
    std::vector<double> sums(states(), never);
    sums[state(0, 0)] = 0.0;
    taken_.assign(static_cast<std::size_t>(ranks_) * states(), 0);
    Found found;
    int end = 0, tokens = 0;
    for (int rank = 0;; ++rank) {
      if (const int passed = rank - whole_; passed >= 0)
        for (int used = 0; used <= loose_; ++used)
          if (const double here = sums[state(passed, used)] + behind[at(passed)][at(loose_ - used)]; here > found.sum) {
            found.sum = here;
            end = rank;
            tokens = used;
          }
      if (rank == ranks_) break;
      sums = after(rank, sums);
    }
    if (found.sum == never) return found;
    const std::vector<std::int32_t> rest = tokens_from(end);
    for (const std::int32_t i : best_of(rest, loose_ - tokens)) found.positions.push_back(rest[at(i)]);
    for (int rank = end, passed = end - whole_; rank-- > 0;) {
      const int v = taken_[at(rank) * states() + state(passed, tokens)];
      if (v == 0) {
        found.add(of_.begin(rank), of_.chunk());
        continue;
      }
      const std::vector<std::int32_t> own = tokens_of(rank);
      for (const std::int32_t i : best_of(own, v)) found.positions.push_back(own[at(i)]);
      --passed;
      tokens -= v;
    }
    if (short_whole_) {
      found.sum += of_.sum(of_.short_begin(), of_.short_size());
      found.add(of_.short_begin(), of_.short_size());
    }
    return found;
  }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  std::size_t states() const { return at(passed_ + 1) * at(loose_ + 1); }
  std::size_t state(int passed, int used) const { return at(passed) * at(loose_ + 1) + at(used); }

  std::vector<std::int32_t> tokens_of(int rank) const {
    std::vector<std::int32_t> tokens(at(of_.chunk()));
    std::iota(tokens.begin(), tokens.end(), of_.begin(rank));
    return tokens;
  }

  /// Those of the chunks from this rank on, and of the short one unless it is whole.
  std::vector<std::int32_t> tokens_from(int rank) const {
    std::vector<std::int32_t> tokens;
    for (; rank < of_.whole(); ++rank) std::ranges::copy(tokens_of(rank), std::back_inserter(tokens));
    if (!short_whole_)
      for (int j = 0; j < of_.short_size(); ++j) tokens.push_back(of_.short_begin() + j);
    return tokens;
  }

  std::vector<std::int32_t> best_of(const std::vector<std::int32_t>& tokens, int count) const {
    std::vector<double> scores;
    for (const std::int32_t token : tokens) scores.push_back(of_.score(token));
    return largest(scores, count);
  }

  /// Sums of the best 0, 1 ... `loose` of some scores; `never` where there are fewer.
  std::vector<double> sums_of_best(std::vector<double>& scores) const {
    std::ranges::sort(scores, std::greater{});
    scores.resize(std::min(scores.size(), at(loose_)));
    std::vector<double> sums(at(loose_ + 1), never);
    sums[0] = 0.0;
    for (std::size_t i = 0; i < scores.size(); ++i) sums[i + 1] = sums[i] + scores[i];
    return sums;
  }

  /// Of the tokens behind the last whole chunk, by the chunks passed.
  std::vector<std::vector<double>> best_behind() const {
    std::vector<std::vector<double>> sums(at(passed_ + 1));
    std::vector<double> scores;
    for (const std::int32_t token : tokens_from(ranks_)) scores.push_back(of_.score(token));
    for (int passed = passed_; passed >= 0; --passed) {
      sums[at(passed)] = sums_of_best(scores);
      if (passed > 0)
        for (const std::int32_t token : tokens_of(whole_ + passed - 1)) scores.push_back(of_.score(token));
    }
    return sums;
  }

  std::vector<double> after(int rank, const std::vector<double>& before) {
    std::vector<double> of_chunk;
    for (const std::int32_t token : tokens_of(rank)) of_chunk.push_back(of_.score(token));
    const std::vector<double> best = sums_of_best(of_chunk);
    const int most = std::min(of_.chunk(), loose_);
    std::vector<double> sums(states(), never);
    for (int passed = std::max(0, rank + 1 - whole_); passed <= std::min(passed_, rank + 1); ++passed)
      for (int used = 0; used <= loose_; ++used) {
        double& sum = sums[state(passed, used)];
        int& taken = taken_[at(rank) * states() + state(passed, used)];
        sum = before[state(passed, used)] + of_.sum_of(rank);
        if (passed == 0) continue;
        for (int v = 1; v <= std::min(most, used); ++v)
          if (const double here = before[state(passed - 1, used - v)] + best[at(v)]; here > sum) {
            sum = here;
            taken = v;
          }
      }
    return sums;
  }

  const Chunked& of_;
  int whole_, loose_;
  bool short_whole_;
  int passed_;              // most chunks of F
  int ranks_;               // that may lie before the last whole chunk, it included
  std::vector<int> taken_;  // [ranks, states] loose tokens of the chunk; 0: it is whole
};

std::vector<std::int32_t> better(Found one, Found other) {
  std::vector<std::int32_t>& positions = other.sum > one.sum ? other.positions : one.positions;
  std::ranges::sort(positions);
  return std::move(positions);
}

}  // namespace

std::vector<std::int32_t> best_chunks_and_a_part(std::span<const double> scores, int slots, int chunk) {
  const Chunked of(scores, chunk);
  Found without = with_a_part(of, slots, false);
  return of.short_size() == 0 ? better(std::move(without), {})
                              : better(std::move(without), with_a_part(of, slots, true));
}

std::vector<std::int32_t> best_chunks_and_tokens(std::span<const double> scores, int slots, int chunk) {
  const Chunked of(scores, chunk);
  const int whole = slots / chunk, loose = slots % chunk;
  Found without = WithTokens(of, whole, loose, false).best();
  if (of.short_size() == 0 || whole == 0) return better(std::move(without), {});
  return better(std::move(without), WithTokens(of, whole - 1, loose + chunk - of.short_size(), true).best());
}

}  // namespace kvreplay
