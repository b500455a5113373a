"""config.json of an EAGLE-3 head: from every public spelling to `Eagle3Config`, and back.

Sizes are read from the tensors where the file is silent or known to be wrong; the file adds
what shapes cannot say. Knows no weights beyond their names and shapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from profiles.errors import SpectuneError

from .eagle3 import Eagle3Config

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


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
    layer_config = (raw.get("transformer_layer_config") or {}) if nested else raw
    flags = {**(raw.get("eagle_config") or {}), **raw}
    if layer_config.get("hidden_act", "silu") != "silu":
        raise SpectuneError(
            f"{path} uses hidden_act {layer_config['hidden_act']!r}, only 'silu' is supported."
        )
    hidden_size = _required(path, layer_config, "hidden_size")
    n_heads = _required(path, layer_config, "num_attention_heads")
    n_kv_heads = int(layer_config.get("num_key_value_heads") or n_heads)
    head_dim = layer_config.get("head_dim") or hidden_size // n_heads
    n_features = _n_features(path, tensors, target)
    lm_head = tensors.get("lm_head.weight")
    fc_norm = bool(flags.get("fc_norm")) or "fc_norm.0.weight" in tensors
    return Eagle3Config(
        hidden_size=hidden_size,
        intermediate_size=_required(path, layer_config, "intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=_head_dim(tensors, n_heads, n_kv_heads) or head_dim,
        n_layers=_n_layers(layer_config, tensors),
        target_hidden_size=target.hidden_size,
        n_features=n_features,
        target_vocab_size=target.embed_tokens.shape[0],
        draft_vocab_size=raw.get("draft_vocab_size") or (0 if lm_head is None else len(lm_head)),
        rms_norm_eps=float(layer_config.get("rms_norm_eps", 1e-6)),
        rope=_rope(path, layer_config),
        feature_layers=_feature_layers(path, raw, n_features, target.n_layers),
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="layers.0.self_attn.o_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        # Speculators heads older than the key were all trained with it.
        norm_before_residual=bool(flags.get("norm_before_residual", nested)),
        norm_before_fc=bool(flags.get("norm_before_fc")) or "input_norm.weight" in tensors,
        fc_norm=fc_norm,
        # Until its PR 879 SpecForge meant by true only that a norm stands before lm_head.
        norm_output=bool(flags.get("norm_output")) and (nested or fc_norm),
        sliding_window=_sliding_window(path, layer_config),
        max_positions=layer_config.get("max_position_embeddings"),
    )


def _required(path: Path, layer_config: Mapping[str, Any], key: str) -> int:
    value = layer_config.get(key)
    if not isinstance(value, int):
        raise SpectuneError(
            f"{path}/config.json must give the head's {key} as a whole number, not {value!r}; "
            "take config.json and weights from one checkpoint."
        )
    return value


def _head_dim(tensors: Mapping[str, Tensor], n_heads: int, n_kv_heads: int) -> int | None:
    """Read the head size from the projections: config.json is often silent or wrong about it."""
    query = tensors.get("layers.0.self_attn.q_proj.weight")
    key = tensors.get("layers.0.self_attn.k_proj.weight")
    if query is None or key is None or len(query) * n_kv_heads != len(key) * n_heads:
        return None
    return len(query) // n_heads


def _n_features(path: Path, tensors: Mapping[str, Tensor], target: TargetFacts) -> int:
    width = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else 3 * target.hidden_size
    if width % target.hidden_size:
        raise SpectuneError(
            f"The head in {path} reads features of width {width}, no multiple of the target's "
            f"hidden size {target.hidden_size}; use it with the target it was trained for."
        )
    return width // target.hidden_size


def _n_layers(layer_config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    indices = {int(n.split(".")[1]) for n in tensors if n.startswith("layers.")}
    return max(int(layer_config.get("num_hidden_layers", 1)), max(indices, default=0) + 1)


def _rope(path: Path, layer_config: Mapping[str, Any]) -> dict[str, Any]:
    """Read rotary parameters in the present and the older spelling of `transformers`."""
    rope = dict(layer_config.get("rope_parameters") or layer_config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    # SafeAILab's heads state no base and were trained with 10,000.
    rope.setdefault("rope_theta", layer_config.get("rope_theta") or 10_000.0)
    if "partial_rotary_factor" in layer_config:
        rope.setdefault("partial_rotary_factor", layer_config["partial_rotary_factor"])
    if rope["rope_type"] not in ROPE_TYPES:
        raise SpectuneError(
            f"The head in {path} uses rope type {rope['rope_type']!r}; supported are "
            f"{', '.join(ROPE_TYPES)}."
        )
    if rope["rope_type"] in ("llama3", "yarn"):
        positions = layer_config.get("max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", positions)
    return rope


def _feature_layers(
    path: Path, raw: Mapping[str, Any], n_features: int, n_layers: int
) -> tuple[int, ...]:
    """Return the fused layers as indices into the target's `hidden_states`.

    Flat configs name the layer whose output is taken, speculators the index itself.
    """
    outputs = (
        (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        or raw.get("aux_hidden_states_layer_ids")
        or raw.get("target_layer_ids")
    )
    indices = raw.get("eagle_aux_hidden_state_layer_ids")
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


def _sliding_window(path: Path, layer_config: Mapping[str, Any]) -> int | None:
    kinds = set(layer_config.get("layer_types") or ["full_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds == {"sliding_attention"}:
        return int(layer_config["sliding_window"])
    raise SpectuneError(
        f"The head in {path} mixes {sorted(kinds)}; supported is one attention kind per head."
    )


def flat_config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    rope = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    return {
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
