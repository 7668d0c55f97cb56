#include "python_policy.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "arrays.h"
#include "errors.h"
#include "float_types.h"
#include "interpreter_lock.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/schedules/blocks.h"
#include "policies/text/layer_ranges.h"
#include "policies/text/policy_source.h"
#include "view.h"

namespace kvreplay::python {
namespace {

namespace nb = nanobind;

/// A Python object that C++ may copy and drop without the interpreter's lock.
class Shared {
 public:
  explicit Shared(nb::object object)
      : object_(new nb::object(std::move(object)), [](nb::object* held) {
          const Locked locked;
          delete held;
        }) {}
  /// The caller holds the lock.
  const nb::object& operator*() const { return *object_; }

 private:
  std::shared_ptr<nb::object> object_;
};

/// Calls Python from a thread of the engine; what is raised there becomes an Error.
template <class Work>
auto in_python(Work work) {
  const Locked locked;
  try {
    return work();
  } catch (nb::python_error& raised) {
    throw as_error(raised);
  }
}

/// An attribute as a value of C++.
template <class T>
T get(nb::handle of, const char* name) {
  const nb::object value = of.attr(name);
  return nb::cast<T>(value);
}

/// One declared parameter: `standard` says its type.
struct Declared {
  std::string name = {};
  std::variant<bool, int, double, std::string> standard = {};
  std::optional<double> least = {}, most = {};
  std::vector<std::string> choices = {};
  std::string help = {};
};

/// What kvreplay.python_policies.Definition says. Never freed: the registry outlives the interpreter.
struct Definition {
  std::string name, summary, paper, formula;
  Source source = {};
  Card card = {};
  std::vector<Declared> parameters = {};
  Grouping grouping = {};
  nb::object bind = {};
};

Declared declared(nb::handle parameter) {
  Declared found{.name = get<std::string>(parameter, "name")};
  found.help = get<std::string>(parameter, "help");
  const nb::object standard = parameter.attr("default");
  if (nb::isinstance<nb::bool_>(standard))
    found.standard = nb::cast<bool>(standard);
  else if (nb::isinstance<nb::int_>(standard))
    found.standard = nb::cast<int>(standard);
  else if (nb::isinstance<nb::float_>(standard))
    found.standard = nb::cast<double>(standard);
  else
    found.standard = nb::cast<std::string>(standard);
  found.least = get<std::optional<double>>(parameter, "least");
  found.most = get<std::optional<double>>(parameter, "most");
  found.choices = get<std::vector<std::string>>(parameter, "choices");
  return found;
}

/// The word's value among the choices of Grouping's parameters.
Grouping grouping(const std::string& policy, const std::string& heads, const std::string& aggregate) {
  Grouping found;
  Parameters parameters{policy};
  found.parameters(parameters);
  parameters.set("heads", heads);
  parameters.set("agg", aggregate);
  return found;
}

Definition* definition(nb::handle of) {
  const auto text = [&of](const char* name) { return get<std::string>(of, name); };
  auto* made = new Definition{text("name"), text("summary"), text("paper"), text("formula")};
  made->source = {text("file"), text("source_hash")};
  made->card = {made->name.c_str(), made->summary.c_str(), made->paper.c_str(), made->formula.c_str()};
  for (const nb::handle parameter : of.attr("parameters")) made->parameters.push_back(declared(parameter));
  made->grouping = grouping(made->name, text("heads"), text("agg"));
  made->bind = of.attr("bind");
  return made;
}

using Numbers = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<const std::int64_t, nb::c_contig, nb::device::cpu>;

Matrix as_matrix(const Numbers& numbers) {
  Matrix matrix(static_cast<int>(numbers.shape(0)), static_cast<int>(numbers.shape(1)));
  std::copy_n(numbers.data(), matrix.values().size(), matrix.values().begin());
  return matrix;
}

/// A view that Python may keep, but not use, when the call is over.
class ViewLoan {
 public:
  explicit ViewLoan(const LayerView& view) : view_(nb::cast(new View(view), nb::rv_policy::take_ownership)) {}
  ViewLoan(const ViewLoan&) = delete;
  ViewLoan& operator=(const ViewLoan&) = delete;
  ~ViewLoan() { nb::cast<View&>(view_).let_go(); }
  const nb::object& operator*() const { return view_; }

