#include "error.h"

#include <utility>

namespace kvreplay {

Error::Error(Refusal refusal, std::string where, std::string what, std::string expected, std::string found)
    : refusal_(refusal),
      where_(std::move(where)),
      problem_(std::move(what)),
      expected_(std::move(expected)),
      found_(std::move(found)) {
  line_ = where_ + ": " + problem_;
  if (!expected_.empty()) line_ += ": expected " + expected_;
  if (!found_.empty()) line_ += (expected_.empty() ? ": found " : ", found ") + found_;
}

}  // namespace kvreplay
