"""config.json of an EAGLE-3 head: from every public spelling to `Eagle3Config`, and back.

Sizes are read from the tensors where the file is silent or known to be wrong; the file adds
what shapes cannot say. Knows no weights beyond their names and shapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from profiles import validated
from profiles.errors import SpectuneError

from .eagle3 import Eagle3Config

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

Size = Annotated[int, Field(ge=1, le=2**20)]
Layers = list[Annotated[int, Field(ge=-(2**20), le=2**20)]]


class _Stated(BaseModel):
    """What a config.json may say; what is left out may be said by the tensors."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _LayerConfig(_Stated):
    """The decoder layers, in the words of transformers."""

    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] = 1
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Annotated[float, Field(ge=1, le=1e15)] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    max_position_embeddings: Annotated[int, Field(ge=1)] | None = None
    layer_types: list[str] | None = None
    sliding_window: Annotated[int, Field(ge=1)] | None = None


class _Conventions(_Stated):
    """Where and how the features of the target enter; None is unsaid."""

    fc_norm: bool | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    norm_output: bool | None = None
    eagle_aux_hidden_state_layer_ids: Layers | None = None


class _HeadConfig(_Conventions):
    """The head around its layers."""

    draft_vocab_size: Size | None = None
    aux_hidden_states_layer_ids: Layers | None = None
    target_layer_ids: Layers | None = None
    eagle_config: _Conventions | None = None
    transformer_layer_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class TargetFacts:
    """What a head must know of its target.

    Attributes:
        embed_tokens: Embedding weight [target vocabulary, Ht]; the head takes its dtype and
            device, and shares it where the checkpoint stores none of its own.
        hidden_size: Width Ht of the hidden states.
        n_layers: Decoder layers.
    """

    embed_tokens: Tensor
    hidden_size: int
    n_layers: int