 private:
  nb::object view_;
};

Scorer scorer(const Shared& bound, std::string name) {
  Scorer made{.name = std::move(name)};
  made.score = [bound](const LayerView& view, const Scoring& how) {
    return in_python([&] {
      const ViewLoan loan(view);
      const int rows = view.rows(how.grouping.heads);
      const nb::object scores = (*bound).attr("score")(*loan, rows);
      Matrix found = as_matrix(nb::cast<Numbers>(scores));
      return found.rows() == rows ? found : how.grouping(found, view.group());
    });
  };
  in_python([&] {
    const nb::object queries = (*bound).attr("queries");
    if (nb::isinstance<nb::int_>(queries)) {
      made.needs = last_queries(nb::cast<int>(queries));
    } else if (!queries.is_none()) {
      const auto word = nb::cast<std::string>(queries);
      made.needs = word == "future" ? future_queries() : all_queries();
    }
  });
  return made;
}

Selector selector(const Shared& bound, bool reads_scores) {
  Selector made{.reads_scores = reads_scores, .fills = false};
  made.select = [bound](const Row& row) {
    return in_python([&] {
      nb::object scores = nb::none();
      if (!row.scores.empty())
        scores = nb::cast(as_array(std::vector<double>(row.scores.begin(), row.scores.end()), {row.scores.size()}));
      const nb::object chosen = (*bound).attr("select")(scores, row.tokens, row.budget, row.sinks, row.recent);
      const auto positions = nb::cast<Counts>(chosen);
      Kept kept;
      for (std::size_t i = 0; i < positions.size(); ++i)
        kept.positions.push_back(static_cast<std::int32_t>(positions.data()[i]));
      const auto has = [&](int position) { return std::ranges::binary_search(kept.positions, position); };
      while (kept.sinks < row.sinks && has(kept.sinks)) ++kept.sinks;
      while (kept.recent < row.recent && has(row.tokens - 1 - kept.recent)) ++kept.recent;
      return kept;
    });
  };
  return made;
}

/// [layers, rows] or [layers] whole numbers, as Python gave them.
std::vector<std::vector<int>> counts(const nb::object& given) {
  const auto numbers = nb::cast<Counts>(given);
  std::vector<std::vector<int>> all(numbers.shape(0));
  const std::size_t rows = numbers.ndim() == 2 ? numbers.shape(1) : 1;
  for (std::size_t i = 0; i < numbers.size(); ++i) all[i / rows].push_back(static_cast<int>(numbers.data()[i]));
  return all;
}

nb::object as_python(const Division& division) {
  return nb::module_::import_("kvreplay.python_policies")
      .attr("Division")(division.layers, division.prompt, division.budget, division.sinks, division.recent);
}

AllocatorPtr allocator(const Shared& bound, bool by_scores) {
  if (!by_scores)
    return by_layer([bound](const Division& division) {
      return in_python([&] {
        std::vector<int> all;
        for (const std::vector<int>& layer : counts((*bound).attr("allocate")(as_python(division), nb::none())))
          all.push_back(layer.front());
        return all;
      });
    });
  return across_layers([bound](const Division& division, std::span<const Matrix* const> scores) {
    return in_python([&] {
      nb::list layers;
      for (const Matrix* layer : scores) layers.append(as_array(*layer));
      return counts((*bound).attr("allocate")(as_python(division), layers));
    });
  });
}

Sharing sharing(const Shared& bound) {
  return {[bound](int layer, int layers) {
    return in_python([&] { return nb::cast<int>((*bound).attr("share")(layer, layers)); });
  }};
}

class PythonSchedule final : public BlockSchedule {
 public:
  explicit PythonSchedule(const Shared& bound)
      : BlockSchedule(in_python([&] { return get<int>(*bound, "block"); })), bound_(bound) {}

