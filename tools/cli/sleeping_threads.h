// OpenMP's threads spin while they wait for one another, which on a shared machine costs several times the time and the
// CPU time. A program that has this object lets them sleep, unless the user's environment says how they should wait.
#pragma once

namespace kvreplay {

/// For the start of main: programs that this one becomes or begins find the environment as the user set it.
void restore_environment();

}  // namespace kvreplay
