#include "progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "arguments.h"
#include "output.h"

namespace kvreplay {

ProgressLine::ProgressLine(const Arguments& arguments)
    : terminal_(isatty(STDERR_FILENO) != 0),
      shown_(!arguments.is_quiet() && (arguments.text(progress_option.name) == "always" ||
                                       (arguments.text(progress_option.name) == "auto" && terminal_))) {}

ProgressLine::~ProgressLine() {
  if (drawn_ && terminal_) say("\r\x1b[K");
}

void ProgressLine::show(double share, std::string_view what) {
  const Clock::time_point now = Clock::now();
  if (!shown_ || (now < next_ && share < 1.0)) return;
  next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::milliseconds(5000));
  const double seconds = std::chrono::duration<double>(now - start_).count();
  std::string line = fmt::format("{:3.0f} %  {}", 100.0 * share, what);
  if (share > 0.0 && share < 1.0) line += fmt::format("  {} left", duration_text(seconds * (1.0 - share) / share));
  say("{}{}{}", terminal_ ? "\r" : "", line, terminal_ ? "\x1b[K" : "\n");
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace kvreplay
