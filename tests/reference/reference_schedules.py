"""Policies that evict while tokens arrive: at every token, at a threshold, block by block; and rolling windows."""

from __future__ import annotations

import numpy as np
from reference import (
    aggregate,
    budget_tokens,
    capped,
    cumulative_attention,
    logits,
    protection,
    rotate,
    rows_of,
    softmax,
    token_similarity,
)
from reference_selection import (
    TOLERANCE,
    Case,
    Decision,
    Selection,
    Verdict,
    call_of,
    exactly,
    found,
    only,
    ranked_once,
    tokens_of,
    uniform,
)


class Residents:
    """Who is there in one layer, row by row, as time goes on; where another selection is followed, its evictions.

    evicted_at [H,T] is the query that saw a token last, T as long as it stays.
    """

    def __init__(self, case: Case, index: int) -> None:
        tokens = case.trace.tokens
        self.evicted_at = np.full((case.row_count, tokens), tokens)
        self.followed = None
        if case.follow:
            theirs = case.follow.evicted_at[index]
            self.followed = np.where(theirs < 0, tokens, theirs)

    def at(self, row: int, t: int) -> np.ndarray:
        """Positions that query t sees, ascending."""
        return np.flatnonzero(self.evicted_at[row, : t + 1] >= t)

    def mask(self, queries: np.ndarray) -> np.ndarray:
        """[H,E,T] bool: who sees what."""
        position = np.arange(self.evicted_at.shape[1])
        return (position <= queries[:, None]) & (self.evicted_at[:, None, :] >= queries[:, None])

    def theirs(self, row: int, t: int) -> np.ndarray | None:
        """What the followed selection keeps of the residents after query t."""
        if self.followed is None:
            return None
        residents = self.at(row, t)
        return residents[self.followed[row, residents] > t]

    def keep(self, row: int, t: int, kept: np.ndarray) -> None:
        """After query t only `kept` stay, or what the followed selection keeps."""
        theirs = self.theirs(row, t)
        gone = np.setdiff1d(self.at(row, t), kept if theirs is None else theirs)
        self.evicted_at[row, gone] = t


def scheduled(case: Case, layers: list[Residents], decisions: list[Decision], **others: object) -> Selection:
    """The answer of a schedule; a followed selection must evict when it is due and at no other time."""
    trace = case.trace
    evicted_at = np.stack([residents.evicted_at for residents in layers])
    rows = [[np.flatnonzero(row[: trace.prompt] >= trace.prompt) for row in layer] for layer in evicted_at]
    evicted_at = np.where(evicted_at == trace.tokens, -1, evicted_at)

    def verdict(theirs: Selection) -> Verdict:
        if not np.array_equal(theirs.evicted_at, evicted_at):
            return Verdict.WRONG
        same = all(
            np.array_equal(one, other)
            for layer, their_layer in zip(rows, theirs.rows, strict=True)
            for one, other in zip(layer, their_layer, strict=True)
        )
        return Verdict.EQUAL if same else Verdict.WRONG

    fixed = others.pop("fixed")
    decisions = [*decisions, Decision("sets and evicted_at, all that is left of them", verdict)]
    return case.selection(rows, fixed, decisions, evicted_at=evicted_at, **others)


# ------------------------------------------------------------------------------------------------------ at every token


def h2o_online(case: Case) -> Selection:
    """Whenever a row holds more than its capacity, the token of the least attention so far goes."""
    trace, heads = case.trace, case.heads
    grow, once = case.parameters["grow"] == "true", case.parameters["prefill"] == "once"
    layers, decisions = [], []
    for index, layer in enumerate(trace.treated):
        residents = Residents(case, index)
        layers.append(residents)
        n_rows = case.row_count
        seen_by = np.arange(trace.query_heads) * n_rows // trace.query_heads
        z, _ = logits(trace, layer, np.arange(trace.tokens))
        attention_so_far = np.zeros((n_rows, trace.tokens))
        for t in range(trace.tokens):
            later = max(0, t - trace.prompt + 1) * grow  # tokens that take no slots
            budget = budget_after(case, t + 1 - later)
            if once and t < trace.prompt - 1:
                continue
            if once and t == trace.prompt - 1:
                whole = aggregate(cumulative_attention(trace, layer), heads, "mean", trace.kv_heads)
                attention_so_far[:, : trace.prompt] = whole
            else:
                mask = residents.mask(np.array([t]))[:, 0]
                attended = softmax(z[:, t], mask[seen_by])
                attention_so_far += aggregate(attended, heads, "mean", trace.kv_heads)
            there = residents.mask(np.array([t]))[:, 0]
            recent = max(1, tokens_of(case.parameters["recent"], budget))
            sinks, recent = guarded_among(case, np.flatnonzero(there[0]), recent, budget)
            recent = max(recent, min(1, budget - sinks))  # the newest token has its own attention alone
            excess = there.sum(axis=1)[0] - budget - later  # the same in all rows
            if excess == 1:
                scores = np.where(there, attention_so_far, np.inf)
                scores[:, t + 1 - recent :] = np.inf  # the last r, which nothing evicts
                scores[:, np.flatnonzero(there[0])[:sinks]] = np.inf
                where = f"treated layer {index} query {t}"
                decisions.append(found(where, lowest_goes(residents, scores, t)))
            elif excess > 1:
                for row in range(n_rows):
                    now = np.flatnonzero(there[row])
                    others = now[sinks : len(now) - recent]
                    fixed = np.setdiff1d(now, others)
                    scores = only(attention_so_far[row], others)
                    kept, verdict = ranked_once(scores, budget + later - len(fixed), fixed, residents.theirs(row, t))
                    decisions.append(found(f"treated layer {index} row {row} query {t}: {kept.tolist()}", verdict))
                    residents.keep(row, t, kept)
            if t == trace.prompt - 1:
                protected = protection(sinks, recent, trace.prompt, trace.prompt)
    return scheduled(case, layers, decisions, fixed=protected)


