"""EAGLE-3 checkpoints: recognise, load and save them.

One reader for the flat family (SafeAILab, SpecForge, AngelSlim, DeepSpec, EAGLE-3.1) and the
nested one (speculators). Knows nothing of drafting.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from profiles.errors import SpectuneError

from .eagle3 import Eagle3Config, Eagle3Head
from .eagle3_config import TargetFacts, build_config, flat_config
from .eagle3_tensors import (
    canonical,
    check_tensors,
    choose_embedding,
    flat_name,
    fuse,
    target_ids,
    unfuse,
)
from .hub import reason

SUPPORTED = (
    "supported are EAGLE-3 heads of SafeAILab, SpecForge, AngelSlim, DeepSpec and "
    "speculators, EAGLE-3.1 included"
)


def is_eagle3(path: Path) -> bool:
    """Tell whether a folder holds a head that `load_eagle3` answers for, if only to refuse it.

    True for every EAGLE generation and speculators kind; False for a whole model, a missing
    folder or a file.
    """
    if not (path / "config.json").is_file():
        return False
    if "speculators_model_type" in _read_config(path):
        return True
    names = _tensor_names(path)
    return "fc.weight" in names and any(n.startswith(("layers.0.", "midlayer.")) for n in names)


def load_eagle3(path: Path, *, target: TargetFacts) -> Eagle3Head:
    """Load a head in any public checkpoint format.

    Args:
        path: Folder with config.json and one or more weight files.
        target: The target it will draft for.

    Returns:
        The head in evaluation mode, in the dtype and on the device of the target's embedding.

    Raises:
        SpectuneError: The folder holds no EAGLE-3 head, its tensors are not those its
            config.json describes, or it belongs to another target.
    """
    raw = _read_config(path)
    tensors = canonical(path, _read_tensors(path))
    _refuse_others(path, raw, tensors)
    d2t, own_embedding = tensors.pop("d2t", None), tensors.pop("embed_tokens.weight", None)
    config = build_config(path, raw, tensors, target)
    check_tensors(path, config, tensors)
    embedding = choose_embedding(path, config, own_embedding, target.embed_tokens)

    head = _built(path, config)
    weights = {name: t.to(embedding) for name, t in fuse(tensors).items()}
    head.load_state_dict(weights, strict=True, assign=True)
    head.embed_tokens = embedding
    head.target_ids = target_ids(path, config, d2t)
    return head.to(embedding.device).eval().requires_grad_(False)


def _built(path: Path, config: Eagle3Config) -> Eagle3Head:
    """Return the head without its weights."""
    try:
        with torch.device("meta"):
            return Eagle3Head(config, None)
    except Exception as error:  # transformers computes the rotary angles, and checks as it likes
        raise SpectuneError(
            f"The rotary parameters in {path}/config.json must be usable, but {dict(config.rope)} "
            f"are not ({reason(error)}); take config.json and weights from one checkpoint."
        ) from error


def save_eagle3(head: Eagle3Head, path: Path) -> None:
    """Write a head as a flat public checkpoint: config.json and model.safetensors.

    Weights keep their dtype; the shared embedding is not stored. Each file is written whole
    or not at all.
    """
    config = head.config
    tensors = {flat_name(n): t for n, t in unfuse(head.state_dict(), config).items()}
    offsets = torch.arange(config.draft_vocab_size)
    ids = offsets if head.target_ids is None else head.target_ids.cpu()
    tensors["d2t"] = ids - offsets
    tensors["t2d"] = torch.zeros(config.target_vocab_size, dtype=torch.bool)
    tensors["t2d"][ids] = True
    path.mkdir(parents=True, exist_ok=True)
    part = path / "model.safetensors.part"
    save_file({n: t.contiguous().cpu() for n, t in tensors.items()}, part, {"format": "pt"})
    part.replace(path / "model.safetensors")
    part = path / "config.json.part"
    dtype = str(head.lm_head.weight.dtype).removeprefix("torch.")
    part.write_text(json.dumps(flat_config(config, dtype), indent=2) + "\n")
    part.replace(path / "config.json")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpectuneError(
            f"A head needs a readable config.json, but {path} gives: {error}; download it again."
        ) from error
    if not isinstance(config, dict):
        raise SpectuneError(f"{path}/config.json is not a JSON object; download it again.")
    return config


def _weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except SpectuneError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise SpectuneError(
            f"Cannot read the weights in {file} ({reason(error)}); download it again."
        ) from error


def _tensor_names(path: Path) -> set[str]:
    names: set[str] = set()
    for file in _weight_files(path):
        with _reading(file):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    names.update(opened.keys())
            else:
                loaded = torch.load(file, map_location="meta", weights_only=True, mmap=True)
                names.update(_checked(file, loaded))
    return {name.removeprefix("model.") for name in names}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(path):
        with _reading(file):
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                loaded = torch.load(file, map_location="cpu", weights_only=True)
                tensors |= _checked(file, loaded)
    if not tensors:
        raise SpectuneError(
            f"A head needs model.safetensors or pytorch_model.bin, but {path} has neither; "
            "download the whole folder."
        )
    return tensors


def _checked(file: Path, loaded: Any) -> dict[str, Tensor]:
    """Return what a PyTorch file held, if that is tensors by name."""
    pairs = loaded.items() if isinstance(loaded, dict) else [(None, None)]
    if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in pairs):
        raise SpectuneError(
            f"A file of weights must hold tensors by name, but {file} holds something else; save "
            "the head's state_dict() there, or download it again."
        )
    return dict(pairs)


def _refuse_others(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    kind = raw.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise SpectuneError(f"{path} holds a speculators head of kind {kind!r}; {SUPPORTED}.")
    first_layer = any(name.startswith("layers.0.") for name in tensors)
    fc = tensors.get("fc.weight")
    is_matrix = fc is not None and fc.dim() == 2
    if first_layer and is_matrix and not {"lm_head.weight", "d2t"} & set(tensors):
        rows, columns = tensors["fc.weight"].shape
        if columns == 2 * rows:
            raise SpectuneError(
                f"{path} holds an EAGLE-1 or EAGLE-2 head (fc.weight is [{rows}, {columns}] and "
                f"there is no lm_head); {SUPPORTED}."
            )
    if not first_layer or (fc is None and "lm_head.weight" not in tensors):
        found = ", ".join(sorted(tensors)[:5])
        raise SpectuneError(f"{path} holds no EAGLE-3 head (found {found}, ...); {SUPPORTED}.")
