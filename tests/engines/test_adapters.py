"""The adapters of tools/engines against stand-ins that call them as their engines do, in the engines' layouts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from kvreplay.errors import Error
from kvreplay.staging import StagedMetadata, StagingWriter
from kvreplay.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "release" / "kvreplay"
LAYERS, QUERY_HEADS, KV_HEADS, D = 2, 4, 2, 6
PASSES = [(0, 5), (5, 8), (8, 9), (9, 10)]  # the prompt in two chunks, two decoding steps
T, P = 10, 8
CONFIG = {"num_hidden_layers": LAYERS, "num_attention_heads": QUERY_HEADS, "hidden_size": QUERY_HEADS * D,
          "architectures": ["LlamaForCausalLM"], "rope_theta": 1000.0}  # fmt: skip


@pytest.fixture
def tensors() -> list[dict[str, np.ndarray]]:
    """Of each layer q, k and v, [heads, T, d]."""
    chance = np.random.default_rng(0)
    heads = {"q": QUERY_HEADS, "k": KV_HEADS, "v": KV_HEADS}
    return [
        {name: chance.normal(size=(count, T, D)).astype(np.float32) for name, count in heads.items()}
        for _ in range(LAYERS)
    ]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "tools" / "engines")
    return importlib.import_module


def check(folder: Path, tensors: list[dict[str, np.ndarray]], prompt: int) -> None:
    """The joined trace has these tensors and the configuration's attributes."""
    made = folder.with_suffix(".h5")
    subprocess.run([PROGRAM, "convert", folder, "-o", made], check=True, capture_output=True)
    trace = Trace(made)
    assert (trace.prompt, trace.tokens, trace.layers) == (prompt, T, LAYERS)
    for layer, expected in enumerate(tensors):
        for name in ("q", "k", "v"):
            assert (getattr(trace, name)(layer) == expected[name]).all(), (layer, name)
    assert trace["/model@softmax_scale"] == pytest.approx(D**-0.5)
    assert np.allclose(trace["/model/rope/inv_freq"][1], [1, 0.1, 0.01])


def rows(tensors: dict[str, np.ndarray], name: str, begin: int, end: int) -> torch.Tensor:
    """[n, heads, d], as engines that batch tokens have them."""
    return torch.from_numpy(tensors[name][:, begin:end].transpose(1, 0, 2).copy())


class RadixAttention(torch.nn.Module):
    """Attributes and arguments of SGLang's class."""

    tp_q_head_num, tp_k_head_num, tp_v_head_num = QUERY_HEADS, KV_HEADS, KV_HEADS

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id

    def forward(self, q, k, v, forward_batch, save_kv_cache=True):
        return q


@pytest.mark.parametrize("flat", [True, False])
def test_sglang(
    flat: bool, tensors: list[dict[str, np.ndarray]], adapter: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    folder = tmp_path / "staged"
    hook = adapter("sglang_adapter").staging_hook({"folder": str(folder), "layers": LAYERS})
    modules = [RadixAttention(layer) for layer in range(LAYERS)]
    for module in modules:
        module.register_forward_pre_hook(hook, with_kwargs=True)
    for begin, end in PASSES:
        batch = SimpleNamespace(positions=torch.arange(begin, end))
        for module, of_layer in zip(modules, tensors, strict=True):
            q, k, v = (rows(of_layer, name, begin, end) for name in "qkv")
            if flat:
                q, k, v = (one.flatten(1) for one in (q, k, v))
            module(q, k, v, forward_batch=batch)
    metadata = StagedMetadata(folder)
    metadata.attributes("/", producer="sglang")
    metadata.model(CONFIG, "model", "float32")
    metadata.tokens(range(T), P)
    metadata.finish()
    check(folder, tensors, P)
    with pytest.raises(Error, match="positions: expected those of one sequence"):
        modules[0](*(rows(tensors[0], name, 0, 2) for name in "qkv"), SimpleNamespace(positions=torch.tensor([0, 0])))


class UsualImplementation:
    """The interface of an implementation of vLLM's attention."""

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None):
        return output


