"""`kvreplay calibrate`: statistics against sums by hand, against the policies' own, and as their readers read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import kvreplay as kv
from kvreplay.calibrate import statistics
from kvreplay.calibrate.command import FORMATS, main
from kvreplay.calibrate.files import WRITERS
from kvreplay.trace import Span, Trace, TraceWriter

D, P, T = 6, 40, 46
QUERY_HEADS, KV_HEADS = 4, 2
FREQUENCIES = np.array([[1.0, 0.3, 0.05], [0.7, 0.2, 0.01]])


def write(path: Path, style: str = "halves", seed: int = 0, spans: Sequence[Span] = (), prompt: int = P) -> Path:
    """Two layers of normal numbers; the attention factor of RoPE is 1.25 in the second."""
    chance = np.random.default_rng(seed)
    with TraceWriter(path) as trace:
        trace.attributes("/", synthetic=1)
        trace.attributes("/model", name="model", architecture="A", n_layers=2, n_query_heads=QUERY_HEADS,
                         n_kv_heads=KV_HEADS, head_dim=D, dtype="float32", softmax_scale=0.4,
                         logit_softcap=0.0)  # fmt: skip
        trace.dataset("/model/sliding_window", np.zeros(2, np.int32))
        trace.dataset("/model/layer_index", np.arange(2, dtype=np.int32))
        trace.attributes("/model/rope", style=style)
        trace.dataset("/model/rope/inv_freq", FREQUENCIES)
        trace.dataset("/model/rope/attention_scaling", np.array([1.0, 1.25]))
        trace.attributes("/tokens", prefill=prompt)
        trace.dataset("/tokens/ids", np.arange(T, dtype=np.int32))
        if spans:
            trace.dataset("/spans", spans)
        for layer in range(2):
            shapes = ((QUERY_HEADS, T, D), (KV_HEADS, T, D), (KV_HEADS, T, D))
            trace.layer(layer, *(chance.normal(0.3, 1, shape).astype(np.float32) for shape in shapes))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    write(folder / "a.h5", spans=[Span("needle", "needle", 7, 12)])
    write(folder / "b.h5", seed=1, prompt=31, spans=[Span("needle", "needle", 3, 5)])
    write(folder / "interleaved.h5", "interleaved")
    return folder


def calibrated(kind: str, output: Path, *traces: Path) -> Path:
    assert main([kind, *map(str, traces), "-o", str(output)]) == 0
    return output


def before_rope(trace: Trace, layer: int, head: int, t: int) -> np.ndarray:
    """complex [3]: the pairs of a query before RoPE, one by one."""
    q = trace.q(layer)[head, t].astype(float)
    interleaved = trace["/model/rope@style"] == "interleaved"
    scaling = (1.0, 1.25)[layer]
    pairs = [complex(q[2 * i], q[2 * i + 1]) if interleaved else complex(q[i], q[i + 3]) for i in range(3)]
    return np.array([pair * np.exp(-1j * t * FREQUENCIES[layer, i]) / scaling for i, pair in enumerate(pairs)])


@pytest.mark.parametrize("names", [["a"], ["interleaved"], ["a", "b"]])
def test_tri_attention(names: list[str], folder: Path, tmp_path: Path) -> None:
    import torch

    paths = [folder / f"{name}.h5" for name in names]
    payload = torch.load(calibrated("tri-attention", tmp_path / "model.pt", *paths), weights_only=True)
    assert payload["metadata"]["rope_style"] == ("interleaved" if names == ["interleaved"] else "half")
    assert payload["metadata"]["head_dim"] == D and len(payload["metadata"]["sampled_heads"]) == 8
    for layer, head in ((0, 0), (1, 3)):
        pairs = [before_rope(one, layer, head, t) for one in map(Trace, paths) for t in range(one.prompt)]
        stats = payload["stats"][f"layer{layer:02d}_head{head:02d}"]
        assert np.allclose(stats["q_mean_real"], np.mean(pairs, 0).real, atol=1e-6)
        assert np.allclose(stats["q_mean_imag"], np.mean(pairs, 0).imag, atol=1e-6)
        assert np.allclose(stats["q_abs_mean"], np.abs(pairs).mean(0), atol=1e-6)


def read_by_triattention(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """complex [L,Hq,r] means and [L,Hq,r] mean moduli, as WeianMao/triattention reads them: the metadata that
    validate_stats_metadata() requires (triattention/common/stats_utils.py at 5bbdcef), then load_head_frequency_stats()
    (triattention/methods/pruning_utils.py at 092e4dc)."""
    import torch

    payload = torch.load(path, map_location="cpu")
    metadata = payload["metadata"]
    required = {"prompt_template", "use_chat_template", "attn_implementation", "dtype", "rope_style", "rope_type"}
    assert required <= set(metadata) and not metadata["use_chat_template"]
    heads = [tuple(one) for one in metadata["sampled_heads"]]
    assert heads == list(np.ndindex(2, QUERY_HEADS))
    stats = [payload["stats"][f"layer{layer:02d}_head{head:02d}"] for layer, head in heads]
    means = [torch.complex(one["q_mean_real"], one["q_mean_imag"]).numpy() for one in stats]
    moduli = [one["q_abs_mean"].numpy() for one in stats]
    return tuple(np.reshape(one, (2, QUERY_HEADS, -1)) for one in (means, moduli))


@pytest.mark.parametrize("name", ["a", "interleaved"])
def test_triattention_keeps_the_same_with_the_file(name: str, folder: Path, tmp_path: Path) -> None:
    """The published score (arXiv:2604.04921) from the statistics of the file, against the policy, which computes them
    from the prompt."""
    trace, kept = Trace(folder / f"{name}.h5"), 12
    means, moduli = read_by_triattention(calibrated("tri-attention", tmp_path / "model.pt", trace.path))
    run = kv.replay(trace, ["tri-attention:recent=0"], kept, progress=False)
    offsets = 2.0 ** np.arange(17)
    for layer, rows in enumerate(run.selection("tri-attention:recent=0", kept).mask()):
        keys = statistics.Rope.of(trace, layer).before(statistics.keys(trace, layer)).repeat(QUERY_HEADS // KV_HEADS, 0)
        pairs = keys[..., ::2] + 1j * keys[..., 1::2] if name == "interleaved" else keys[..., :3] + 1j * keys[..., 3:]
        mean, modulus = means[layer][:, None], moduli[layer][:, None]
        angles = (P - np.arange(P)[:, None] + offsets)[..., None] * FREQUENCIES[layer]
        turned = np.cos(angles + np.angle(mean * pairs.conj())[:, :, None]).mean(2)
        scores = (np.abs(mean) * np.abs(pairs) * turned + (modulus - np.abs(mean)) * np.abs(pairs)).sum(-1)
        standard = (scores - scores.mean(1, keepdims=True)) / scores.std(1, keepdims=True)
        best = standard.reshape(KV_HEADS, -1, P).max(1)
        assert (rows == (best >= np.sort(best, axis=1)[:, [P - kept]])).all()


def test_expected_attention(folder: Path, tmp_path: Path) -> None:
    paths = [folder / "a.h5", folder / "b.h5"]
    stats = calibrated("expected-attention", tmp_path / "stats", *paths)
    tensors = load_file(stats / "model.safetensors")
    assert json.loads((stats / "config.json").read_text())["num_heads"] == QUERY_HEADS
    for layer, head in ((0, 1), (1, 2)):
        pairs = np.array([before_rope(one, layer, head, t) for one in map(Trace, paths) for t in range(4, one.prompt)])
        queries = np.concatenate([pairs.real, pairs.imag], 1)
        assert np.allclose(tensors["query_mean"][layer, head], queries.mean(0), atol=1e-6)
        assert np.allclose(tensors["query_cov"][layer, head], np.cov(queries.T), atol=1e-6)
    mean, covariance = Trace(paths[0]).layer(1).query_moments(4)  # of the policy, divided by n
    found_mean, found_covariance = statistics.query_moments([Trace(paths[0])], 1, 4)
    assert np.allclose(found_mean, mean) and np.allclose(found_covariance * (P - 5) / (P - 4), covariance)


def same_sets(trace: Path, policies: list[str], budget: str = "0.3") -> bool:
    first, second = (kv.replay(trace, [one], budget, progress=False).selection(one, budget) for one in policies)
    return (first.offsets == second.offsets).all() and (first.positions == second.positions).all()


def test_q_filters(folder: Path, tmp_path: Path) -> None:
    trace = Trace(folder / "a.h5")
    filters = calibrated("q-filters", tmp_path / "filters.npy", folder / "a.h5")
    published = load_file(calibrated("q-filters", tmp_path / "published", folder / "a.h5") / "model.safetensors")
    found = np.load(filters)
    assert np.allclose(published["q_filters"], -found)
    queries = trace.q(1)[:2, :P].astype(float)
    firsts = [np.linalg.svd(head)[2][0] for head in queries]
    signed = [first * np.sign(first @ head.mean(0)) for first, head in zip(firsts, queries, strict=True)]
    assert np.allclose(found[1, 0], np.mean(signed, 0))
    assert same_sets(folder / "a.h5", ["q-filter", f"q-filter:filters={filters}"])


def test_q_filters_of_several_traces(folder: Path, tmp_path: Path) -> None:
    paths = [folder / "a.h5", folder / "b.h5"]
    found = np.load(calibrated("q-filters", tmp_path / "filters.npy", *paths))
    heads = [np.concatenate([one.q(0)[h, : one.prompt] for one in map(Trace, paths)]).astype(float) for h in (2, 3)]
    firsts = [np.linalg.svd(head)[2][0] for head in heads]
    assert np.allclose(
        found[0, 1], np.mean([v * np.sign(v @ h.mean(0)) for v, h in zip(firsts, heads, strict=True)], 0)
    )


@pytest.mark.parametrize("name", ["a", "interleaved"])
def test_duo_attention(name: str, folder: Path, tmp_path: Path) -> None:
    trace = folder / f"{name}.h5"
    table = calibrated("duo-attention", tmp_path / "heads.npy", trace)
    scores = np.loadtxt(calibrated("duo-attention", tmp_path / "full_attention_heads.tsv", trace), delimiter="\t")
    assert scores.shape == (2, KV_HEADS) and (scores == np.load(table)).all() and len(set(scores.flat)) == 4
    assert json.loads((tmp_path / "config.json").read_text()) == {"sink_size": 128, "recent_size": 256}
    sizes = "full_heads=0.5,sinks=2,recent=3"
    assert same_sets(trace, [f"duo-attention:{sizes}", f"duo-attention:table={table},{sizes}"])


def attention(trace: Trace, layer: int, head: int, t: int) -> np.ndarray:
    """[t + 1]: softmax by hand."""
    k = trace.k(layer)[head // (QUERY_HEADS // KV_HEADS), : t + 1].astype(float)
    weights = np.exp(0.4 * k @ trace.q(layer)[head, t].astype(float))
    return weights / weights.sum()


def test_head_kv(folder: Path, tmp_path: Path) -> None:
    paths = [folder / "a.h5", folder / "b.h5"]
    found = json.loads(calibrated("head-kv", tmp_path / "heads.json", *paths).read_text())
    assert len(found) == 2 * QUERY_HEADS and all(len(scores) == 2 for scores in found.values())
    for number, (path, begin, end) in enumerate(((paths[0], 7, 12), (paths[1], 3, 5))):
        trace = Trace(path)
        for layer, head in ((0, 1), (1, 3)):
            expected = 0.0
            for t in range(trace.prompt - 1, T - 1):
                weights = attention(trace, layer, head, t)
                expected += sum(weights[j] for j in np.argsort(-weights)[: end - begin] if begin <= j < end)
            expected *= 10 / ((end - begin) * (T - trace.prompt))
            assert found[f"{layer}-{head}"][number] == pytest.approx(expected, abs=1e-6)
    table = calibrated("head-kv", tmp_path / "heads.npy", *paths)
    assert np.load(table)[1, 3] == pytest.approx(np.mean(found["1-3"]))
    kv.replay(paths[0], [f"head-kv:table={table},window=4"], "0.5", progress=False)


def read_by_headkv(path: Path, capacity: int, beta: int) -> np.ndarray:
    """[L,Hq]: tokens of each head beside the observation window, as ReasonSnapKVCluster of FYYFU/HeadKV computes them
    from the file with `temp=1` (headkv/snapkv_utils.py at 3ec9653)."""
    with open(path) as file:
        scores = json.loads(file.readline())
    means = np.array([np.mean(of_head) for of_head in scores.values()])
    pool = (capacity // beta) * len(means)
    return np.rint(means / means.sum() * pool + capacity - capacity // beta).astype(int).reshape(2, QUERY_HEADS)


def test_headkv_gives_heads_the_same_tokens_with_the_file(folder: Path, tmp_path: Path) -> None:
    """HeadKV rounds each head, and head-kv apportions the sum."""
    paths = [folder / "a.h5", folder / "b.h5"]
    theirs = read_by_headkv(calibrated("head-kv", tmp_path / "heads.json", *paths), capacity=10, beta=2)
    table = calibrated("head-kv", tmp_path / "heads.npy", *paths)
    policy = f"head-kv:table={table},window=4,beta=2,heads=query"
    ours = kv.replay(paths[0], [policy], 14, progress=False).selection(policy, 14).mask().sum(-1) - 4
    assert (np.abs(ours - theirs) <= 1).all() and len(set(theirs.flat)) > 3


def test_slopes_of_a_hull() -> None:
    """Points (0, 0), (1, 1), (2, 1), (3, 4), (4, 4.5): the hull runs from 0 to 3 and to 4."""
    curve = np.array([0, 1, 1, 4, 4.5])
    assert np.allclose(statistics.hull_slopes(curve, 0), [4 / 3, 4 / 3, 4 / 3, 0.5])
    assert np.allclose(statistics.hull_slopes(curve, 1), [1.5, 1.5, 0.5])
    assert len(statistics.hull_slopes(curve, 4)) == 0


def test_shares_of_two_heads() -> None:
    """Head 0 gains 5, 1, 1, 0, head 1 gains 3, 2, 0.5, 0. At half, four tokens: 5, 3, 2 and one of 1, 1."""
    curves = np.array([[[0, 5, 6, 7, 7], [0, 3, 5, 5.5, 5.5]]])
    assert statistics.pruned_shares(curves, [0.5], 0).tolist() == [[[0.5, 0.5]]]
    assert statistics.pruned_shares(curves, [0.75], 0).tolist() == [[[0.75, 0.75]]]
    assert statistics.pruned_shares(curves, [0.375], 0).tolist() == [[[0.25, 0.5]]]
    assert statistics.pruned_shares(curves, [0.99], 1).tolist() == [[[0.75, 0.75]]]  # each head keeps one


def test_shares_are_the_best_for_concave_curves() -> None:
    chance = np.random.default_rng(0)
    curves = np.concatenate([np.zeros((1, 3, 1)), -np.sort(-chance.random((1, 3, 6)), -1).cumsum(-1)], -1)
    for kept in range(19):
        share = statistics.pruned_shares(curves, [1 - kept / 18], 0)[0, 0]
        counts = np.rint((1 - share) * 6).astype(int)
        best = max(curves[0, 0, a] + curves[0, 1, b] + curves[0, 2, kept - a - b]
                   for a in range(7) for b in range(7) if 0 <= kept - a - b <= 6)  # fmt: skip
        assert counts.sum() == kept
        assert sum(curves[0, h, n] for h, n in enumerate(counts)) == pytest.approx(best)


def test_lu_kv(folder: Path, tmp_path: Path) -> None:
    shares = np.load(calibrated("lu-kv", tmp_path / "curve.npy", folder / "a.h5", folder / "b.h5"))
    assert shares.shape == (99, 2, KV_HEADS) and (shares >= 0).all() and (shares < 1).all()
    assert (np.diff(shares, axis=0) >= -1e-12).all()  # hulls of equal heads nest
    expected = np.mean([[1 - round((1 - (i + 1) / 100) * 4 * p) / (4 * p) for i in range(80)] for p in (P, 31)], 0)
    assert np.allclose(shares[:80].mean((1, 2)), expected)
    scores = kv.replay(folder / "a.h5", ["expected-attention:epsilon=0.02,heads=kv"], "0.5", save="scores",
                       progress=False)  # fmt: skip
    cell = next(one["cell"] for one in scores.about["cells"] if one["role"] == "asked")
    curve = statistics.utility_curves(Trace(folder / "a.h5"), 1, scores.scores(cell)[1], 4, 1)
    ranked = scores.scores(cell)[1][1]
    order = [*range(4), P - 1, *(j for j in np.argsort(-ranked, kind="stable") if 4 <= j < P - 1)]
    trace = Trace(folder / "a.h5")
    future = np.mean([attention(trace, 1, head, t)[:P] for head in (2, 3) for t in range(P, T)], 0)
    assert np.allclose(curve[1], [0, *future[order].cumsum()], atol=1e-6)


def test_gate(folder: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    paths = [folder / "a.h5", folder / "b.h5"]
    rows = parquet.read_table(calibrated("gate", tmp_path / "gate.parquet", *paths)).to_pandas()
    assert len(rows) == 2 * KV_HEADS * (P + 31)
    trace = Trace(paths[1])
    one = rows[(rows.trace == "b") & (rows.layer == 1) & (rows.kv_head == 1) & (rows.position == 9)].iloc[0]
    past = np.mean([sum(attention(trace, 1, head, t)[9] for t in range(9, 31)) for head in (2, 3)])
    later = np.mean([attention(trace, 1, head, t)[9] for head in (2, 3) for t in range(31, T)])
    assert one.attention == pytest.approx(past, rel=1e-5) and one.future_attention == pytest.approx(later, rel=1e-5)
    assert one.window_attention == pytest.approx(past / 31, rel=1e-5) and one.token == 9
    assert one.key_norm == pytest.approx(np.linalg.norm(trace.k(1)[1, 9].astype(float)))
    assert one.value_norm == pytest.approx(np.linalg.norm(trace.v(1)[1, 9].astype(float)))


def test_each_kind_has_a_writer() -> None:
    assert set(FORMATS) == set(WRITERS)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["tri-attention", "a.h5", "-o", "a.npy"], 2, "--output: unknown format of tri-attention: expected a name "
                                                      "ending in .pt, found a.npy"),
        (["q-filters", "a.h5", "-o", "a.pt"], 2, "--output: unknown format of q-filters: expected a folder or a name "
                                                 "ending in .npy, found a.pt"),
        (["lu-kv", "c.h5", "-o", "c.npy"], 3, "c.h5: cannot be opened: No such file or directory"),
        (["lu-kv", "a.h5", "-o", "a.h5"], 2, "--output: unknown format of lu-kv: expected a name ending in .npy, "
                                             "found a.h5"),
        (["head-kv", "interleaved.h5", "-o", "x.json"], 3, "interleaved.h5:/spans: missing: expected a span named "
                                                           "needle, found none"),
    ],
)  # fmt: skip
def test_refusals(
    words: list[str], code: int, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    assert main(words) == code
    assert capsys.readouterr().err == f"kvreplay: {said}\n"


def test_traces_of_two_models_and_existing_files_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(__file__).parents[2] / "traces" / "smollm2-135m-needle.h5"
    assert main(["q-filters", str(folder / "a.h5"), str(other), "-o", str(tmp_path / "x.npy")]) == 3
    assert "smollm2-135m-needle.h5: layers: expected 2, as in " in capsys.readouterr().err
    (tmp_path / "x.npy").touch()
    assert main(["q-filters", str(folder / "a.h5"), "-o", str(tmp_path / "x.npy")]) == 3
    assert "x.npy: exists: expected another name, or --force to overwrite, found a file" in capsys.readouterr().err
    assert main(["q-filters", str(folder / "a.h5"), "-o", str(tmp_path / "x.npy"), "--force"]) == 0
