// Passes of the model behind the prompt that repeat it: what KVzip calls context reconstruction.
#pragma once

namespace kvreplay {

/// One pass. Its last tokens are the repeated ones; the others ask for the repetition. Tokens of a pass have the
/// positions behind the prompt, and see the prompt and the earlier tokens of the same pass.
struct ReconstructionPass {
  int begin = 0;  // its tokens are [begin, end) among those of all passes
  int end = 0;
  int first = 0;  // it repeats the prompt tokens [first, last)
  int last = 0;

  int tokens() const { return end - begin; }
};

}  // namespace kvreplay