def budget_after(case: Case, seen: int) -> int:
    """B(t) after so many tokens: it grows with them where it is a share of these."""
    return budget_tokens(case.literal, seen) if case.literal.endswith("@seen") else case.budget


def guarded_among(case: Case, there: np.ndarray, recent: int, budget: int) -> tuple[int, int]:
    """Protected first and last ones of the tokens that are there, within a budget; an evicted sink is none any more."""
    sinks, recent = case.protect(budget) or (case.sinks, recent)
    sinks = min(int((there < sinks).sum()), budget)
    return sinks, min(recent, budget - sinks)


def lowest_goes(residents: Residents, scores: np.ndarray, t: int) -> Verdict:
    """After query t the lowest of each row's scores [H,T] goes, of equal ones the higher position."""
    rows = np.arange(len(scores))
    ours = scores.shape[1] - 1 - scores[:, ::-1].argmin(axis=1)
    if residents.followed is None:
        residents.evicted_at[rows, ours] = t
        return Verdict.EQUAL
    gone = (residents.followed == t) & (residents.evicted_at >= t)
    theirs = gone.argmax(axis=1)
    residents.evicted_at[gone] = t
    if (theirs == ours).all() and (gone.sum(axis=1) == 1).all():
        return Verdict.EQUAL
    least, chosen = scores[rows, ours], scores[rows, theirs]
    close = (chosen - least <= TOLERANCE * least) & ((chosen > least) | (theirs == ours))
    return Verdict.NEAR if close.all() and (gone.sum(axis=1) == 1).all() else Verdict.WRONG


# ------------------------------------------------------------------------------------------------------ at a threshold


def threshold_sizes(case: Case) -> tuple[int, int]:
    """n_max and n_keep of schedule=threshold(n_max,n_keep), each a count or a share of the prompt."""
    peak, keep = call_of(case.parameters["schedule"])[1][:2]
    return budget_tokens(peak, case.trace.prompt), budget_tokens(keep, case.trace.prompt)


def compressions(case: Case) -> range:
    """The queries after which residents are as many as the threshold; threshold(n_max,n_keep,true) evicts no token
    before the end of the prompt."""
    peak, keep = threshold_sizes(case)
    whole = call_of(case.parameters["schedule"])[1][2:] == ["true"]
    return range(max(peak, whole * case.trace.prompt) - 1, case.trace.tokens, peak - keep)


def same(ours: np.ndarray, theirs: np.ndarray | None) -> tuple[np.ndarray, Verdict]:
    """A choice by integers, to which nothing is near."""
    return ours, Verdict.EQUAL if theirs is None or np.array_equal(ours, theirs) else Verdict.WRONG


# ---------------------------------------------------------------------------------------------------------------- sca


def least_redundant(
    similarities: list[np.ndarray], protected: np.ndarray, keep: int, objective: str = "min"
) -> list[int]:
    """Indices in the order in which they join `protected`, until `keep` are there, each by the definition of Add.

    similarities: [n,n] int64 matrices whose sums of Add count.
    """
    kept = list(protected)
    while len(kept) < keep:
        others = np.setdiff1d(np.arange(len(similarities[0])), kept)
        total = np.zeros(len(others), dtype=np.int64)
        for s in similarities:
            among = s[np.ix_(kept, kept)].copy()
            np.fill_diagonal(among, np.iinfo(np.int64).min)
            redundancy = among.max(axis=1) if len(kept) > 1 else np.zeros(1, np.int64)
            beside = s[np.ix_(kept, others)]
            total += np.maximum(0, beside - redundancy[:, None]).sum(axis=0) + beside.max(axis=0)
        best = total.argmin() if objective == "min" else total.argmax()  # the first of equals is the lower position
        kept.append(int(others[best]))
    return kept[len(protected) :]


