"""A model's files, for engines that load the weights by themselves; none are read into memory here
but to know them again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from profiles import DraftRef, TargetRef
from profiles.errors import SpectuneError, UsageError

from .decodable import contents, is_model
from .demo import demo_head_path
from .eagle3_checkpoint import is_eagle3
from .fingerprint import weights_sha256
from .hub import download_snapshot, is_hub_id
from .loading import find_model


@dataclass(frozen=True)
class TargetFiles:
    """A target on disk.

    Attributes:
        folder: Where its files lie.
        tokenizer: Its tokenizer.
        ref: How a profile names it.
        max_positions: Longest text, in tokens; None if its config does not say.
    """

    folder: Path
    tokenizer: Any
    ref: TargetRef
    max_positions: int | None


def find_target(
    name: str,
    *,
    dtype: str,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> TargetFiles:
    """Find a target: `demo`, a folder or a hub id.

    Args:
        name: Where it is.
        dtype: The type that the engine will compute in.
        trust_remote_code: Let the checkpoint run its own Python code.
        progress: Told what is being done.

    Raises:
        SpectuneError: There is none of that name, or its files cannot be read.
    """
    found = find_model(name, trust_remote_code=trust_remote_code, progress=progress)
    if found.path.is_file():
        raise UsageError(
            f"a serving engine needs a folder or a hub id, but {name} is a GGUF file; pass the "
            "folder of the model in safetensors"
        )
    folder = download_snapshot(name) if is_hub_id(found.id) else found.path
    ref = TargetRef(
        id=found.id,
        revision=found.revision,
        sha256=weights_sha256(folder),
        dtype=dtype,
        parameters=n_parameters(folder),
    )
    text_config = found.config.get_text_config()
    return TargetFiles(
        folder, found.tokenizer, ref, getattr(text_config, "max_position_embeddings", None)
    )


def find_draft(name: str) -> tuple[DraftRef, Path]:
    """Find a draft with weights, `demo`, a folder or a hub id: how a profile names it, and where.

    Raises:
        SpectuneError: There is none of that name, or it is neither a head nor a model.
    """
    path = Path(name).expanduser().absolute()
    if name == "demo":
        folder, draft_id = demo_head_path(), name
    elif path.is_dir():
        folder, draft_id = path, str(path)
    elif is_hub_id(name):
        folder, draft_id = download_snapshot(name), name
    else:
        raise UsageError(
            "a draft must be `lookup`, `suffix`, `demo`, or the folder or hub id of an EAGLE-3 "
            f"head or a small model, but there is no {name}; check the path"
        )
    if not (is_head := is_eagle3(folder)) and not is_model(folder):
        raise SpectuneError(
            "a draft folder must hold an EAGLE-3 head or a causal language model with its "
            f"tokenizer, but {name} holds {contents(folder)}; use the folder of either, or lookup"
        )
    ref = DraftRef(
        kind="eagle3" if is_head else "model",
        id=draft_id,
        sha256=weights_sha256(folder),
        parameters=n_parameters(folder),
    )
    return ref, folder


def n_parameters(folder: Path) -> int | None:
    """Return how many weights the safetensors of a folder hold; None if there are none.

    Tables of numbers, such as a head's map of its vocabulary, are no weights.
    """
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                tensor = opened.get_slice(name)
                if "F" in tensor.get_dtype():
                    total += math.prod(tensor.get_shape())
    return total or None
