// The prompt in blocks.
#pragma once

#include "policies/schedule.h"
#include "policies/schedules/held_tokens.h"

namespace kvreplay {

/// State at the end of a block of the context.
struct BlockEnd {
  int budget = 0;   // B less the spared tokens
  int allowed = 0;  // the same where B is a share of the tokens seen so far; else `budget`
  int context = 0;  // n: tokens that come in blocks
  int seen = 0;     // of them so far
  int held = 0;     // before this block
  int block = 0;    // tokens of this block
};

/// A block attends to the resident tokens and to itself; then tokens are evicted. The spared tokens follow after all
/// blocks and are kept, like tokens after the prompt.
class BlockSchedule : public CuttingSchedule {
 public:
  enum class Slots { by_position, by_relevance };  // the latter in the order of the scores

  explicit BlockSchedule(int block, Slots slots = Slots::by_position) : block_(block), slots_(slots) {}

  Requirements required() const override;
  /// Throws Error{input} for a budget without room beside the spared tokens, and for queries of the prompt where slots
  /// are in the order of scores.
  void check(const ScheduledPrompt& prompt) const override;

  int block() const { return block_; }

 protected:
  /// Number of context tokens that are resident from here on, and the budget of which protected tokens are a share.
  struct Cut {
    int keep = 0;
    int budget = 0;
  };
  virtual Cut cut_at(const BlockEnd& end) const = 0;
  LayerSelection cut(const ScheduledLayer& layer) const final;

 private:
  int block_;
  Slots slots_;
};

}  // namespace kvreplay