def sca(case: Case) -> Selection:
    """Tokens that are least like the kept ones, of one layer, for all layers and heads."""
    trace, parameters = case.trace, case.parameters
    once = parameters["schedule"] == "once"
    keep = case.budget if once else threshold_sizes(case)[1]
    moved = parameters["positions"] == "cache" or (parameters["positions"] == "auto" and not once)
    most = parameters["objective"] == "max"
    sinks = (4 if most else 0) if parameters["sinks"] == "auto" else int(parameters["sinks"])
    if parameters["recent"] == "auto":
        recent = max(1, keep // 4) if once else 128
    else:
        recent = tokens_of(parameters["recent"], keep)
        recent = max(1, recent) if "." in parameters["recent"] else recent
    protected = case.guarded(sinks, recent, keep)
    if protected == (0, 0):  # similarity needs a token to begin with
        protected = 0, 1
    n_layers = len(trace.treated)
    if parameters["share"] == "all":
        source = [int(parameters["layer"]) % n_layers] * n_layers
    else:
        share = int(parameters["share"])
        source = [min(layer // share * share + share, n_layers) - 1 for layer in range(n_layers)]

    def choose(layer: int, now: np.ndarray) -> np.ndarray:
        keys = trace.layers[layer].k[:, now]
        if moved:
            keys = rotate(trace, layer, keys, np.arange(len(now)) - now)
        tensors = {"key": [keys], "value": [trace.layers[layer].v[:, now]]}
        used = tensors["key"] + tensors["value"] if parameters["use"] == "kv" else tensors[parameters["use"]]
        fixed = protection(*protected, keep, len(now))
        similarities = [token_similarity(vectors) for vectors in used]
        chosen = least_redundant(similarities, fixed, keep, parameters["objective"])
        return now[np.sort(np.concatenate([fixed, chosen]).astype(int))]

    fixed = protection(*protected, keep, trace.prompt)
    if once:
        chosen = {index: choose(trace.treated[index], np.arange(trace.prompt)) for index in set(source)}
        rows = [[chosen[index]] for index in source]
        decisions = [exactly((index, 0), row) for index, [row] in enumerate(rows)]
        return case.selection(rows, fixed, decisions, source=source, moved=moved)
    layers, decisions = {}, []
    for index in sorted(set(source)):
        residents = layers[index] = Residents(case, index)
        for t in compressions(case):
            kept, verdict = same(choose(trace.treated[index], residents.at(0, t)), residents.theirs(0, t))
            decisions.append(found(f"treated layer {index} query {t}: keep {kept.tolist()}", verdict))
            residents.keep(0, t, kept)
    return scheduled(case, [layers[index] for index in source], decisions, fixed=fixed, source=source, moved=moved)


# -------------------------------------------------------------------------------------------------------------- finch


def finch(case: Case) -> Selection:
    """Block after block of the context, the tokens that the question at the prompt's end attends to most."""
    trace, parameters = case.trace, case.parameters
    asked = trace.question_tokens if parameters["question"] == "auto" else 0
    question = asked or case.number("question_tokens")
    context = trace.prompt - question
    k = case.budget - question
    given = call_of(parameters.get("schedule", ""))[1]
    size = int(given[0]) if given else case.number("blocks")
    moved = parameters["positions"] == "cache"
    by_relevance = parameters["order"] == "relevance"
    per_row = trace.query_heads // case.row_count
    asking = np.arange(context, trace.prompt)
    layers, decisions, order = [], [], []
    for index, layer in enumerate(trace.treated):
        residents = Residents(case, index)
        layers.append(residents)
        order.append([])
        for row in range(case.row_count):
            heads = range(row * per_row, (row + 1) * per_row)
            kept = np.array([], dtype=int)
            coded = 0
            for begin in range(0, context, size):
                end = min(begin + size, context)
                there = np.concatenate([kept, np.arange(begin, end)])
                scores = question_scores(case, layer, heads, there, len(kept), asking)
                coded += (end - begin) // -(-context // k)
                r = k * end // context if parameters["rate"] == "exact" else coded
                by_position = np.full(trace.tokens, -np.inf)
                by_position[there] = scores
                there = np.sort(there)
                first, last = case.guarded(case.sinks, 0, k)
                first = min(int((there < first).sum()), r)
                last = min(last, r - first)
                others = there[first : len(there) - last]
                fixed = np.setdiff1d(there, others)
                scores = only(by_position, others)
                ours, verdict = ranked_once(scores, r - len(fixed), fixed, residents.theirs(row, end - 1))
                where = f"treated layer {index} row {row} block to {end}: keep {ours.tolist()}"
                decisions.append(found(where, verdict))
                residents.keep(row, end - 1, ours)
                kept = residents.at(row, end)
                kept = kept[kept < end]
                if by_relevance:
                    kept = kept[np.lexsort((kept, -by_position[kept]))]
            order[-1].append(np.concatenate([kept, asking]))
    slots = order if moved and by_relevance else None
    protected = np.union1d(np.arange(case.guarded(case.sinks, 0, k)[0]), asking)
    return scheduled(case, layers, decisions, fixed=protected, moved=moved, order=slots)


def question_scores(
    case: Case, layer: int, heads: range, there: np.ndarray, n_kept: int, asking: np.ndarray
) -> np.ndarray:
    """[#X]: attention to X = `there`, of which `n_kept` are kept and the rest is the block, weighted row by row.

    Tokens sit at slots 0,1,2… in the order kept, block, question; a row sees the slots up to its own.
    """
    trace, parameters = case.trace, case.parameters
    tokens = np.concatenate([there, asking])
    slots = np.arange(len(tokens))
    rows = {"question": slots[len(there) :], "context": slots[n_kept : len(there)], "all": slots[n_kept:]}
    rows = rows[parameters["condition"]]
    total = np.zeros(len(tokens))
    for head in heads:
        keys = trace.layers[layer].k[head * trace.kv_heads // trace.query_heads, tokens]
        queries = rows_of(trace, layer, tokens[rows])[head]
        if parameters["positions"] == "cache":
            keys = rotate(trace, layer, keys, slots - tokens)
            queries = rotate(trace, layer, queries, rows - tokens[rows])
        attended = softmax(capped(trace, queries @ keys.T), slots <= rows[:, None])
        weights = (rows + 1) / len(tokens) if parameters["norm"] == "visible" else np.ones(len(rows))
        total += weights @ attended
    return total[: len(there)]


# ----------------------------------------------------------------------------------------- sinks and a recent window


def window_at_every_token(case: Case) -> Selection:
    """Whenever a row holds more than its capacity, the oldest token behind its sinks goes."""
    trace, sinks = case.trace, case.number("sinks")
    grow, once = (case.parameters.get(name) == value for name, value in (("grow", "true"), ("prefill", "once")))
    layers, decisions = [], []
    for index in range(len(trace.treated)):
        residents = Residents(case, index)
        layers.append(residents)
        for t in range(trace.prompt - 1 if once else 0, trace.prompt if grow else trace.tokens):
            budget = budget_after(case, t + 1)
            for row in range(case.row_count):
                there = residents.at(row, t)
                first = there[there < sinks][:budget]
                kept = np.union1d(first, there[len(there) - budget + len(first) :]) if len(there) > budget else there
                decisions.append(found(f"layer {index} query {t}", same(kept, residents.theirs(row, t))[1]))
                residents.keep(row, t, kept)
    end = np.flatnonzero(layers[0].evicted_at[0, : trace.prompt] >= trace.prompt)
    return scheduled(case, layers, decisions, fixed=end, moved=case.parameters["positions"] == "cache")


def streaming_llm(case: Case) -> Selection:
    """The first s tokens and the last B-s; rolling: counted back from the query that looks."""
    if call_of(case.parameters.get("schedule", ""))[0] == "online":
        return window_at_every_token(case)
    sinks, budget, prompt = case.number("sinks"), case.budget, case.trace.prompt
    kept = protection(sinks, budget, budget, prompt)
    selection = uniform(case, lambda layer, row: kept, kept)
    selection.moved = case.parameters["positions"] == "cache"

    def rolls(theirs: Selection) -> Verdict:
        """What is seen by theirs.evicted_at is what a rolling window shows."""
        queries = np.arange(case.trace.tokens)
        gone = theirs.evicted_at[:, :, None]
        shown = ((gone < 0) | (gone >= queries[:, None])) & (queries <= queries[:, None])
        return Verdict.EQUAL if (shown == seen(queries)).all() else Verdict.WRONG

    def seen(queries: np.ndarray) -> np.ndarray:
        position, query = np.arange(case.trace.tokens), queries[:, None]
        last = (position <= query) & (position > query - max(0, budget - sinks))
        return last | ((position < min(sinks, budget)) & (position <= query)) | (position == query)

    if case.parameters["rolling"] == "true":
        selection.seen = seen
        if case.follow:
            selection.decisions.append(Decision("evicted_at of a rolling window", lambda theirs: rolls(theirs)))
    return selection
