"""The EAGLE-3 head itself: its size, its rotary embedding, its masks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.eagle3 import Eagle3Config, Eagle3Head, attend, rotary_frequencies, rotate


def make_config(**more: Any) -> Eagle3Config:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "n_layers": 1,
        "target_hidden_size": 16,
        "n_features": 3,
        "target_vocab_size": 50,
        "draft_vocab_size": 20,
        "rms_norm_eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": 10_000.0},
        "feature_layers": (2, 4, 5),
    }
    return Eagle3Config(**sizes | more)


@pytest.mark.parametrize(
    ("hidden", "inner", "n_heads", "n_parameters"),
    [
        (2048, 6144, 16, 136_847_360),  # Qwen3-1.7B
        (2560, 9728, 32, 218_245_120),  # Qwen3-4B
        (4096, 14336, 32, 424_689_664),  # Llama-3.1-8B
    ],
)
def test_public_heads_have_their_published_size(
    hidden: int, inner: int, n_heads: int, n_parameters: int
) -> None:
    """The architecture has exactly the weights of the released heads."""
    config = make_config(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=inner,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        draft_vocab_size=32_000,
    )
    with torch.device("meta"):
        head = Eagle3Head(config, torch.empty(150_000, hidden))
    assert head.n_parameters == n_parameters


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 15e4,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_angles_are_those_of_transformers(rope: dict[str, Any]) -> None:
    """Each supported type rotates as the library's own Llama does."""
    config = make_config(rope=rope)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=16, num_attention_heads=4, head_dim=8, rope_parameters=rope)
    )
    positions = torch.tensor([[0, 1, 700, 5000]])
    cos, sin = theirs(torch.zeros(1), positions)
    inv_freq, scale = rotary_frequencies(config)
    angles = positions[..., None] * inv_freq
    torch.testing.assert_close(torch.cat([angles, angles], -1).cos() * scale, cos)
    torch.testing.assert_close(torch.cat([angles, angles], -1).sin() * scale, sin)


def test_partial_rotary_leaves_the_tail_alone() -> None:
    """Only the first rotated dimensions turn, by angles of their own width."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    inv_freq, _ = rotary_frequencies(make_config(rope=rope))
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.01]))
    heads = torch.randn(1, 1, 1, 8)
    angles = 3 * inv_freq
    turned = rotate(heads, angles.cos(), angles.sin())
    assert torch.equal(turned[..., 4:], heads[..., 4:])
    for i in range(2):
        pair = torch.complex(heads[..., i], heads[..., i + 2]) * torch.exp(1j * angles[i])
        torch.testing.assert_close(turned[..., i], pair.real)
        torch.testing.assert_close(turned[..., i + 2], pair.imag)


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("n", "n_keys"), [(1, 1), (1, 6), (6, 6), (4, 6)])
def test_no_mask_is_causal_within_the_window(n: int, n_keys: int, window: int | None) -> None:
    """The last n keys belong to the queries; each sees itself and `window - 1` before it."""
    torch.manual_seed(0)
    queries = torch.randn(1, 4, n, 8)
    keys, values = torch.randn(1, 2, n_keys, 8), torch.randn(1, 2, n_keys, 8)
    out = attend(queries, keys, values, None, window)
    for i in range(n):
        here = n_keys - n + i
        seen = [j for j in range(here + 1) if window is None or here - j < window]
        for h in range(4):
            scores = queries[0, h, i] @ keys[0, h // 2, seen].T / 8**0.5
            wanted = torch.softmax(scores, 0) @ values[0, h // 2, seen]
            torch.testing.assert_close(out[0, h, i], wanted)


def test_a_bf16_head_still_knows_far_positions() -> None:
    """Casting the head must not round the rotary angles: bf16 has no 5001 beside 5000."""
    head = Eagle3Head(make_config(), torch.randn(50, 16)).to(torch.bfloat16)
    cos, _ = head.rotary(torch.tensor([[5000, 5001]]), torch.float32)
    torch.testing.assert_close(cos[0, :, 0, 0], torch.tensor([5000.0, 5001.0]).cos())


def test_draft_ids_are_target_ids_without_a_map() -> None:
    """A head over the whole vocabulary needs no translation."""
    head = Eagle3Head(make_config(draft_vocab_size=50), None)
    ids: Tensor = torch.tensor([[3, 49]])
    assert torch.equal(head.to_target(ids), ids)
