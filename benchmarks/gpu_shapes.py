"""Randomly initialised pairs of the shapes of real ones, where weights cannot be had.

Passes cost what they cost for the real weights; what the models say means nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from engine.eagle3 import Eagle3Config, Eagle3Head
from engine.eagle3_draft import Eagle3Draft
from engine.memory import check_weights_fit
from engine.pair import LoadedTarget
from engine.target import Target
from profiles import TargetRef


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 model and of its EAGLE-3 head, as in their public config.json."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int
    tied: bool
    positions: int = 40960


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "1.7b": Shape(2048, 6144, 28, 16, 8, 128, 151936, 32000, tied=True),
        "4b": Shape(2560, 9728, 36, 32, 8, 128, 151936, 32000, tied=True),
        "8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, 32000, tied=False),
        "tiny": Shape(64, 96, 4, 4, 2, 16, 512, 128, tied=True, positions=2048),
    }
)


def target_config(shape: Shape) -> Qwen3Config:
    """Return the configuration of a target of that shape."""
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape.tied,
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )


def head_config(shape: Shape) -> Eagle3Config:
    """Return the configuration of its head."""
    return Eagle3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        n_layers=1,
        target_hidden_size=shape.hidden,
        n_features=3,
        target_vocab_size=shape.vocabulary,
        draft_vocab_size=shape.draft_vocabulary,
        rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 1e6},
        feature_layers=(min(2, shape.layers // 3), shape.layers // 2, shape.layers - 1),
    )


@torch.no_grad()
def random_pair(
    name: str, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[LoadedTarget, Eagle3Draft]:
    """Return a target and a head of a shape, with weights drawn by a seed.

    Raises:
        SpectuneError: The target does not fit the device.
    """
    shape = SHAPES[name]
    config = target_config(shape)
    with torch.device("meta"):
        outline: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    check_weights_fit(outline, f"a Qwen3 of {name}", dtype, device)
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).to(dtype).eval()
        model.requires_grad_(False)
        embedding = model.get_input_embeddings().weight.detach()
        head = Eagle3Head(head_config(shape), embedding).to(dtype).eval().requires_grad_(False)
        head.target_ids = torch.randperm(shape.vocabulary)[: shape.draft_vocabulary].sort().values
    ref = TargetRef(
        id=f"random Qwen3-{name}",
        dtype=str(dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    return LoadedTarget(Target(model), None, ref, ()), Eagle3Draft(head)
