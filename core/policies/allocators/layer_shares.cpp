#include "policies/allocators/layer_shares.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "policies/arithmetic/apportion.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

std::vector<double> numbers_of(std::string_view text) {
  const std::string where = "shares";
  std::vector<double> numbers;
  for (const std::string_view piece : split_list(where, text)) {
    const double number = numbers.emplace_back(parse_real(where, piece));
    if (number < 0) throw Error{Refusal::usage, where, "out of range", "numbers of 0 or more", std::string(piece)};
  }
  if (std::ranges::max(numbers) == 0)
    throw Error{Refusal::usage, where, "all shares are 0", "a number above 0", std::string(text)};
  return numbers;
}

struct ListPart {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "list";
  static constexpr const char* summary = "per-layer budgets in proportions from a list";

  std::string shares = "1";

  void parameters(Parameters& p) {
    const auto read = p.of_part("allocate");
    const auto normal = [](std::string_view text) { return fmt::format("{}", fmt::join(numbers_of(text), ",")); };
    p.add("shares", shares, "(NUMBER,...)", normal, "relative budgets, one per treated layer, as in (4,2,1,1)");
  }
  void fill(Plan& plan) const { plan.allocate = by_layer(by_shares(numbers_of(shares))); }
};

const RegisteredPart<ListPart> registered;

}  // namespace

ByLayer by_shares(std::vector<double> shares) {
  return [shares = std::move(shares)](const Division& division) {
    const auto layers = static_cast<std::size_t>(division.layers);
    if (shares.size() != layers)
      throw Error{Refusal::usage, "shares", "wrong number of shares",
                  fmt::format("{}, one for each treated layer", layers), std::to_string(shares.size())};
    return apportion(std::int64_t{division.layers} * division.budget, shares, division.by_rule(), division.prompt);
  };
}

}  // namespace kvreplay
