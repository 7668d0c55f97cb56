// Live numbers in results folders (`kvreplay live` writes them): live/NAME.csv has those of one trace, live.csv all.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "analysis/metrics/metric.h"

namespace kvreplay {

/// The numbers of a trace over all layers and heads, by cell; empty: it has none. The variant of sets that were decided
/// live ends with during-prefill; that of a number that was measured in several ways, as on two devices, with the way.
/// Undefined numbers are left out. Throws Error{input} for a file that cannot be read.
std::map<std::string, std::map<MetricName, double>> live_numbers(const std::filesystem::path& folder,
                                                                 const std::string& trace);

/// The rows of several folders. A file has a header, then lines in ascending order.
class LiveRows {
 public:
  /// Those of a folder, which may have none. Throws Error{input} for a file that cannot be read, for another header,
  /// and for a row whose number is another one than in an earlier folder.
  void add(const std::filesystem::path& folder);

  /// Into a folder, each file whole or not at all; nothing where there are no rows.
  void write(const std::filesystem::path& folder) const;

 private:
  struct Row {
    std::string line;
    std::filesystem::path file;
  };
  std::string header_;
  std::map<std::string, std::map<std::string, Row>> rows_;  // by trace; by the line without its number
};

}  // namespace kvreplay
