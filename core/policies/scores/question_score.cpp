#include "policies/scores/question_score.h"

#include <algorithm>

#include "policies/plan_part.h"
#include "positions.h"

namespace kvreplay {
namespace {

constexpr Choice<QuestionFrom> question_words[] = {{"auto", QuestionFrom::marked}, {"last", QuestionFrom::last}};
constexpr Choice<RowWeight> norm_words[] = {{"visible", RowWeight::visible}, {"none", RowWeight::none}};
constexpr Choice<Condition> condition_words[] = {
    {"question", Condition::question}, {"context", Condition::context}, {"all", Condition::all}};

/// (first + i + 1) / all for i < rows, or ones.
std::vector<double> row_weights(RowWeight norm, int rows, int first, int all) {
  std::vector<double> weights(static_cast<std::size_t>(rows), 1.0);
  if (norm == RowWeight::visible)
    for (int i = 0; i < rows; ++i) weights[static_cast<std::size_t>(i)] = static_cast<double>(first + i + 1) / all;
  return weights;
}

/// Adds the first `columns` columns.
void add_columns(Matrix& sums, const Matrix& more, int columns) {
  for (int row = 0; row < sums.rows(); ++row)
    for (int column = 0; column < columns; ++column) sums(row, column) += more(row, column);
}

struct QuestionPart : QuestionScore {
  static constexpr PartKind kind = PartKind::score;
  static constexpr const char* name = "question";
  static constexpr const char* summary = "attention of the question that ends the prompt to the tokens before it";

  void fill(Plan& plan) const { plan.score = scorer(); }
};

const RegisteredPart<QuestionPart> registered;

}  // namespace

void Question::parameters(Parameters& p) {
  p.add<QuestionFrom>("question", from, question_words,
                      "auto: the marked question that ends the prompt, or the last tokens if none is marked; last: "
                      "always the last tokens");
  p.add("question_tokens", last_tokens, IntRange{.least = 1, .up_to = UpTo::prompt},
        "number of last tokens that form the question if none is marked");
}

EndQuestion Question::ending() const { return {last_tokens, from == QuestionFrom::marked}; }

void QuestionScore::parameters(Parameters& p) {
  question.parameters(p);
  const auto read = p.of_part("score");
  p.add<RowWeight>("norm", norm, norm_words, "weight of a query: the share of keys that it sees, or 1");
  p.add<Condition>("condition", condition, condition_words,
                   "queries that score: those of the question, of the new tokens, or both");
}

Scorer QuestionScore::scorer() const {
  const auto score = [*this](const LayerView& view, const Scoring& how) {
    const int asked = question.ending().tokens(view.prompt(), view.question().begin);
    const std::vector<std::int32_t> rows = position_range(view.prompt() - asked, view.prompt());
    const int before = view.tokens();
    Matrix sums(view.query_heads(), before);
    if (condition != Condition::context)
      add_columns(sums, view.attention_of(rows, row_weights(norm, asked, before, before + asked)), before);
    if (condition != Condition::question) {
      const int added = view.residents().added;
      add_columns(sums, view.window_attention(row_weights(norm, added, before - added, before + asked)), before);
    }
    return how.grouping(sums, view.group());
  };
  return {.score = score,
          .needs = {.all_queries = condition != Condition::question, .question = condition != Condition::context},
          .name = name_with_values("question", *this)};
}

}  // namespace kvreplay
