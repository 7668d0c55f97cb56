// Compiled into every plug-in: kvreplay reads it from the file before it opens the library.
#include "policies/plugin_stamp.h"

extern "C" {
[[gnu::visibility("default")]] extern const char kvreplay_plugin_stamp[];
[[gnu::used]] const char kvreplay_plugin_stamp[] = KVREPLAY_STAMP_BEGIN KVREPLAY_VERSION " (" KVREPLAY_ABI ")";
}
