"""kvpress' presses, and the policies that keep the same tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "build" / "model" / "smollm2-135m-instruct.gguf"
LEAST_OVERLAP = 0.999  # mean over layers and KV heads of |A n B| / max(|A|, |B|)
RATIOS = (0.3, 0.5, 0.7)  # kvpress' compression ratio: the share of tokens that is evicted
# A multiple of the blocks of BlockPress and NonCausalAttnPress, and beside its 12 protected tokens of CompactorPress':
# kvpress pads a short last block, and the padding takes part in its softmax.
TOKENS = 780
QUESTION = 64  # last tokens, FinchPress' window
SKETCH = 48  # of CompactorPress and LeverageScorePress


@dataclass(frozen=True)
class Case:
    """A press at the ratio R, and its policy: `{ratio}` is R, `{keep}` is 1 - R, `{counts}` the press's tokens in each
    layer, `{folder}` the folder of the tables. `passes`: the kind of passes that the press runs over the prompt."""

    press: str
    policy: str
    passes: str = ""

    @property
    def trace(self) -> str:
        """Name of the trace with these passes."""
        return f"{self.passes or 'trace'}.h5"


SNAPKV = "snapkv:preset=kvpress"
CHUNKS = "select=chunks,chunk=20,window_mode=whole"

CASES = (
    Case("CapPress(R)", "cap-kv"),
    Case("DMSPress(KeyDiffPress(), threshold=-R)", "dms:base=(keydiff),threshold=-{ratio}"),
    Case("CapPress(R, tau=2.0, n_sink=8, n_future_positions=64)", "cap-kv:tau=2,sinks=8,future=64"),
    Case("CompactorPress(R)", "compactor:preset=kvpress"),
    Case("CriticalKVPress(SnapKVPress(R))", f"critical-kv:base=({SNAPKV})"),
    Case("CriticalKVPress(ExpectedAttentionPress(R, use_vnorm=False))", "critical-kv"),
    Case("CriticalKVPress(ObservedAttentionPress(R))", "critical-kv:base=observed-attention"),
    Case("CriticalKVPress(KnormPress(R))", "critical-kv:base=knorm"),
    Case("TOVAPress(R)", "tova:preset=kvpress"),
    Case("SnapKVPress(R)", SNAPKV),
    Case("SnapKVPress(R, window_size=32, kernel_size=7)", "snapkv:window=32,kernel=7,pool=avg"),
    Case("KeyDiffPress(R)", "keydiff"),
    Case("ExpectedAttentionPress(R)", "expected-attention"),
    Case("ExpectedAttentionPress(R, use_covariance=False)", "expected-attention:covariance=false"),
    Case("ExpectedAttentionPress(R, use_vnorm=False)", "expected-attention:vnorm=false"),
    Case("ExpectedAttentionPress(R, epsilon=2e-2)", "expected-attention:epsilon=0.02"),
    Case("AdaKVPress(SnapKVPress(R), alpha_safeguard=0)", f"{SNAPKV},allocate=ranked-layer"),
    Case("AdaKVPress(ExpectedAttentionPress(R), alpha_safeguard=0)", "expected-attention:allocate=ranked-layer"),
    Case("BlockPress(KeyDiffPress(R), block_size=78)", "keydiff:schedule=every(78)"),
    Case("ChunkKVPress(SnapKVPress(R))", f"{SNAPKV},heads=layer,{CHUNKS}"),
    Case("ChunkKVPress(SnapKVPress(R, kernel_size=1))", "chunkkv:preset=kvpress"),
    Case("ChunkKVPress(ExpectedAttentionPress(R, n_sink=20))", f"expected-attention:sinks=20,heads=layer,{CHUNKS}"),
    Case("ChunkKVPress(KnormPress(R))", f"knorm:heads=layer,{CHUNKS}"),
    Case("CURPress(R)", "cur"),
    Case("CURPress(R, leverage_type='key')", "cur:use=key"),
    Case("CURPress(R, leverage_type='value')", "cur:use=value"),
    Case("CURPress(R, leverage_type='kv_avg')", "cur:use=avg"),
    Case("DuoAttentionPress(R, on_the_fly_scoring=True)", "duo-attention:full_heads={keep}"),
    Case("DuoAttentionPress(R)", "duo-attention:full_heads={keep},table={folder}/roles.npy"),
    # The statistics are those of the prompt, so the policy computes the same without a file.
    Case("ExpectedAttentionStatsPress(R, stats_folder=statistics)", "expected-attention"),
    Case("FinchPress(R)", f"finch:preset=kvpress,question=last,question_tokens={QUESTION}"),
    Case("KeyRerotationPress(SnapKVPress(R))", f"{SNAPKV},store=cache"),
    Case("KnormPress(R)", "knorm"),
    # At these ratios every partition keeps as many: kvpress' equal ranks of partitions have no order.
    Case("LagKVPress(R, lag_size=194)", "lagkv:lag=194"),
    Case("LeverageScorePress(R)", "leverage:preset=kvpress"),
    Case("MergingPress(SnapKVPress(R))", f"{SNAPKV},store=merged-similar"),
    Case("MergingPress(SnapKVPress(R), merge_fraction=0.75)", f"{SNAPKV},store=merged-similar,merge_fraction=0.75"),
    Case("NonCausalAttnPress(R, chunk_size=260)", "compactor:mix=0,sinks=0,recent=0,block=260"),
    Case("ObservedAttentionPress(R)", "observed-attention"),
    Case("PerLayerCompressionPress(KnormPress(), [R - 0.2, R + 0.2] * 15)", "knorm:allocate=list,shares=({counts})"),
    Case("PyramidKVPress(R)", f"{SNAPKV},allocate=list,shares=({{counts}})"),
    Case("QFilterPress(R)", "q-filter:filters={folder}/filters.npy"),
    Case("StreamingLLMPress(R)", "streaming-llm"),
    Case("KVzipPress(R)", "kvzip", "chunks"),
    Case("KVComposePress(compression_ratio=R)", "kvcompose", "whole"),
)

# On tiny models, as each press runs two further passes.
PASS_CASES = (
    *(case for case in CASES if case.passes),
    Case("KVzipPress(R, n_sink=8)", "kvzip:sinks=8", "chunks"),
    Case("KVzipPress(R, layerwise=True)", "kvzip:allocate=ranked-layer", "chunks"),
    Case("KVComposePress(compression_ratio=R, agg_group='max')", "kvcompose:agg=max", "whole"),
    Case("KVComposePress(compression_ratio=R, structured=False)", "kvcompose:allocate=ranked-global", "whole"),
)
PASS_KINDS = sorted({case.passes for case in PASS_CASES})
PASS_CHUNK = 40  # tokens of a chunk of the tiny models

# Whose continuation a model also reads under kvpress, as `kvreplay live` reads it.
LIVE_PRESSES = (
    "SnapKVPress(R)", "KnormPress(R)", "TOVAPress(R)", "ObservedAttentionPress(R)", "ChunkKVPress(SnapKVPress(R))"
)  # fmt: skip
LIVE_CASES = tuple(case for case in CASES if case.press in LIVE_PRESSES)

# In which ReplayPress stands for the policy: merged values, and other counts in each head.
PRESS_CASES = (*LIVE_CASES, *(case for case in CASES if case.press.startswith(("MergingPress", "AdaKVPress(SnapKV"))))
PRESS_RATIOS = (0.3, 0.7)
PRESS_TOKENS = 400  # at these ratios whole chunks

# Keeps all tokens; the removed channels of the keys are compared.
THINK = Case("ThinKPress(R)", "think:preset=kvpress,ratio={ratio}")

# Reads the number of tokens of each head from a file; the policy has its scores.
LUKV = Case("LUKVPress(compression_ratio=R)", "expected-attention:epsilon=0.02,heads=kv")
LUKV_PROTECTED = (4, 1)  # sinks and last tokens

WHILE_DECODING = "evicts during decoding, so its later keys are not those of the full cache"

NOT_COMPARED = {
    "BasePress": "abstract",
    "CAMPress": WHILE_DECODING,
    "ChunkPress": "no policy has a budget for each chunk of the prompt",
    "ComposedPress": "no policy evicts twice",
    "CompressionRatioDecodingPress": WHILE_DECODING,
    "CriticalAdaKVPress": "allocates a layer's budget by the scores of its inner press; critical-kv with "
    "allocate=ranked-layer uses its own scores",
    "DecodingPress": WHILE_DECODING,
    "EntropyGatedChunkKVPress": "no policy implements its rule",
    "FastKVzipPress": "scores by a trained network",
    "KVgradPress": "scores by gradients of a further pass",
    "KVzapPress": "scores by a trained network",
    "PrefillDecodingPress": "runs one press on the prompt and another during decoding",
    "RandomPress": "draws random numbers of PyTorch",
    "RestoreKVPress": "adds tokens with a trained adapter",
    "ScorerPress": "abstract",
    "SimLayerKVPress": "detects lazy layers without the attention of the newest token to itself, and keeps one recent "
    "token fewer; simlayerkv includes it, as the authors' code does",
}


def presses_of(case: Case) -> set[str]:
    """Presses of a case."""
    return set(re.findall(r"\w+Press\b", case.press))
