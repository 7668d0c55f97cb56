"""Any score under any schedule that evicts in rounds: after a block of the prompt, or when a threshold is reached.

In each round a policy scores the resident tokens of a layer as if they were all there is: queries attend to these
alone, statistics are theirs, chunks, blocks and partitions are counted along them. Sums of attention are the exception:
each query pays once, to the tokens that were resident when it came, and an eviction does not change that. Sinks and
recent tokens are protected within what the round keeps; an evicted sink is none any more, and leaves its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter

import numpy as np
from reference import aggregate, budget_tokens, capped, logits, norms, pool, rows_of, softmax
from reference_2026 import (
    by_group,
    capacity_of,
    crushed,
    gumbel,
    redundancy,
    signature_distances,
    trigonometric_of,
)
from reference_attention import expected_of_keys, sinks_first
from reference_geometry import (
    leverages,
    main_directions,
    ranks_in_partitions,
    shares_of_blocks,
    uniform_number,
    unlike_the_mean,
)
from reference_newer import change_of_output
from reference_once import chunk_selections, hash_order, spread
from reference_schedules import Residents, compressions, scheduled, threshold_sizes
from reference_selection import Case, Selection, Verdict, call_of, found, ranked_once, tokens_of


@dataclass(frozen=True, eq=False)
class Round:
    """The resident tokens of a stored layer when the queries [0,seen) have come.

    positions [H,n] are ascending; received [Hq,n] is the attention that the tokens have received; the first `sinks` and
    the last `recent` tokens of each row are protected.
    """

    case: Case
    layer: int
    seen: int
    positions: np.ndarray
    received: np.ndarray
    sinks: int
    recent: int
    added: int  # tokens since the round before

    @property
    def n(self) -> int:
        return self.positions.shape[1]

    def of_heads(self, heads: int) -> np.ndarray:
        """[heads,n] positions: a row serves as many neighbouring heads."""
        return np.repeat(self.positions, heads // len(self.positions), axis=0)

    def keys(self) -> np.ndarray:
        """[Hkv,n,d], or [Hq,n,d] where each query head holds tokens of its own."""
        return self.gathered(self.case.trace.layers[self.layer].k)

    def values(self) -> np.ndarray:
        """The same."""
        return self.gathered(self.case.trace.layers[self.layer].v)

    def gathered(self, vectors: np.ndarray) -> np.ndarray:
        rows = max(len(vectors), len(self.positions))
        repeated = np.repeat(vectors, rows // len(vectors), axis=0)
        return np.take_along_axis(repeated, self.of_heads(rows)[:, :, None], axis=1)

    def attention(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """a [Hq,w,n] of the last `window` queries, at most all, over the resident tokens; what each of them sees."""
        trace = self.case.trace
        queries = np.arange(max(0, self.seen - window), self.seen)
        visible = self.of_heads(trace.query_heads)[:, None, :] <= queries[:, None]
        return attended(self.logits(queries), visible), visible

    def logits(self, queries: np.ndarray) -> np.ndarray:
        """z [Hq,w,n] of the queries at these positions."""
        trace, keys = self.case.trace, self.keys()
        keys = np.repeat(keys, trace.query_heads // len(keys), axis=0)
        return capped(trace, rows_of(trace, self.layer, queries) @ keys.transpose(0, 2, 1))

    def window_over(self, columns: int, temperature: float = 1, maximum: bool = False) -> np.ndarray:
        """[Hq,w,columns], or with the maximum of each group's logits [Hkv,w,columns]: softmax of the observation
        window's queries over the first resident tokens alone."""
        trace = self.case.trace
        queries = np.arange(max(0, self.seen - self.case.number("window")), self.seen)
        z = self.logits(queries)[..., :columns] / temperature
        if maximum:
            z = by_group(trace, z).max(axis=1)
        return attended(z, self.of_heads(len(z))[:, None, :columns] <= queries[:, None])

    def reduced(self, scores: np.ndarray) -> np.ndarray:
        """[Hq,n] to [H,n]."""
        return aggregate(scores, self.case.heads, self.case.parameters.get("agg", "mean"), self.case.trace.kv_heads)