  std::string name() const override { return "schedule in Python"; }

 private:
  Cut cut_at(const BlockEnd& end) const override {
    const int keep = in_python([&] {
      return nb::cast<int>((*bound_).attr("schedule")(end.budget, end.context, end.seen, end.held, end.block));
    });
    return {keep, end.budget};
  }

  Shared bound_;
};

/// Replaces the rows of the prompt's tokens, [heads, P, dim], in [heads, T, dim].
void replace_prompt(std::vector<float>& all, const TensorView& shape, std::span<const float> prompt) {
  const std::size_t of_head = prompt.size() / static_cast<std::size_t>(shape.heads);
  for (int head = 0; head < shape.heads; ++head)
    std::ranges::copy(prompt.subspan(static_cast<std::size_t>(head) * of_head, of_head),
                      row_of(all, shape, head, 0).data());
}

StorePtr store(const Shared& bound) {
  const auto apply = [bound](const LayerView& view, const KeptSet& kept, const Partner&) {
    auto layer = std::make_unique<StoredLayer>();
    layer->tensors = view.tensors();
    TensorView &keys = layer->tensors.k, &values = layer->tensors.v;
    layer->keys = widened(keys);
    layer->values = widened(values);
    const KeptSet of_heads = kept.refined(Heads::kv, keys.heads);
    std::vector<std::uint8_t> mask;
    for (int head = 0; head < keys.heads; ++head)
      for (int token = 0; token < view.prompt(); ++token) mask.push_back(of_heads.keeps(head, token));
    in_python([&] {
      const ViewLoan loan(view);
      const auto heads = static_cast<std::size_t>(keys.heads), tokens = static_cast<std::size_t>(view.prompt());
      const nb::object given = (*bound).attr("store")(*loan, as_array(std::move(mask), {heads, tokens}));
      const auto numbers = [&](int which) {
        const auto array = nb::cast<Floats>(given[which]);
        return std::span(array.data(), array.size());
      };
      replace_prompt(layer->keys, keys, numbers(0));
      replace_prompt(layer->values, values, numbers(1));
      layer->bytes = nb::cast<double>(given[2]);
    });
    keys = view_of(layer->keys, keys);
    values = view_of(layer->values, values);
    return layer;
  };
  return std::make_shared<const Store>(changing_store("store in Python", apply));
}

class PythonPolicy final : public Policy {
 public:
  explicit PythonPolicy(const Definition& definition) : definition_(definition), grouping_(definition.grouping) {
    for (const Declared& parameter : definition.parameters) values_.push_back(parameter.standard);
  }

  const Card& card() const override { return definition_.card; }

  Parameters parameters() override {
    Parameters all{definition_.name};
    for (std::size_t i = 0; i < values_.size(); ++i)
      declare(all, definition_.name, definition_.parameters[i], values_[i]);
    grouping_.parameters(all);
    return all;
  }

  void check() const override { plans(2); }

  std::vector<LayerPlan> plans(int layers) const override {
    Plan plan{.grouping = grouping_};
    const Shared bound = in_python([&] {
      nb::dict values;
      for (std::size_t i = 0; i < values_.size(); ++i)
        std::visit([&](const auto& value) { values[definition_.parameters[i].name.c_str()] = value; }, values_[i]);
      return Shared(definition_.bind(values));
    });
    fill(plan, bound);
    return {{0, layers, std::move(plan)}};
  }

 private:
  using Value = std::variant<bool, int, double, std::string>;

