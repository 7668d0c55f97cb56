// Defaults of the user: kvreplay.yaml, with options by their long names.
#pragma once

#include <map>
#include <string>

#include "arguments.h"

namespace kvreplay {

/// The values of kvreplay.yaml, by option. The file is that of the working directory or of the nearest folder above it,
/// else $XDG_CONFIG_HOME/kvreplay/kvreplay.yaml ($HOME/.config where the variable is not set). Empty: there is no file.
/// Throws Error{usage}, at a line of the file, for a key that is not an option with has_user_default.
std::map<std::string, GivenValue> read_user_defaults();

}  // namespace kvreplay
