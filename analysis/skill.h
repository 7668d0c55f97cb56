// Skill: how much of the way from chance to the best set with its counts a policy comes.
#pragma once

#include <map>
#include <span>
#include <string>

#include "analysis/run.h"

namespace kvreplay {

/// Margins of recall between the best set and the random twin up to this are rounding alone.
inline constexpr double least_margin = 1e-9;

/// skill = (recall - twin) / (oracle - twin) of each cell that has a random twin among the cells, by the cell's id.
/// recall is its attention_recall, twin that of its random twin (of several, their mean), and oracle its
/// attention_recall:oracle. NaN where one of these is undefined or oracle - twin <= least_margin.
std::map<std::string, double> skills(std::span<const CellRecord> cells);

}  // namespace kvreplay
