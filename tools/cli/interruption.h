// SIGINT and SIGTERM ask for an orderly end: finished work is kept. A second one ends the program at once.
#pragma once

namespace kvreplay {

/// From here on the first signal only sets the flag.
void heed_interruptions();

/// Whether a signal came.
bool interrupted();

}  // namespace kvreplay
