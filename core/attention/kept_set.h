// The kept positions of one layer: one bitset a row, a row for each head of the policy's granularity.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay {

/// A policy's granularity: one set for each KV head, for each query head, or one for the layer.
enum class Heads { kv, query, layer };

constexpr int rows_of(Heads heads, int query_heads, int kv_heads) {
  return heads == Heads::kv ? kv_heads : heads == Heads::query ? query_heads : 1;
}

class KeptSet {
 public:
  KeptSet() = default;
  /// Nothing kept of `tokens` positions in `rows` rows.
  KeptSet(Heads heads, int rows, int tokens)
      : heads_(heads), rows_(rows), tokens_(tokens), bits_(static_cast<std::size_t>(rows) * words()) {}

  Heads heads() const { return heads_; }
  int rows() const { return rows_; }
  int tokens() const { return tokens_; }

  void keep(int row, int position) { word(row, position) |= bit(position); }
  void drop(int row, int position) { word(row, position) &= ~bit(position); }
  /// Positions [begin, end).
  void drop(int row, int begin, int end) {
    for (int position = begin; position < end;) {
      const int stop = std::min(end, (position / 64 + 1) * 64);
      const std::uint64_t some = ~std::uint64_t{0} >> (64 - (stop - position));
      word(row, position) &= ~(some << (position % 64));
      position = stop;
    }
  }
  bool keeps(int row, int position) const { return (bits_[index(row, position)] & bit(position)) != 0; }
  int count(int row) const {
    int n = 0;
    for (const std::uint64_t w : row_bits(row)) n += std::popcount(w);
    return n;
  }
  /// Of the positions [begin, end).
  int count_within(int row, int begin, int end) const {
    int n = 0;
    const std::span<const std::uint64_t> bits = row_bits(row);
    for (int position = begin; position < end;) {
      const int stop = std::min(end, (position / 64 + 1) * 64);
      const std::uint64_t from = bits[static_cast<std::size_t>(position / 64)] >> (position % 64);
      n += std::popcount(stop - position == 64 ? from : from & ((std::uint64_t{1} << (stop - position)) - 1));
      position = stop;
    }
    return n;
  }
  /// Ascending.
  std::vector<std::int32_t> positions(int row) const {
    std::vector<std::int32_t> kept;
    kept.reserve(static_cast<std::size_t>(count(row)));
    const std::span<const std::uint64_t> bits = row_bits(row);
    for (std::size_t w = 0; w < bits.size(); ++w)
      for (std::uint64_t rest = bits[w]; rest != 0; rest &= rest - 1)
        kept.push_back(static_cast<std::int32_t>(w * 64) + std::countr_zero(rest));
    return kept;
  }
  std::span<const std::uint64_t> row_bits(int row) const {
    return {bits_.data() + static_cast<std::size_t>(row) * words(), words()};
  }
  /// The row that query head h reads, `group` query heads to a KV head.
  int row_of(int query_head, int group) const {
    return heads_ == Heads::kv ? query_head / group : heads_ == Heads::query ? query_head : 0;
  }

  /// The same for each of `rows` rows of a granularity as fine or finer.
  KeptSet refined(Heads heads, int rows) const {
    if (heads == heads_) return *this;
    KeptSet fine(heads, rows, tokens_);
    for (int row = 0; row < rows; ++row)
      for (std::size_t w = 0; w < words(); ++w)
        fine.bits_[static_cast<std::size_t>(row) * words() + w] =
            bits_[static_cast<std::size_t>(row / (rows / rows_)) * words() + w];
    return fine;
  }

  /// One set for the layer: a row of this one, or what some row keeps.
  KeptSet only(int row) const {
    KeptSet one(Heads::layer, 1, tokens_);
    std::ranges::copy(row_bits(row), one.bits_.begin());
    return one;
  }
  KeptSet union_of_rows() const {
    KeptSet one = only(0);
    for (std::size_t i = words(); i < bits_.size(); ++i) one.bits_[i % words()] |= bits_[i];
    return one;
  }

  friend bool operator==(const KeptSet&, const KeptSet&) = default;

 private:
  std::size_t words() const { return (static_cast<std::size_t>(tokens_) + 63) / 64; }
  std::size_t index(int row, int position) const {
    return static_cast<std::size_t>(row) * words() + static_cast<std::size_t>(position) / 64;
  }
  std::uint64_t& word(int row, int position) { return bits_[index(row, position)]; }
  static std::uint64_t bit(int position) { return std::uint64_t{1} << (position % 64); }

  Heads heads_ = Heads::kv;
  int rows_ = 0;
  int tokens_ = 0;
  std::vector<std::uint64_t> bits_;
};

}  // namespace kvreplay
