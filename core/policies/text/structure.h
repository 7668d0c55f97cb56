// Pages, as inference engines hold their caches, around any policy.
#pragma once

#include <string>
#include <string_view>

#include "parameters.h"

namespace kvreplay {

/// Tokens stay and go by pages of neighbours, counted from position 0, and all heads of a layer keep the same pages: as
/// block tables know a cache (Kwon et al. 2023, PagedAttention, arXiv:2309.06180, section 4). It is made of parts that
/// a user can put into a policy, too.
struct Structure {
  enum class Pages { layer, kv, query, own };

  int page = 16;
  Pages heads = Pages::layer;  // who has pages of its own; own: as the policy has sets

  void parameters(Parameters& p);

  /// "page=16,heads=layer", or one of the two. Throws Error{usage}.
  static Structure parse(std::string_view text);

  /// The policy with these parts: "h2o" becomes "h2o:select=chunks,chunk=16,window_mode=whole,heads=layer". Throws
  /// Error{usage} where they do not fit.
  std::string around(const std::string& policy) const;
};

}  // namespace kvreplay
