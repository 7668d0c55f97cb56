// The engine: score all layers -> allocate -> select -> share -> moments, one layer resident at a time.
//
// A policy whose sets do not depend on other layers is selected and measured while its layer is resident. A policy that
// allocates across layers is scored in that first walk and measured in a second one. Both follow from the type of its
// allocator and from its sharing.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "attention/layer_view.h"
#include "policies/configured.h"
#include "trace/trace.h"

namespace kvreplay {

/// What is the same for all policies of a run over one trace.
struct Conditions {
  int boundary = 0;                        // P: tokens under compression
  std::vector<std::int32_t> eval_queries;  // positions, ascending
  std::vector<int> layers;                 // stored layers that are treated, ascending
};

/// Which tokens metrics are taken at: "continuation", "last:N", "span:NAME", "all", "stride:K". Throws Error{usage} for
/// the text, Error{input} for a trace without such queries.
std::vector<std::int32_t> eval_queries(const Trace& trace, std::string_view text);

/// "prompt", a number of tokens, or "span:NAME" (its end). Throws as eval_queries.
int boundary(const Trace& trace, std::string_view text);

/// Stored layers without a sliding window, or all with `treat_sliding`. Throws Error{input} when none is left.
std::vector<int> treated_layers(const Trace& trace, bool treat_sliding);

/// One layer's set, checked where it is made: ascending, unique, below the boundary, within the budget.
struct LayerSelection {
  KeptSet set;
  std::vector<int> sinks;    // [H] first tokens kept by rule
  std::vector<int> recent;   // [H] last tokens kept by rule
  std::vector<int> granted;  // [H] the budget of each row
  int source = 0;            // treated layer whose set this is
};

/// A policy at a budget.
struct Cell {
  ConfiguredPolicy policy;
  int budget = 0;                          // tokens; a budget of P or more keeps everything
  std::vector<LayerSelection> known = {};  // [L] from an earlier run, or empty: to be made
  bool measure = true;                     // moments are wanted
};

/// Seconds of one cell in one layer, shared observables apart.
struct CellSeconds {
  double score = 0;
  double select = 0;
};

/// Receives results layer by layer. Calls come from one thread.
class Sink {
 public:
  virtual ~Sink() = default;
  /// Once a treated layer, ascending, before anything else of it. Trace-wide observables are computed here.
  virtual void layer(const LayerView&, Backend&) {}
  /// Once for each cell and layer that is scored, before its selection: [H, P].
  virtual void scored(const LayerView&, int /*cell*/, const Matrix& /*scores*/) {}
  /// Once for each cell and layer.
  virtual void selected(const LayerView&, int /*cell*/, const LayerSelection&, const CellSeconds&) {}
  /// Moments of some cells at a block of eval queries, [first, first + count) of Conditions::eval_queries:
  /// `moments.kept` is [cells, Hq, count].
  virtual void measured(const LayerView&, std::span<const int> /*cells*/, int /*first*/, int /*count*/,
                        const KeptMoments&) {}
  /// The general path at one query of the block that `measured` heard last (index into eval_queries), [Hq], to hold
  /// against the moments.
  virtual void compared(const LayerView&, int /*cell*/, int /*query*/, std::span<const Comparison>) {}
  /// After all cells of a treated layer in a walk. `walk` counts from 0, `walks` is 1 or 2.
  virtual void layer_done(const LayerView&, int /*walk*/, int /*walks*/) {}
};

/// Throws Error{input} when the trace lacks queries that the policy reads, Error{usage} when a value does not fit it.
void check_policy(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy);

/// Replays one trace. A cell that fails a check of its selection throws Error{internal}; Error{interrupted} when
/// `interrupted` (polled between layers and query blocks) answers true.
void replay(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells, Sink& sink,
            const std::function<bool()>& interrupted = {});

}  // namespace kvreplay
