"""Loading a target and its drafts, with the references by which a profile knows them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles import DraftRef, TargetRef
from profiles.errors import SpectuneError, UsageError
from profiles.io import expanded

from .decodable import contents, is_model
from .demo import demo_head_path
from .eagle3_checkpoint import is_eagle3, load_eagle3
from .eagle3_config import TargetFacts
from .eagle3_draft import Eagle3Draft
from .fingerprint import weights_sha256
from .hub import download_snapshot, is_hub_id
from .loaded_draft import KNOBS, hybrid_of, knobs_of, model_free
from .loaded_draft import LoadedDraft as LoadedDraft
from .loading import load_model
from .model_draft import ModelDraft
from .target import Target, check_tree_decoding
from .vocabulary import check_same_vocabulary

HYBRID = "hybrid:"
"""Before the name of a head or small model: the hybrid of it and the suffix draft."""


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to decode.

    Attributes:
        target: The model.
        tokenizer: Its tokenizer.
        ref: How a profile names it.
        eos_ids: The token ids that end a text.
    """

    target: Target
    tokenizer: Any
    ref: TargetRef
    eos_ids: tuple[int, ...]


Progress = Callable[[str], None]


def load_target(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedTarget:
    """Load a target from `demo`, a folder, a hub id or a GGUF file.

    Args:
        name: Where it is.
        dtype: `auto` takes the fastest type the device computes in.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        trust_remote_code: Let the checkpoint run its own Python code.
        progress: Told what is being done.

    Raises:
        SpectuneError: It cannot be loaded, or it cannot verify draft trees.
    """
    loaded = load_model(
        name, dtype=dtype, device=device, trust_remote_code=trust_remote_code, progress=progress
    )
    target = Target(loaded.model)
    check_tree_decoding(target)
    ref = TargetRef(
        id=loaded.id,
        revision=loaded.revision,
        sha256=weights_sha256(loaded.model),
        dtype=str(target.dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in loaded.model.parameters()),
    )
    return LoadedTarget(target, loaded.tokenizer, ref, _eos_ids(loaded.model, loaded.tokenizer))


def load_draft(name: str, loaded: LoadedTarget, progress: Progress | None = None) -> LoadedDraft:
    """Load a draft.

    Args:
        name: `lookup`, `suffix`, `demo`, the folder or hub id of an EAGLE-3 head or a small
            model, a GGUF file, or one of the latter after `hybrid:`.
        loaded: The target it will draft for.
        progress: Told what is being done.

    Raises:
        UsageError: There is nothing of that name.
        SpectuneError: It cannot be loaded, or it does not fit the target.
    """
    if name in ("lookup", "suffix"):
        return model_free(DraftRef.model_validate({"kind": name} | KNOBS[name]))
    if name.startswith(HYBRID):
        return hybrid_of(load_draft(name.removeprefix(HYBRID), loaded, progress))
    if name == "demo":
        return _load_head(demo_head_path(), name, loaded)
    path = expanded(name).absolute()
    if path.is_dir():
        return _load_folder(path, str(path), loaded, progress)
    if path.is_file():
        return _load_small_model(name, loaded, progress)
    if is_hub_id(name):
        if progress:
            progress(f"fetching {name} from the hub")
        return _load_folder(download_snapshot(name), name, loaded, progress)
    raise UsageError(
        "a draft must be `lookup`, `suffix`, `demo`, the folder or hub id (org/name) of an "
        "EAGLE-3 head or a small model, a .gguf file, or `hybrid:` before one of these, but "
        f"there is no {name}; check the path"
    )


def draft_of(ref: DraftRef, loaded: LoadedTarget) -> LoadedDraft:
    """Load the draft that a speculating profile names."""
    if not ref.has_weights:
        return model_free(ref)
    assert ref.id is not None  # noqa: S101 - the schema asks for it
    found = _as_probed(load_draft(ref.id, loaded), ref, loaded.target.n_layers)
    return hybrid_of(found, **knobs_of(ref)) if ref.kind == "hybrid" else found


def _as_probed(found: LoadedDraft, ref: DraftRef, n_layers: int) -> LoadedDraft:
    """Return a head under the conventions that a profile found best, any other draft as it is."""
    draft, layers = found.draft, ref.feature_layers
    if not isinstance(draft, Eagle3Draft):
        return found
    n_features = len(draft.feature_layers)
    if layers is not None and (len(layers) != n_features or max(layers) >= n_layers):
        raise SpectuneError(
            f"draft.feature_layers of a profile must be {n_features} numbers below the target's "
            f"{n_layers} layers, but is {list(layers)}; tune again, or remove the key"
        )
    variant = draft.variant(feature_layers=layers, rope_theta=ref.rope_theta)
    conventions = {"feature_layers": layers, "rope_theta": ref.rope_theta}
    return LoadedDraft(variant, found.ref.model_copy(update=conventions))


def _load_folder(
    folder: Path, draft_id: str, loaded: LoadedTarget, progress: Progress | None
) -> LoadedDraft:
    if is_eagle3(folder):
        return _load_head(folder, draft_id, loaded)
    if is_model(folder):
        return _load_small_model(draft_id, loaded, progress)
    raise SpectuneError(
        "a draft folder must hold an EAGLE-3 head or a causal language model with its tokenizer, "
        f"but {draft_id} holds {contents(folder)}; use the folder of either, or lookup"
    )


def _load_head(folder: Path, draft_id: str, loaded: LoadedTarget) -> LoadedDraft:
    target = loaded.target
    facts = TargetFacts(
        embed_tokens=target.model.get_input_embeddings().weight.detach(),
        hidden_size=target.config.hidden_size,
        n_layers=target.n_layers,
    )
    head = load_eagle3(folder, target=facts)
    ref = DraftRef(
        kind="eagle3",
        id=draft_id,
        sha256=weights_sha256(head),
        parameters=head.n_parameters,
    )
    return LoadedDraft(Eagle3Draft(head), ref)


def _load_small_model(name: str, loaded: LoadedTarget, progress: Progress | None) -> LoadedDraft:
    target = loaded.target
    small = load_model(
        name,
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device,
        progress=progress,
    )
    draft = ModelDraft(small.model, target.vocab_size)
    n_rows = small.model.get_input_embeddings().weight.shape[0]
    check_same_vocabulary(loaded.tokenizer, small.tokenizer, target.vocab_size, n_rows)
    ref = DraftRef(
        kind="model",
        id=small.id,
        sha256=weights_sha256(small.model),
        parameters=sum(p.numel() for p in small.model.parameters()),
    )
    return LoadedDraft(draft, ref)


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a text: the generation config's, else the tokenizer's."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