def test_vllm(tensors: list[dict[str, np.ndarray]], adapter: Callable[[str], ModuleType], tmp_path: Path,
              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    usual = SimpleNamespace(get_class=lambda: type("Usual", (), {"get_impl_cls": lambda: UsualImplementation}))
    registered = {}
    enumeration = SimpleNamespace(CPU_ATTN=usual, FLASH_ATTN=None, CUSTOM="CUSTOM")
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    registry = SimpleNamespace(AttentionBackendEnum=enumeration, register_backend=registered.__setitem__)
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", registry)
    module = adapter("vllm_adapter")
    with StagingWriter(tmp_path / "staged") as staged:
        module.register(staged)
        assert registered == {"CUSTOM": "vllm_adapter.StagingBackend"}
        implementation = module.StagingBackend.get_impl_cls()()
        for begin, end in PASSES:
            metadata = SimpleNamespace(num_actual_tokens=end - begin, seq_lens=torch.tensor([end]))
            for layer, of_layer in enumerate(tensors):
                named = SimpleNamespace(layer_name=f"model.layers.{layer}.self_attn.attn")
                padded = [torch.cat([rows(of_layer, name, begin, end), torch.zeros(3, 1, 1).expand(
                    3, *rows(of_layer, name, 0, 1).shape[1:])]) for name in "qkv"]  # fmt: skip
                assert implementation.forward(named, *padded, None, metadata, output="output") == "output"
                assert implementation.forward(named, *padded, None, None, "output") == "output"  # measures memory
        staged.attributes("/", producer="vllm")
        staged.model(CONFIG, "model", "float32")
        staged.tokens(range(T), P)
    check(tmp_path / "staged", tensors, P)
    two = SimpleNamespace(num_actual_tokens=2, seq_lens=torch.tensor([1, 1]))
    with pytest.raises(Error, match="requests: expected one in a pass"):
        module.record(staged, "model.layers.0.self_attn.attn", None, None, None, two)


def mlx_stand_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules with the names of MLX-LM that the adapter uses, on numpy."""
    stack: list = []

    @contextmanager
    def use_attention_backend(backend):
        stack.append(backend)
        yield
        stack.pop()

    core = ModuleType("mlx.core")
    core.array, core.eval, core.bfloat16, core.uint16 = np.array, lambda _: None, "bfloat16", np.uint16
    core.fast = SimpleNamespace(scaled_dot_product_attention=lambda q, k, v, **_: q)
    base, cache = ModuleType("mlx_lm.models.base"), ModuleType("mlx_lm.models.cache")
    base.use_attention_backend, cache.make_prompt_cache = use_attention_backend, lambda model: model.cache
    for module in (core, base, cache):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("mlx", "mlx_lm", "mlx_lm.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["mlx"].core = core
    return SimpleNamespace(backend=lambda: stack[-1])


def test_mlx_lm(tensors: list[dict[str, np.ndarray]], adapter: Callable[[str], ModuleType], tmp_path: Path,
                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    engine = mlx_stand_in(monkeypatch)
    monkeypatch.delitem(sys.modules, "mlx_lm_adapter", raising=False)
    module = adapter("mlx_lm_adapter")
    monkeypatch.setattr(module, "CHUNK", 4)

    class Model:
        layers = [None] * LAYERS
        cache = SimpleNamespace(offset=0)

        def __call__(self, ids, cache):
            begin, cache.offset = cache.offset, cache.offset + ids.shape[1]
            for of_layer in tensors:
                q, k, v = (of_layer[name][None] for name in "qkv")
                engine.backend().run(q[:, :, begin : cache.offset], keys=k[:, :, : cache.offset],
                                     values=v[:, :, : cache.offset], cache=cache, scale=0.4, mask="causal",
                                     sinks=None)  # fmt: skip
            return np.zeros(1, np.float32)

    module.stage(Model(), CONFIG, "model", range(T), tmp_path / "staged")
    check(tmp_path / "staged", tensors, T)
    with pytest.raises(Error, match="a cache that keeps all tokens"), StagingWriter(tmp_path / "other") as staged:
        q, k, v = (tensors[0][name][None] for name in "qkv")
        rotated = SimpleNamespace(offset=T + 3)
        module.StagingBackend(staged, LAYERS).run(q, keys=k, values=v, cache=rotated, scale=1, mask=None, sinks=None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "llama3"}}, "m: rope_type: expected default, found llama3"),
        ({"layer_types": ["sliding_attention"]}, "m: layers: expected full attention, found sliding_attention"),
        ({"sliding_window": 512}, "m: layers: expected full attention, found a sliding window"),
        ({"attn_logit_softcapping": 50.0}, "m: attn_logit_softcapping: expected none, found 50.0"),
    ],
)
def test_configurations_that_need_more_are_refused(change: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(Error) as refused:
        StagedMetadata(tmp_path).model(CONFIG | change, "m", "float32")
    assert str(refused.value) == said
