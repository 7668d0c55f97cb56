// Ranges of layers that are replayed by policies of their own: layers:0-14=(chunkkv:chunk=20),15-29=snapkv.
#pragma once

#include <memory>
#include <string>

#include "policies/policy.h"

namespace kvreplay {

/// A policy whose parameters are ranges FIRST-LAST (or one layer, FIRST) of treated layers, numbered from 0. Each range
/// is replayed as if its layers were all there are, at the same budget. Together they must cover every layer once.
inline constexpr const char* layer_ranges_name = "layers";

/// A registered policy, or ranges of layers by their name. Throws Error{usage} with the nearest name.
std::unique_ptr<Policy> make_policy(const std::string& name);

}  // namespace kvreplay
