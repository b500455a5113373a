"""Tensors of an EAGLE-3 checkpoint: their names and shapes, joined and split again.

Knows the names that speculators gives them; the flat family's `midlayer.` is translated.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from profiles.errors import SpectuneError

from .eagle3 import Eagle3Config

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of weights; any other stands for numbers that need a scale, and is not read."""

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def canonical(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as speculators does and drop what a head does not need.

    Raises:
        SpectuneError: Two tensors would have the same name.
    """
    named: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        name = stored.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if name in named:
            raise SpectuneError(
                f"Every tensor of a head must be stored once, but {path} has {name} twice, once "
                f"as {stored}; remove one."
            )
        named[name] = tensor
    return {
        name: t
        for name, t in named.items()
        if name != "t2d" and not name.startswith("verifier_") and not name.endswith(".inv_freq")
    }


def _expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor a checkpoint of this config stores."""
    size, width = config.hidden_size, config.n_features * config.target_hidden_size
    n_queries, n_keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, width),
        "norm.weight": (size,),
        "lm_head.weight": (config.draft_vocab_size, size),
    }
    if config.fc_bias:
        shapes["fc.bias"] = (size,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (width,)
    if config.fc_norm:
        for i in range(config.n_features):
            shapes[f"fc_norm.{i}.weight"] = (config.target_hidden_size,)
    for i in range(config.n_layers):
        n_inputs = 2 * size if i == 0 else size
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (size,),
            "post_attention_layernorm.weight": (size,),
            "self_attn.q_proj.weight": (n_queries, n_inputs),
            "self_attn.k_proj.weight": (n_keys, n_inputs),
            "self_attn.v_proj.weight": (n_keys, n_inputs),
            "self_attn.o_proj.weight": (size, n_queries),
            "mlp.gate_proj.weight": (config.intermediate_size, size),
            "mlp.up_proj.weight": (config.intermediate_size, size),
            "mlp.down_proj.weight": (size, config.intermediate_size),
        }
        if i == 0:
            layer["hidden_norm.weight"] = (size,)
        if config.attention_bias:
            layer |= {
                "self_attn.q_proj.bias": (n_queries,),
                "self_attn.k_proj.bias": (n_keys,),
                "self_attn.v_proj.bias": (n_keys,),
            }
        if config.output_bias:
            layer["self_attn.o_proj.bias"] = (size,)
        if config.qk_norm:
            layer |= {f"self_attn.{p}_norm.weight": (config.head_dim,) for p in "qk"}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


MAX_FAULTS_SHOWN = 8


