"""The lean forward: the same numbers as transformers' forward, or a refusal."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from engine.cache import KVCache
from engine.lean import LeanForward
from engine.packed import PackedLinear
from tiny import CONFIGS, VOCAB, tiny_model

WINDOW = 8
SIZES: dict[str, Any] = {
    "hidden_size": 60,
    "head_dim": 14,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def qwen2(dtype: torch.dtype) -> PreTrainedModel:
    """Return a random Qwen2, whose projections of queries, keys and values have a bias."""
    common = CONFIGS["llama"]()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=common.max_position_embeddings,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.12 * torch.randn(parameter.shape))
    return model.to(dtype).eval()


MODELS: dict[str, Any] = {
    "llama": lambda dtype: tiny_model("llama", dtype=dtype),
    "llama, odd heads, untied": lambda dtype: tiny_model(
        "llama", dtype=dtype, tie_word_embeddings=False, **SIZES
    ),
    "llama3 rope": lambda dtype: tiny_model("llama", dtype=dtype, rope_parameters=dict(LLAMA3)),
    "yarn rope": lambda dtype: tiny_model("llama", dtype=dtype, rope_parameters=dict(YARN)),
    "qwen2": qwen2,
    "qwen3": lambda dtype: tiny_model("qwen3", dtype=dtype),
    "mistral": lambda dtype: tiny_model("mistral", dtype=dtype),
}


def built(model: PreTrainedModel) -> LeanForward:
    lean = LeanForward.build(model)
    assert lean is not None
    return lean


def tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def full_mask(
    cache: KVCache, positions: Tensor, tree: Tensor | None, window: int | None
) -> Tensor:
    """Return who attends to whom, bool [n, cached + n], the sliding window included."""
    start, n = cache.length, len(positions)
    mask = torch.ones(n, start + n, dtype=torch.bool).tril(start)
    if tree is not None:
        mask[:, start:] = tree
    if window is not None:
        every = torch.cat((cache.positions[:start], positions))
        mask &= positions[:, None] - every < window
    return mask


@torch.inference_mode()
def reference(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: KVCache, mask: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return transformers' logits and hidden states for the same pass."""
    cache.note_positions(positions)
    output = model(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=mask[None, None],
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=True,
    )
    return output.logits[0], [states[0] for states in output.hidden_states]


