// A process that is forked has one thread, and OpenMP (libgomp) would wait for ever for the others, if it had begun
// them before the fork.
#pragma once

namespace kvreplay {

/// To be called before OpenMP begins threads.
void note_threads_begin();

/// Whether this process was forked from one that had begun OpenMP's threads: then it can have one thread only.
bool has_lost_threads();

}  // namespace kvreplay
