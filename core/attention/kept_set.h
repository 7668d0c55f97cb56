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

/// How many bits both have. The bits of a byte are summed within it, for several words side by side: a machine without
/// an instruction that counts them pays a call for each word otherwise.
inline int count_common(std::span<const std::uint64_t> ours, std::span<const std::uint64_t> theirs) {
  constexpr std::size_t most = 31;  // words whose bytes sum up to less than 256
  constexpr std::uint64_t pairs = 0x5555555555555555, nibbles = 0x3333333333333333, bytes = 0x0F0F0F0F0F0F0F0F,
                          halves = 0x00FF00FF00FF00FF, ones = 0x0001000100010001;
  std::uint64_t count = 0;
  for (std::size_t begin = 0; begin < ours.size(); begin += most) {
    const std::size_t end = std::min(ours.size(), begin + most);
    std::uint64_t by_byte = 0;
    for (std::size_t w = begin; w < end; ++w) {
      std::uint64_t bits = ours[w] & theirs[w];
      bits -= (bits >> 1) & pairs;
      bits = (bits & nibbles) + ((bits >> 2) & nibbles);
      by_byte += (bits + (bits >> 4)) & bytes;
    }
    count += (((by_byte & halves) + ((by_byte >> 8) & halves)) * ones) >> 48;
  }
  return static_cast<int>(count);
}

/// use(number) of each bit that is set, 64 a word, ascending.
void for_bits(std::span<const std::uint64_t> words, const auto& use) {
  for (std::size_t word = 0; word < words.size(); ++word)
    for (std::uint64_t rest = words[word]; rest != 0; rest &= rest - 1)
      use(static_cast<int>(64 * word) + std::countr_zero(rest));
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
  /// The positions [begin, end).
  void keep(int row, int begin, int end) {
    over_words(begin, end, [&](int position, std::uint64_t bits) { word(row, position) |= bits; });
  }
  void drop(int row, int begin, int end) {
    over_words(begin, end, [&](int position, std::uint64_t bits) { word(row, position) &= ~bits; });
  }
  /// All that the words of a row say, 64 positions each; bits beyond the last position must be 0.
  void keep(int row, std::span<const std::uint64_t> words_of_row) {
    std::ranges::copy(words_of_row,
                      bits_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(row) * words()));
  }
  bool keeps(int row, int position) const { return (bits_[index(row, position)] & bit(position)) != 0; }
  int count(int row) const { return count_common(row_bits(row), row_bits(row)); }
  /// Of the positions [begin, end).
  int count_within(int row, int begin, int end) const {
    if (begin == 0 && end == tokens_) return count(row);  // several words at once
    int n = 0;
    over_words(begin, end, [&](int position, std::uint64_t bits) {
      n += std::popcount(row_bits(row)[static_cast<std::size_t>(position / 64)] & bits);
    });
    return n;
  }
  /// Ascending.
  std::vector<std::int32_t> positions(int row) const {
    std::vector<std::int32_t> kept;
    kept.reserve(static_cast<std::size_t>(count(row)));
    for_bits(row_bits(row), [&](int position) { kept.push_back(position); });
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
  /// Calls `of_word` with a position in each word that holds some of [begin, end), and the bits of these.
  template <class OfWord>
  static void over_words(int begin, int end, OfWord of_word) {
    for (int position = begin; position < end;) {
      const int stop = std::min(end, (position / 64 + 1) * 64);
      of_word(position, ~std::uint64_t{0} >> (64 - (stop - position)) << (position % 64));
      position = stop;
    }
  }

  Heads heads_ = Heads::kv;
  int rows_ = 0;
  int tokens_ = 0;
  std::vector<std::uint64_t> bits_;
};

}  // namespace kvreplay