TREE = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]],
    dtype=torch.bool,
)
TREE_DEPTHS = torch.tensor([0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("name", MODELS)
def test_passes_equal_those_of_transformers(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Prefill, single tokens, trees and rollbacks: logits, features and cache are the same."""
    model = MODELS[name](dtype)
    window = WINDOW if name == "mistral" else None
    expected_cache, cache = KVCache(4, 8), KVCache(4, 8)
    steps: list[tuple[Tensor, Tensor, Tensor | None]] = [
        (tokens(6), torch.arange(6), None),
        (tokens(1, 1), torch.tensor([6]), None),
        (tokens(5, 2), 7 + TREE_DEPTHS, TREE),
        (tokens(5, 3), 10 + TREE_DEPTHS, TREE),
        (tokens(1, 4), torch.tensor([9]), None),
        (tokens(2, 5), torch.tensor([10, 11]), None),
    ]
    expected: list[tuple[Tensor, list[Tensor]]] = []
    actual: list[tuple[Tensor, Tensor | None]] = []

    @torch.inference_mode()
    def commit(cache: KVCache, step: int) -> None:
        if step == 2:  # accept a path that is not contiguous
            cache.keep_path(7, [0, 2, 4])
        if step == 3:  # accept nothing and give up a token committed before
            cache.truncate(9)

    masks = []
    for step, (ids, positions, tree) in enumerate(steps):
        masks.append(full_mask(expected_cache, positions, tree, window))
        expected.append(reference(model, ids, positions, expected_cache, masks[-1]))
        commit(expected_cache, step)
    lean = built(MODELS[name](dtype))
    for step, (ids, positions, tree) in enumerate(steps):
        # Without a tree or a window the mask may be left out: causal order is understood.
        mask = masks[step] if tree is not None or window is not None else None
        cache.note_positions(positions)
        actual.append(lean(ids, positions, cache, mask, last_only=False, feature_layers=(2, 0)))
        commit(cache, step)
    for (logits, hidden), (lean_logits, features) in zip(expected, actual, strict=True):
        assert features is not None
        torch.testing.assert_close(lean_logits, logits, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            features, torch.cat((hidden[2], hidden[0]), dim=-1), rtol=tolerance, atol=tolerance
        )
    for layer, expected_layer in zip(cache.layers, expected_cache.layers, strict=True):
        torch.testing.assert_close(
            layer.keys[:, :, : layer.length],
            expected_layer.keys[:, :, : expected_layer.length],
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_low_precision_is_as_close_to_the_exact_logits(name: str, dtype: torch.dtype) -> None:
    """In two bytes a number, its rounding errors are not above those of transformers' pass."""
    exact = MODELS[name](dtype).to(torch.float64)
    model = MODELS[name](dtype)
    ids, positions = tokens(12), torch.arange(12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    truth, _ = reference(exact, ids, positions, KVCache(4, 16), mask)
    lean = built(model)
    theirs, _ = reference(model, ids, positions, KVCache(4, 16), mask)
    ours, _ = lean(ids, positions, KVCache(4, 16), None, last_only=False, feature_layers=())
    error, their_error = (ours - truth).norm(), (theirs - truth).norm()
    assert 0 < error < 1.25 * their_error


def test_only_the_last_logits_when_asked() -> None:
    """`last_only` gives the last row of the logits and leaves the cache the same."""
    lean = built(tiny_model())
    ids, positions = tokens(7), torch.arange(7)
    every, features = lean(ids, positions, KVCache(4, 8), None, last_only=False, feature_layers=())
    cache = KVCache(4, 8)
    last, _ = lean(ids, positions, cache, None, last_only=True, feature_layers=())
    assert features is None
    assert cache.length == 7
    torch.testing.assert_close(last, every[-1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_model_itself_still_runs_after_build(dtype: torch.dtype) -> None:
    """Its own forward gives the same logits as before, bit for bit."""
    model = tiny_model("qwen3", dtype=dtype)
    ids = tokens(9)[None]
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        built(model)
        after = model(input_ids=ids).logits
    assert torch.equal(before, after)


def test_fused_weights_are_held_once() -> None:
    """Where nothing is packed the modules' weights are parts of the fused weight."""
    q, k = nn.Linear(8, 4, bias=False).double(), nn.Linear(8, 6, bias=False).double()
    fused = PackedLinear(q, k)
    with torch.no_grad():
        k.weight.zero_()
    y = fused(torch.ones(3, 8, dtype=torch.float64))
    assert torch.equal(y[:, 4:], torch.zeros(3, 6, dtype=torch.float64))
    assert q.weight.untyped_storage().data_ptr() == k.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_packed_linear_is_the_linears(n: int, dtype: torch.dtype) -> None:
    """Outputs lie side by side; `add_to` adds them to a residual it leaves alone."""
    torch.manual_seed(0)
    linears = [nn.Linear(24, size).to(dtype) for size in (8, 5)]
    x, residual = torch.randn(n, 24).to(dtype), torch.randn(n, 13).to(dtype)
    with torch.no_grad():
        expected = torch.cat([linear(x) for linear in linears], dim=-1)
        kept = residual.clone()
        fused = PackedLinear(*linears)
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(fused(x), expected, rtol=tolerance, atol=tolerance)
        total = fused.add_to(residual, x)
    torch.testing.assert_close(total, residual + expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(residual, kept)


def hooked() -> PreTrainedModel:
    model = tiny_model()
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output)
    return model


def replaced() -> PreTrainedModel:
    class OtherLinear(nn.Linear):
        pass

    model = tiny_model()
    model.model.layers[2].mlp.up_proj = OtherLinear(64, 96, bias=False).double()
    return model


def scaled() -> PreTrainedModel:
    """Return a model that looks regular but computes something else."""
    model = tiny_model()
    model.model.layers[0].self_attn.scaling = 1.0
    return model


REFUSED: dict[str, Any] = {
    "another architecture": lambda: tiny_model("neox"),
    "soft-capped scores": lambda: tiny_model("gemma2"),
    "rope that changes with length": lambda: tiny_model(rope_parameters=dict(DYNAMIC)),
    "rope of two lengths": lambda: tiny_model(rope_parameters=dict(LONGROPE)),
    "bias in the feed-forward part": lambda: tiny_model(mlp_bias=True),
    "two kinds of attention": lambda: tiny_model(
        "qwen3",
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
    ),
    "another activation": lambda: tiny_model(hidden_act="gelu"),
    "a hook": hooked,
    "another linear layer": replaced,
    "another scale of the scores": scaled,
    "training": lambda: tiny_model().train(),
    "mixed dtypes": lambda: _with_float32_head(),
}


def _with_float32_head() -> PreTrainedModel:
    model = tiny_model(tie_word_embeddings=False)
    model.lm_head.float()
    return model


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_fit_is_refused(reason: str) -> None:
    """Anything but the plain shape gives None."""
    assert LeanForward.build(REFUSED[reason]()) is None


def test_a_refused_config_differs_only_in_what_is_refused() -> None:
    """The plain tiny model is accepted, so the refusals above have the reason they name."""
    assert isinstance(tiny_model().config, LlamaConfig)
    assert LeanForward.build(tiny_model()) is not None
    assert LeanForward.build(tiny_model("qwen3")) is not None
