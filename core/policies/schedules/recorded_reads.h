// Queries that read the tokens that the model itself selected for them, as the trace records it.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Each query of a KV head reads the units of `LayerTensors::visible` below the prompt's end. In a layer without them
/// it reads all tokens.
SchedulePtr recorded_reads();

}  // namespace kvreplay