def check_tensors(path: Path, config: Eagle3Config, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of the config, or hold no usable numbers.

    Raises:
        SpectuneError: Names the first of them.
    """
    expected = _expected_shapes(config)
    faults = [f"{name} is missing" for name in expected if name not in tensors]
    faults += [f"{name} is not known" for name in tensors if name not in expected]
    faults += [
        f"{name} is {list(t.shape)} instead of {list(expected[name])}"
        for name, t in tensors.items()
        if name in expected and tuple(t.shape) != expected[name]
    ]
    faults += [f"{name} {fault}" for name, t in tensors.items() if (fault := _unusable(t))]
    if len(faults) > MAX_FAULTS_SHOWN:
        faults[MAX_FAULTS_SHOWN:] = [f"and {len(faults) - MAX_FAULTS_SHOWN} more"]
    if faults:
        raise SpectuneError(
            f"The tensors in {path} are not those of the EAGLE-3 head its config.json describes: "
            f"{'; '.join(faults)}; take both files from one checkpoint."
        )


def _unusable(tensor: Tensor) -> str | None:
    """Return why a tensor is no weight, as the end of a sentence; None if it is one."""
    if tensor.dtype not in FLOATS:
        return f"is stored as {str(tensor.dtype).removeprefix('torch.')}, which is not read"
    return None if bool(tensor.isfinite().all()) else "holds NaN or infinity"


def choose_embedding(
    path: Path, config: Eagle3Config, own: Tensor | None, shared: Tensor
) -> Tensor:
    """Return the target's embedding unless the checkpoint stores a different one: [Vt, H].

    Raises:
        SpectuneError: It has another shape, or holds no usable numbers.
    """
    if own is not None and (fault := _unusable(own)):
        raise SpectuneError(f"The embedding in {path} {fault}; download the checkpoint again.")
    stored = shared if own is None else own.to(shared)
    expected = (config.target_vocab_size, config.hidden_size)
    if tuple(stored.shape) != expected:
        whose = "the target's" if own is None else "its own"
        raise SpectuneError(
            f"The head in {path} needs an embedding of {list(expected)}, but {whose} is "
            f"{list(stored.shape)}; use it with the target it was trained for."
        )
    return shared if own is None or torch.equal(stored, shared) else stored


def target_ids(path: Path, config: Eagle3Config, d2t: Tensor | None) -> Tensor | None:
    """Check the offsets d2t and turn them into target ids [Vd]; None for the whole vocabulary.

    Raises:
        SpectuneError: They are missing, no whole numbers, out of range or not distinct.
    """
    n_draft, n_target = config.draft_vocab_size, config.target_vocab_size
    if d2t is None:
        if n_draft == n_target:
            return None
        raise SpectuneError(
            f"The head in {path} scores {n_draft} of the target's {n_target} tokens but has no "
            "d2t that says which; download the whole checkpoint."
        )
    if tuple(d2t.shape) != (n_draft,):
        raise SpectuneError(
            f"d2t in {path} must hold one offset for each of {n_draft} draft tokens, but is "
            f"{list(d2t.shape)}; take config.json and weights from one checkpoint."
        )
    if d2t.is_floating_point() or d2t.is_complex():
        raise SpectuneError(
            f"d2t in {path} must hold whole numbers, but is {d2t.dtype}; download it again."
        )
    ids = d2t.long() + torch.arange(n_draft)
    if int(ids.min()) < 0 or int(ids.max()) >= n_target:
        raise SpectuneError(
            f"d2t in {path} points to token {int(ids.max())} of a target with {n_target} tokens; "
            "use the head with the target it was trained for."
        )
    if ids.unique().numel() != n_draft:
        raise SpectuneError(
            f"d2t in {path} maps {n_draft} draft tokens to only {ids.unique().numel()} target "
            "tokens; download the checkpoint again."
        )
    return ids


def _module_name(name: str) -> str:
    """Translate a checkpoint's name to the module's, which has no self_attn and mlp level."""
    return name.replace(".self_attn.", ".").replace(".mlp.", ".")


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join q, k, v and gate, up, and name tensors as `Eagle3Head` does."""
    rest = dict(tensors)
    fused: dict[str, Tensor] = {}
    for name in tensors:
        for whole, parts in FUSED.items():
            if f".{parts[0]}." in name:
                pieces = [rest.pop(name.replace(parts[0], part)) for part in parts]
                fused[_module_name(name.replace(parts[0], whole))] = torch.cat(pieces)
    return fused | {_module_name(name): t for name, t in rest.items()}


def unfuse(state: Mapping[str, Tensor], config: Eagle3Config) -> dict[str, Tensor]:
    """Undo `fuse`: the tensors under their checkpoint names."""
    shapes = _expected_shapes(config)
    tensors: dict[str, Tensor] = {}
    for name in shapes:
        for whole, parts in FUSED.items():
            if f".{parts[0]}." in name:
                names = [name.replace(parts[0], part) for part in parts]
                joined = state[_module_name(name.replace(parts[0], whole))]
                rows = [shapes[n][0] for n in names]
                tensors |= dict(zip(names, joined.split(rows), strict=True))
        if name not in tensors:
            tensors[name] = state[_module_name(name)]
    return tensors


def flat_name(name: str) -> str:
    """Return the name of a tensor in a flat checkpoint, whose one layer is the `midlayer`."""
    return name.replace("layers.0.", "midlayer.", 1)
