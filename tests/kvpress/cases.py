"""kvpress' presses and the policies that keep the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

RATIOS = (0.3, 0.5, 0.7)  # of tokens that are evicted
# A multiple of BlockPress' and NonCausalAttnPress' blocks and, less Compactor's protected tokens, of Compactor's: kvpress
# pads a last block that is short, and lets the padding take part in the softmax.
TOKENS = 780
QUESTION = 64


@dataclass(frozen=True)
class Case:
    """A press at ratio R, and the policy; `{keep}` is 1 - R, `{counts}` what the press keeps in each layer, `{folder}`
    where the tables are."""

    press: str
    policy: str


SNAPKV = "snapkv:preset=kvpress"

CASES = (
    Case("CompactorPress(R)", "compactor:sketch=48"),
    Case("CriticalKVPress(SnapKVPress(R))", f"critical-kv:base=({SNAPKV})"),
    Case("CriticalKVPress(ExpectedAttentionPress(R, use_vnorm=False))", "critical-kv"),
    Case("CriticalKVPress(ObservedAttentionPress(R))", "critical-kv:base=observed-attention"),
    Case("CriticalKVPress(KnormPress(R))", "critical-kv:base=knorm"),
    Case("TOVAPress(R)", "tova:protect_last=true"),
    Case("SnapKVPress(R)", SNAPKV),
    Case("SnapKVPress(R, window_size=32, kernel_size=7)", "snapkv:window=32,kernel=7,pool=avg"),
    Case("KeyDiffPress(R)", "keydiff"),
    Case("ExpectedAttentionPress(R)", "expected-attention"),
    Case("ExpectedAttentionPress(R, use_covariance=False)", "expected-attention:covariance=false"),
    Case("ExpectedAttentionPress(R, use_vnorm=False)", "expected-attention:vnorm=false"),
    Case("ExpectedAttentionPress(R, epsilon=2e-2)", "expected-attention:epsilon=0.02"),
    Case("AdaKVPress(SnapKVPress(R), alpha_safeguard=0)", f"{SNAPKV},allocate=ranked-layer"),
    Case(
        "AdaKVPress(ExpectedAttentionPress(R), alpha_safeguard=0)", "expected-attention:allocate=ranked-layer"
    ),
    Case("AdaKVPress(SnapKVPress(R))", "ada-kv:preset=kvpress"),
    Case("BlockPress(KeyDiffPress(R), block_size=78)", "keydiff:schedule=every(78)"),
    Case("BlockPress(KnormPress(R), block_size=78)", "knorm:schedule=every(78)"),
    Case(
        "ChunkKVPress(SnapKVPress(R))",
        f"{SNAPKV},heads=layer,select=chunks,chunk=20,chunk_score=mean,window_mode=whole",
    ),
    Case(
        "ChunkKVPress(SnapKVPress(R, kernel_size=1))", "chunkkv:window=64,chunk=20,chunk_score=mean,window_mode=whole"
    ),
    Case("ChunkKVPress(KnormPress(R))", "knorm:heads=layer,select=chunks,chunk=20,window_mode=whole"),
    Case("ChunkKVPress(ExpectedAttentionPress(R))", "expected-attention:heads=layer,select=chunks,chunk=20,window_mode=whole"),
    Case("CURPress(R)", "cur"),
    Case("CURPress(R, leverage_type='key')", "cur:use=key"),
    Case("CURPress(R, leverage_type='value')", "cur:use=value"),
    Case("CURPress(R, leverage_type='kv_avg')", "cur:use=avg"),
    Case("DuoAttentionPress(R, on_the_fly_scoring=True)", "duo-attention:full_heads={keep}"),
    Case("DuoAttentionPress(R)", "duo-attention:full_heads={keep},table={folder}/roles.npy"),
    Case("FinchPress(R)", "finch:heads=kv,blocks=1024,question=last,question_tokens=64"),
    Case("KeyRerotationPress(SnapKVPress(R))", f"{SNAPKV},store=cache"),
    Case("KnormPress(R)", "knorm"),
    Case("LagKVPress(R, lag_size=194)", "lagkv:lag=194"),
    Case("LagKVPress(R)", "lagkv"),
    Case("LeverageScorePress(R)", "leverage:sketch=48"),
    Case("NonCausalAttnPress(R, chunk_size=260)", "compactor:mix=0,sinks=0,recent=0,block=260"),
    Case("NonCausalAttnPress(R)", "compactor:mix=0,sinks=0,recent=0"),
    Case("ObservedAttentionPress(R)", "observed-attention"),
    Case("PerLayerCompressionPress(KnormPress(), [R - 0.2, R + 0.2] * 15)", "knorm:allocate=list,shares=({counts})"),
    Case("PyramidKVPress(R)", f"{SNAPKV},allocate=list,shares=({{counts}})"),
    Case("QFilterPress(R)", "q-filter:filters={folder}/filters.npy"),
    Case("SimLayerKVPress(1 - R, n_recent=256)", "simlayerkv:threshold={keep},recent=255"),
    Case("StreamingLLMPress(R)", "streaming-llm"),
)

NOT_COMPARED = {}