def build_config(
    path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetFacts
) -> Eagle3Config:
    """Read the sizes from the tensors and the variants from names and config.json.

    Raises:
        SpectuneError: The head needs something that is not implemented, or another target.
    """
    nested = "speculators_model_type" in raw
    source = f"{path}/config.json"
    stated = validated(_HeadConfig, dict(raw), source)
    inner = stated.transformer_layer_config or {} if nested else dict(raw)
    layer = validated(_LayerConfig, inner, source)
    if layer.hidden_act != "silu":
        raise SpectuneError(
            f"{path} uses hidden_act {layer.hidden_act!r}, only 'silu' is supported."
        )
    n_heads = layer.num_attention_heads
    n_kv_heads = layer.num_key_value_heads or n_heads
    head_dim = layer.head_dim or max(1, layer.hidden_size // n_heads)
    n_features = _n_features(path, tensors, target)
    lm_head = tensors.get("lm_head.weight")
    fc_norm = bool(_convention(stated, "fc_norm")) or "fc_norm.0.weight" in tensors
    return Eagle3Config(
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=_head_dim(tensors, n_heads, n_kv_heads) or head_dim,
        n_layers=_n_layers(path, layer, tensors),
        target_hidden_size=target.hidden_size,
        n_features=n_features,
        target_vocab_size=target.embed_tokens.shape[0],
        draft_vocab_size=stated.draft_vocab_size or _n_rows(lm_head),
        rms_norm_eps=layer.rms_norm_eps,
        rope=_rope(path, layer),
        feature_layers=_feature_layers(path, stated, n_features, target.n_layers),
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="layers.0.self_attn.o_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        # Speculators heads older than the key were all trained with it.
        norm_before_residual=_convention(stated, "norm_before_residual", nested),
        norm_before_fc=(_convention(stated, "norm_before_fc") or "input_norm.weight" in tensors),
        fc_norm=fc_norm,
        # Until its PR 879 SpecForge meant by true only that a norm stands before lm_head.
        norm_output=_convention(stated, "norm_output") and (nested or fc_norm),
        sliding_window=_sliding_window(path, layer),
        max_positions=layer.max_position_embeddings,
    )


def _convention(stated: _HeadConfig, name: str, default: bool = False) -> bool:
    """Return a convention: said of the head, else in its `eagle_config`, else the default."""
    for part in (stated, stated.eagle_config):
        value = getattr(part, name, None)
        if value is not None:
            return bool(value)
    return default


def _n_rows(tensor: Tensor | None) -> int:
    return 0 if tensor is None or not tensor.dim() else len(tensor)


def _head_dim(tensors: Mapping[str, Tensor], n_heads: int, n_kv_heads: int) -> int | None:
    """Read the head size from the projections: config.json is often silent or wrong about it."""
    query = tensors.get("layers.0.self_attn.q_proj.weight")
    key = tensors.get("layers.0.self_attn.k_proj.weight")
    if _n_rows(query) * n_kv_heads != _n_rows(key) * n_heads:
        return None
    return _n_rows(query) // n_heads or None


def _n_features(path: Path, tensors: Mapping[str, Tensor], target: TargetFacts) -> int:
    fc = tensors.get("fc.weight")
    width = 3 * target.hidden_size if fc is None else fc.shape[-1] if fc.dim() == 2 else 0
    if not width or width % target.hidden_size:
        raise SpectuneError(
            f"The head in {path} reads features of width {width}, no multiple of the target's "
            f"hidden size {target.hidden_size}; use it with the target it was trained for."
        )
    return width // target.hidden_size


def _n_layers(path: Path, layer: _LayerConfig, tensors: Mapping[str, Tensor]) -> int:
    indices = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if strange := sorted(i for i in indices if not (i.isdecimal() and len(i) < 4)):
        raise SpectuneError(
            f"The layers of a head are numbered, but {path} has layers.{strange[0]}; download the "
            "checkpoint again."
        )
    return max(layer.num_hidden_layers, *(int(i) + 1 for i in indices), 1)


def _rope(path: Path, layer: _LayerConfig) -> dict[str, Any]:
    """Read rotary parameters in the present and the older spelling of `transformers`."""
    rope = dict(layer.rope_parameters or layer.rope_scaling or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    # SafeAILab's heads state no base and were trained with 10,000.
    rope.setdefault("rope_theta", layer.rope_theta or 10_000.0)
    if layer.partial_rotary_factor is not None:
        rope.setdefault("partial_rotary_factor", layer.partial_rotary_factor)
    if rope["rope_type"] not in ROPE_TYPES:
        raise SpectuneError(
            f"The head in {path} uses rope type {rope['rope_type']!r}; supported are "
            f"{', '.join(ROPE_TYPES)}."
        )
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", layer.max_position_embeddings)
    return rope


def _feature_layers(
    path: Path, stated: _HeadConfig, n_features: int, n_layers: int
) -> tuple[int, ...]:
    """Return the fused layers as indices into the target's `hidden_states`.

    Flat configs name the layer whose output is taken, speculators the index itself.
    """
    inner = stated.eagle_config
    outputs = (
        (inner and inner.eagle_aux_hidden_state_layer_ids)
        or stated.aux_hidden_states_layer_ids
        or stated.target_layer_ids
    )
    indices = stated.eagle_aux_hidden_state_layer_ids
    if outputs:
        indices = [i + 1 for i in outputs]
    elif not indices and n_features == 3:
        indices = _usual_layers(path, n_layers)
    if not indices or len(indices) != n_features or not all(0 <= i < n_layers for i in indices):
        raise SpectuneError(
            f"The head in {path} reads {n_features} layers of a target with {n_layers}, but its "
            f"config.json names {indices}; use it with the target it was trained for."
        )
    return tuple(indices)


def _usual_layers(path: Path, n_layers: int) -> list[int]:
    """Return the layers every project falls back on: low, middle and high."""
    indices = [2, n_layers // 2, n_layers - 3]
    if not 2 < indices[1] < indices[2]:
        raise SpectuneError(
            f"The head in {path} names no layers in its config.json, and a target of {n_layers} "
            f"layers is too shallow for the usual {indices}; name those it was trained with in "
            "eagle_aux_hidden_state_layer_ids."
        )
    return indices


def _sliding_window(path: Path, layer: _LayerConfig) -> int | None:
    kinds = set(layer.layer_types or ["full_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds == {"sliding_attention"} and layer.sliding_window is not None:
        return layer.sliding_window
    raise SpectuneError(
        f"The head in {path} mixes {sorted(kinds)}; supported is one attention kind per head."
    )


def flat_config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """Return the config.json of a flat checkpoint; `dtype` names the type of its weights.

    What is not known is left out: some readers refuse a null.
    """
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    rope = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    entries = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.n_layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "layer_types": [kind] * config.n_layers,
        "sliding_window": config.sliding_window,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "vocab_size": config.target_vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.feature_layers],
        },
    }
    return {name: value for name, value in entries.items() if value is not None}