def attended(z: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Softmax over the visible tokens; a query that sees none, because all have been evicted, attends to nothing."""
    blind = ~visible.any(axis=2, keepdims=True)
    return softmax(z, visible | blind) * ~blind if z.shape[2] else z


# ------------------------------------------------------------------------------------------------------------- scores


def pooled_window(now: Round) -> np.ndarray:
    """The observation window's attention, pooled over what precedes the protected tokens."""
    parameters, candidates = now.case.parameters, slice(now.sinks, now.n - now.recent)
    scores = now.reduced(now.attention(now.case.number("window"))[0].sum(axis=1))
    scores[:, candidates] = pool(scores[:, candidates], int(parameters["kernel"]), parameters["pool"])
    return scores


def window_by_head(now: Round) -> np.ndarray:
    """The observation window's attention as it is."""
    return now.reduced(now.attention(now.case.number("window"))[0].sum(axis=1))


def more_than_evenly(now: Round) -> np.ndarray:
    """Minus the place by how many queries attend more than evenly to a token, then by the sum of their attention."""
    attended, visible = now.attention(now.case.number("history"))
    even = (1 + 1e-6) / np.maximum(1, visible.sum(axis=2, keepdims=True))
    counts, sums = (now.reduced(one.sum(axis=1)) for one in ((attended > even).astype(float), attended))
    return np.array([places(np.lexsort((-summed, -counted))) for counted, summed in zip(counts, sums, strict=True)])


def places(order: np.ndarray) -> np.ndarray:
    """Minus the place of each index in an order of all."""
    scores = np.empty(len(order))
    scores[order] = -np.arange(len(order))
    return scores


def drawn(now: Round) -> np.ndarray:
    """Minus the place by hash."""
    orders = (hash_order(now.case.number("seed"), now.layer, row, there) for row, there in enumerate(now.positions))
    return np.array([places(np.searchsorted(now.positions[row], order)) for row, order in enumerate(orders)])


def per_query(now: Round) -> np.ndarray:
    """The mean attention of the queries that came with a token or after it."""
    return now.reduced(now.received) / (now.seen - now.positions)


def times_value(now: Round) -> np.ndarray:
    """Attention times the L1 norm of the value."""
    of_h2o = now.case.parameters["base"] == "h2o"
    paid = now.received if of_h2o else now.attention(now.case.number("history"))[0].sum(axis=1)
    return now.reduced(paid) * norms(now.values(), 1)


def expected(now: Round) -> np.ndarray:
    """What queries after the last one are expected to attend to, by the value's length."""
    parameters, trace = now.case.parameters, now.case.trace
    weights = expected_of_keys(now.case, now.layer, now.keys(), now.seen, now.sinks)
    if parameters["vnorm"] == "true":
        lengths = norms(now.values(), 2)
        lengths = np.repeat(lengths, trace.query_heads // len(lengths), axis=0)
        weights = (weights + float(parameters["epsilon"])) * lengths
    return sinks_first(now.reduced(weights), now.sinks)


def spread_over_channels(now: Round) -> np.ndarray:
    """Ranks in partitions; of tokens too few for two partitions the last ones."""
    sinks, lag = now.sinks, now.case.number("lag")
    if (now.n - sinks) // lag < 2:
        return np.tile(np.arange(float(now.n)), (len(now.positions), 1))
    heads = zip(now.keys(), now.values(), strict=True)
    return np.array([ranks_in_partitions(keys, values, sinks, lag)[0] for keys, values in heads])


def change(now: Round) -> np.ndarray:
    """What the output loses without a token."""
    of_window = now.case.parameters["base"] == "window"
    seen = now.attention(now.case.number("window"))[0].sum(axis=1) if of_window else now.received
    return now.reduced(change_of_output(seen, now.values()))


def along_queries(now: Round) -> np.ndarray:
    """Keys along the direction in which the queries so far lie most."""
    return np.einsum("hnd,hd->hn", now.keys(), main_directions(now.case.trace, now.layer, now.seen))


def wide(now: Round, scores: np.ndarray) -> np.ndarray:
    """[H,columns] of the first resident tokens to [H,n], zeros behind."""
    return np.pad(scores, ((0, 0), (0, now.n - scores.shape[1])))


def attended_and_unlike(now: Round) -> np.ndarray:
    """The window's attention to the tokens before the recent ones, and how far their keys are from the others."""
    share, threshold = (float(now.case.parameters[name]) for name in ("mix_lambda", "threshold"))
    paid = now.window_over(now.n - now.recent, maximum=True).mean(axis=1)
    paid = wide(now, pool(paid, now.case.number("kernel"), "max"))
    return share * paid - (1 - share) * np.array([redundancy(keys, threshold) for keys in now.keys()])


def smooth_window(now: Round) -> np.ndarray:
    """The window's attention to the tokens before the recent ones, pooled by its mean."""
    paid = now.window_over(now.n - now.recent, float(now.case.parameters["temperature"])).mean(axis=1)
    return wide(now, now.reduced(pool(paid, now.case.number("kernel"), "avg")))


def towards_expected_query(now: Round) -> np.ndarray:
    """Leverages of the values, weighted by the direction of the keys."""
    keys, values = now.keys()[:, now.sinks :], now.values()[:, now.sinks :]
    by_head = capacity_of(now.case, now.layer, keys, values, now.seen)
    return now.reduced(np.pad(by_head, ((0, 0), (now.sinks, 0))))


def noisy_attention(now: Round) -> np.ndarray:
    """The sum over all queries of the softmax of logits with noise."""
    trace, queries = now.case.trace, np.arange(now.seen)
    there = now.of_heads(trace.query_heads)[:, None, :]
    heads = np.arange(trace.query_heads)[:, None, None]
    noise = gumbel(now.case.number("seed"), now.layer, heads, queries[:, None], there)
    z = (now.logits(queries) + noise) / float(now.case.parameters["tau"])
    return now.reduced(attended(z, there <= queries[:, None]).sum(axis=1))


def by_use(now: Round, by_count: bool) -> np.ndarray:
    """Minus the place by the number of uses, if these count, then by the last query that used a token."""
    paid, visible = now.attention(now.seen)
    paid, seen_by_group = by_group(now.case.trace, paid).mean(axis=1), by_group(now.case.trace, visible)[:, 0]
    even = (1 + 1e-6) / np.maximum(1, seen_by_group.sum(axis=2, keepdims=True))
    queries = np.arange(now.seen)[:, None]
    used = (paid > even) & (queries > now.positions[:, None, :])
    last = np.where(used, queries, now.positions[:, None, :]).max(axis=1)
    counts = used.sum(axis=1) * by_count
    return np.array([places(np.lexsort((-late, -count))) for count, late in zip(counts, last, strict=True)])


def at_later_positions(now: Round) -> np.ndarray:
    """What the mean query pays to the keys at later positions, standardised over the tokens that compete."""
    trace, competing = now.case.trace, slice(now.sinks, now.n - now.recent)
    scores = trigonometric_of(trace, now.layer, now.keys(), now.of_heads(len(now.keys())), now.seen)
    compared = scores[:, competing]
    standard = np.zeros(scores.shape)
    deviation = np.maximum(compared.std(axis=1, keepdims=True), 1e-6)
    standard[:, competing] = (compared - compared.mean(axis=1, keepdims=True)) / deviation
    return now.reduced(standard)


# ------------------------------------------------------------------------------------------------------------ choosing


Choice = tuple[np.ndarray, Verdict]


def best(now: Round, scores: np.ndarray, row: int, keep: int, theirs: np.ndarray | None) -> Choice:
    """The protected tokens, and the best of the others."""
    there = now.positions[row]
    candidates = np.arange(now.sinks, now.n - now.recent)
    fixed = np.setdiff1d(there, there[candidates])
    return ranked_once(scattered(there, scores[row], candidates), keep - len(fixed), fixed, theirs)


def chunks(now: Round, scores: np.ndarray, row: int, keep: int, theirs: np.ndarray | None) -> Choice:
    """The best chunks of neighbouring resident tokens."""
    there, parameters = now.positions[row], now.case.parameters
    fixed = np.concatenate([there[: now.sinks], there[now.n - now.recent :]])
    size = int(parameters["chunk"])
    found_sets = chunk_selections(scores[row, now.sinks :], keep - now.sinks, now.recent, size, parameters)
    choices = [np.union1d(there[now.sinks + chosen], fixed) for chosen in found_sets]
    if theirs is None or np.array_equal(choices[0], theirs):
        return choices[0], Verdict.EQUAL
    near = any(np.array_equal(choice, theirs) for choice in choices)
    return choices[0], Verdict.NEAR if near else Verdict.WRONG


def strides(now: Round, scores: np.ndarray, row: int, keep: int, theirs: np.ndarray | None) -> Choice:
    """Slots in equal strides."""
    ours = now.positions[row][spread(now.n, keep)]
    return ours, Verdict.EQUAL if theirs is None or np.array_equal(ours, theirs) else Verdict.WRONG


def scattered(there: np.ndarray, scores: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """By position: the scores [n] of the resident tokens with these numbers, minus infinity elsewhere."""
    by_position = np.full(there[-1] + 1, -np.inf)
    by_position[there[candidates]] = scores[candidates]
    return by_position


def large_values_and_sample(now: Round, scores: np.ndarray, row: int, keep: int, theirs: np.ndarray | None) -> Choice:
    """The values of the largest range, and a sample in proportion to the scores; its random numbers are others in each
    round from the second one on."""
    there, share = now.positions[row], Fraction(now.case.parameters["large"])
    candidates = np.arange(now.sinks, now.n - now.recent)
    fixed = np.setdiff1d(there, there[candidates])
    n_large = min(keep - len(fixed), max(0, int(share * keep) - now.sinks))
    values = now.values()[row]
    ranges = scattered(there, values.max(axis=1) - values.min(axis=1), candidates)
    large, _ = ranked_once(ranges, n_large, fixed, None)
    later = [now.seen] if now.added < now.n else []
    u = uniform_number(now.case.number("seed"), now.layer, row, there, *later)
    with np.errstate(divide="ignore"):
        sample = np.maximum(np.log(scores[row]) - np.log(-np.log(u)), -1e300)
    others = np.setdiff1d(candidates, np.searchsorted(there, large))
    return ranked_once(scattered(there, sample, others), keep - len(large), large, theirs)


def pages_and_representatives(now: Round, scores: np.ndarray, row: int, keep: int, theirs: np.ndarray | None) -> Choice:
    """Pages of the greatest attention, and pages that represent the others."""
    parameters, size = now.case.parameters, now.case.number("page")
    competing = scores[:, now.sinks : now.n - now.recent]
    free = keep - now.sinks - now.recent
    n_crushed = int(Fraction(parameters["ratio"]) * free / size)
    distances = signature_distances(competing, size, parameters["anchor"], now.case.number("seed"), now.layer)
    chosen = now.sinks + crushed(competing[row], size, free, n_crushed, distances)
    ending = np.arange(now.n - now.recent, now.n)
    ours = now.positions[row][np.concatenate([np.arange(now.sinks), chosen, ending])]
    return ours, Verdict.EQUAL if theirs is None or np.array_equal(ours, theirs) else Verdict.WRONG


@dataclass(frozen=True)
class Rule:
    """A policy in a round: the scores [H,n] of the resident tokens, the choice among them, and what is protected.

    `sinks` and `recent` read the numbers of first and of last tokens from the parameters; the latter may be a share of
    the budget.
    """

    score: Callable[[Round], np.ndarray]
    sinks: Callable[[dict[str, str]], str] = lambda parameters: parameters.get("sinks", "0")
    recent: Callable[[dict[str, str]], str] = lambda parameters: "0"
    choose: Callable[[Round, np.ndarray, int, int, np.ndarray | None], Choice] = best

    def protected(self, case: Case, budget: int) -> tuple[int, int]:
        """Numbers of first and of last tokens."""
        recent = tokens_of(self.recent(case.parameters), budget)
        return case.protect(budget) or (int(self.sinks(case.parameters)), recent)


def received(now: Round) -> np.ndarray:
    """The attention of all queries since a token came."""
    return now.reduced(now.received)


def newest(now: Round) -> np.ndarray:
    """The last query's attention."""
    return now.reduced(now.attention(1)[0].sum(axis=1))


def unscored(now: Round) -> np.ndarray:
    """For policies that go by position."""
    return np.zeros(now.positions.shape)


def product_of_shares(now: Round) -> np.ndarray:
    """Keys and values that are long in their block of neighbours."""
    return shares_of_blocks(now.keys(), now.values(), now.case.parameters["use"], now.case.number("block"))


def unlike_the_others(now: Round) -> np.ndarray:
    """Keys that point elsewhere than their mean."""
    return np.array([unlike_the_mean(keys) for keys in now.keys()])


def every_token(parameters: dict[str, str]) -> str:
    """All that the budget has beside the sinks."""
    return "1.0"


def recent_of_caote(parameters: dict[str, str]) -> str:
    return parameters["window"] if parameters["base"] == "window" else "0.5"


def recent_of_vatp(parameters: dict[str, str]) -> str:
    if parameters["recent"] != "auto":
        return parameters["recent"]
    return "0.5" if parameters["base"] == "h2o" else "10"


def recent_of_tova(parameters: dict[str, str]) -> str:
    return "1" if parameters["protect_last"] == "true" else "0"


sinks, recent, window = itemgetter("sinks"), itemgetter("recent"), itemgetter("window")
RULES = {
    "random": Rule(drawn, sinks, window),
    "local": Rule(unscored, recent=every_token),
    "streaming-llm": Rule(unscored, sinks, every_token),
    "strided": Rule(unscored, choose=strides),
    "caote": Rule(change, recent=recent_of_caote),
    "expected-attention": Rule(expected, sinks),
    "h2o": Rule(received, recent=recent),
    "h2o-online": Rule(received, recent=recent),
    "observed-attention": Rule(per_query),
    "scissorhands": Rule(more_than_evenly, recent=recent),
    "snapkv": Rule(pooled_window, recent=window),
    "tova": Rule(newest, recent=recent_of_tova),
    "vatp": Rule(times_value, sinks, recent_of_vatp),
    "cur": Rule(product_of_shares, sinks),
    "keydiff": Rule(unlike_the_others),
    "knorm": Rule(lambda now: -norms(now.keys(), 2)),
    "lagkv": Rule(spread_over_channels, sinks),
    "leverage": Rule(lambda now: leverages(now.case, now.layer, now.positions)),
    "q-filter": Rule(along_queries),
    "value-norm": Rule(lambda now: norms(now.values(), float(now.case.parameters["p"])), sinks, window),
    "chunkkv": Rule(window_by_head, recent=window, choose=chunks),
    "r-kv": Rule(attended_and_unlike, recent=window),
    "vase": Rule(smooth_window, sinks, window, large_values_and_sample),
    "cap-kv": Rule(towards_expected_query, sinks),
    "kvcrush": Rule(window_by_head, recent=window, choose=pages_and_representatives),
    "keyformer": Rule(noisy_attention, recent=recent),
    "lru": Rule(lambda now: by_use(now, by_count=False), recent=recent),
    "lfu": Rule(lambda now: by_use(now, by_count=True), recent=recent),
    "tri-attention": Rule(at_later_positions, recent=recent),
}


# -------------------------------------------------------------------------------------------------------------- rounds

SCHEDULES = ("every", "threshold", "decoding", "generated", "question-blocks")


def spared(case: Case) -> int:
    """Tokens of the question, which come after all blocks and are kept, with schedule=question-blocks."""
    return case.trace.question_tokens if case.parameters["schedule"].startswith("question-blocks") else 0


def rounds(case: Case) -> Iterator[tuple[int, int, int]]:
    """The queries after which tokens are evicted; the budget, of which recent tokens may be a share; what is kept."""
    name, arguments = call_of(case.parameters["schedule"])
    if name == "threshold":
        keep = threshold_sizes(case)[1]
        yield from ((t, keep, keep) for t in compressions(case))
        return
    if name == "generated":
        keep, interval = map(int, arguments)
        ends = range(case.trace.prompt + interval, case.trace.tokens + 1, interval)
        yield from ((end - 1, keep, case.trace.prompt + keep) for end in ends)
        return
    if name == "decoding":
        for end in range(case.trace.prompt, case.trace.tokens + 1, int(arguments[0])):
            seen = end if case.literal.endswith("@seen") else case.trace.prompt
            yield end - 1, *[budget_tokens(case.literal, seen)] * 2
        return
    size, context = int(arguments[0]), case.trace.prompt - spared(case)
    for end in [*range(size, context, size), context]:
        if name == "question-blocks":
            slots = case.budget - spared(case)
            yield end - 1, slots, slots * end // context
        else:
            seen = end if case.literal.endswith("@seen") else case.trace.prompt
            yield end - 1, *[budget_tokens(case.literal, seen)] * 2


def in_rounds(case: Case, name: str) -> Selection:
    """What a policy keeps under a schedule that evicts in rounds."""
    trace, rule = case.trace, RULES[name]
    whole = trace.prompt if case.parameters["schedule"].startswith("generated") else 0  # kept at every eviction
    first, last = rule.protected(case, trace.prompt)
    first = min(first, trace.prompt)
    protected = np.union1d(np.arange(first), np.arange(max(first, trace.prompt - last), trace.prompt))
    seen_by = np.arange(trace.query_heads) * case.row_count // trace.query_heads
    layers, decisions = [], []
    for index, layer in enumerate(trace.treated):
        residents = Residents(case, index)
        layers.append(residents)
        paid = np.zeros((trace.query_heads, trace.tokens))
        since = 0
        for t, budget, keep in rounds(case):
            queries, added = np.arange(since, t + 1), t + 1 - since
            paid += softmax(logits(trace, layer, queries)[0], residents.mask(queries)[seen_by]).sum(axis=1)
            since = t + 1
            positions = np.array([residents.at(row, t) for row in range(case.row_count)])
            first, last = rule.protected(case, budget)
            first = whole or first
            sinks = min(int((positions[0] < first).sum()), keep)
            recent = min(last, keep - sinks)
            if t < trace.prompt:
                ending = np.arange(trace.prompt - (spared(case) or recent), trace.prompt)
                protected = np.union1d(np.arange(min(first, budget)), ending)
            if keep >= positions.shape[1]:
                continue
            by_head = np.take_along_axis(paid, positions[seen_by], axis=1)
            now = Round(case, layer, t + 1, positions, by_head, sinks, recent, added)
            scores = rule.score(now)
            for row in range(case.row_count):
                theirs = residents.theirs(row, t)
                kept, verdict = rule.choose(now, scores, row, keep, theirs)
                decisions.append(found(f"treated layer {index} row {row} query {t}: keep {kept.tolist()}", verdict))
                residents.keep(row, t, kept)
                if verdict == Verdict.WRONG:  # no state to go on from
                    return scheduled(case, layers, decisions, fixed=protected)
    return scheduled(case, layers, decisions, fixed=protected)