  static void declare(Parameters& all, const std::string& of, const Declared& parameter, Value& value) {
    if (bool* flag = std::get_if<bool>(&value)) return all.add(parameter.name, *flag, parameter.help);
    if (int* number = std::get_if<int>(&value)) {
      IntRange range{.least = std::numeric_limits<int>::min()};
      if (parameter.least) range.least = static_cast<int>(*parameter.least);
      if (parameter.most) range.most = static_cast<int>(*parameter.most);
      return all.add(parameter.name, *number, range, parameter.help);
    }
    if (double* number = std::get_if<double>(&value))
      return all.add(parameter.name, *number,
                     RealRange{.least = parameter.least.value_or(std::numeric_limits<double>::lowest()),
                               .most = parameter.most.value_or(std::numeric_limits<double>::max())},
                     parameter.help);
    std::string words;
    for (const std::string& choice : parameter.choices) words += (words.empty() ? "" : " | ") + choice;
    all.add(
        parameter.name, std::get<std::string>(value), words.empty() ? "text" : words,
        [&parameter, words, where = of + ":" + parameter.name](std::string_view text) {
          const bool known =
              parameter.choices.empty() || std::ranges::find(parameter.choices, text) != parameter.choices.end();
          if (!known) throw Error{Refusal::usage, where, "unknown word", words, std::string(text)};
          return std::string(text);
        },
        parameter.help);
  }

  void fill(Plan& plan, const Shared& bound) const {
    // Parts by name come first: a method takes the place of what they bring along.
    std::vector<std::pair<std::string, std::string>> parts;
    std::set<std::string> methods;
    bool by_scores = false;
    in_python([&] {
      for (const auto& [place, part] : get<nb::dict>(*bound, "parts"))
        parts.emplace_back(nb::cast<std::string>(place), nb::cast<std::string>(part));
      for (const nb::handle method : (*bound).attr("methods")) methods.insert(nb::cast<std::string>(method));
      by_scores = get<bool>(*bound, "allocates_by_scores");
      plan.protect.sinks = get<int>(*bound, "sinks");
      const nb::object recent = (*bound).attr("recent");
      plan.protect.recent = nb::isinstance<nb::int_>(recent) ? Amount::tokens(nb::cast<int>(recent))
                                                             : Amount::fraction(nb::cast<double>(recent));
    });
    if (methods.contains("score")) plan.score = scorer(bound, score_name());
    for (const auto& [place, part] : parts)
      for (const Choice<PartKind>& kind : part_kinds)
        if (place == kind.word) make_part(kind.value, part)->fill(plan);
    if (methods.contains("select")) plan.select = selector(bound, static_cast<bool>(plan.score));
    if (methods.contains("allocate")) plan.allocate = allocator(bound, by_scores);
    if (methods.contains("share")) plan.share = sharing(bound);
    if (methods.contains("schedule")) plan.schedule = std::make_shared<PythonSchedule>(bound);
    if (methods.contains("store")) plan.store = store(bound);
  }

  /// Equal names, equal scores: values and source are all that a score may depend on.
  std::string score_name() const {
    PythonPolicy same = *this;  // parameters may be set, and so are those of an object that may change
    return definition_.name + "(" + same.parameters().canonical() + ")@" + definition_.source.hash;
  }

  const Definition& definition_;
  Grouping grouping_;
  std::deque<Value> values_;  // parameters hold references
};

}  // namespace

void bind_python_policies(nb::module_& module) {
  using namespace nb::literals;
  module.def(
      "register_policy",
      [](nb::handle of) {
        const Definition* made = definition(of);
        static std::set<std::string> names;  // that are Python's
        const bool taken = made->name == layer_ranges_name || policies().find(made->name) != nullptr;
        if (taken && !names.contains(made->name))
          throw Error{Refusal::usage, made->name, "another policy has that name", "another name"};
        names.insert(made->name);
        policies().replace({made->name, [made] { return std::make_unique<PythonPolicy>(*made); }, made->source});
      },
      "definition"_a, "Registers a policy. It replaces a policy in Python of the same name.");
  module.def(
      "read_policies_by",
      [](nb::object load) {
        auto* held = new nb::object(std::move(load));  // outlives the interpreter, as the reader does
        python_policy_reader() = [held](const std::string& file, const std::string& policy) {
          return in_python([&] { return nb::cast<std::string>((*held)(file, policy)); });
        };
      },
      "load"_a, "load(file, policy) enters the policy of a file, and gives the name that it has then.");
}

}  // namespace kvreplay::python
