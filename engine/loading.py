"""Load a target or a small draft from `demo`, a folder, a GGUF file or a hub id.

What the engine cannot decode is refused here, by name and before the weights are read. Must not
know about trees, drafts or sampling.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from profiles.errors import SpectuneError, UsageError
from profiles.io import expanded

from .decodable import check_decodable, check_folder, quantization_name
from .devices import resolve_device, resolve_dtype
from .hub import find_snapshot, is_hub_id, reason
from .memory import check_weights_fit


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready to decode, and where it came from.

    Attributes:
        model: The transformers model, in eval mode, without gradients, on its device.
        tokenizer: Its tokenizer.
        id: `demo`, the absolute path, or the hub id.
        revision: The hub's commit, or the demo's version; None for files of the user.
        path: The folder or GGUF file it was read from.
    """

    model: Any
    tokenizer: Any
    id: str
    revision: str | None
    path: Path


@dataclass(frozen=True)
class _Source:
    """Where a model lies, and the options every `from_pretrained` needs to find it there."""

    id: str
    location: str
    path: Path
    revision: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def unpacked(self) -> bool:
        """Whether it is a GGUF file, whose weights are unpacked while loading."""
        return "gguf_file" in self.options


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the log lines and bars of transformers; the hub's download bars stay."""
    import transformers.modeling_gguf_pytorch_utils as gguf
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars, gguf_bar = not are_progress_bars_disabled(), gguf.tqdm
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    if hub_bars:
        enable_progress_bars()
    gguf.tqdm = lambda items, **_: items  # this bar alone obeys no switch
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf.tqdm = gguf_bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_model(
    name: str,
    *,
    dtype: str,
    device: str | torch.device,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name: `demo`, a folder, a `.gguf` file (unpacked while loading) or a hub id `org/name`.
        dtype: See `resolve_dtype`.
        device: See `resolve_device`.
        trust_remote_code: Let the checkpoint run its own Python code.
        progress: Told in a few words what is being done.

    Raises:
        UsageError: The name, dtype or device does not exist here.
        SpectuneError: The model cannot be read, or the engine cannot decode it.
    """
    report = progress or (lambda message: None)
    on_device = resolve_device(device)
    in_dtype = resolve_dtype(dtype, on_device)
    source = _locate(name, trust_remote_code, report)
    report(f"loading {source.id} ({str(in_dtype).removeprefix('torch.')}, {on_device})")
    config = _load_config(source)
    with quiet_transformers():
        check_decodable(
            config,
            source.id,
            trusted=source.options.get("trust_remote_code", False),
            unpacked=source.unpacked,
        )
    _check_room(source, config, in_dtype, on_device)
    tokenizer = _load_tokenizer(source)
    model = _load_weights(source, config, in_dtype, on_device)
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, source.id, source.revision, source.path)


@dataclass(frozen=True)
class FoundModel:
    """A model whose weights were not loaded.

    Attributes:
        id, revision, path: As of a loaded model; of a hub id the path has the config alone.
        config: Its configuration.
        tokenizer: Its tokenizer.
    """

    id: str
    revision: str | None
    path: Path
    config: Any
    tokenizer: Any


def find_model(
    name: str,
    *,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> FoundModel:
    """Find a model and load its config and tokenizer; arguments and errors as `load_model`."""
    source = _locate(name, trust_remote_code, progress or (lambda message: None))
    config = _load_config(source)
    return FoundModel(source.id, source.revision, source.path, config, _load_tokenizer(source))


def _locate(name: str, trust_remote_code: bool, report: Callable[[str], None]) -> _Source:
    """Find out what a name stands for, and refuse folders that hold no model."""
    if name == "demo":
        from .demo import DEMO_REVISION, demo_target_path

        folder = demo_target_path(report)
        return _Source("demo", str(folder), folder, DEMO_REVISION)
    path = expanded(name).absolute()
    if path.is_dir():
        check_folder(path)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        return _Source(str(path), str(path), path, options=options)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UsageError(
                f"a model file must be a .gguf file, but {path} is not; pass the folder it lies in"
            )
        options = {"gguf_file": path.name, "trust_remote_code": False}
        return _Source(str(path), str(path.parent), path, options=options)
    if not is_hub_id(name):
        raise UsageError(
            "a model must be `demo`, a folder, a .gguf file or a hub id such as org/name, but "
            f"there is no {name}; check the path"
        )
    found = find_snapshot(name)
    options = {
        "revision": found.commit,
        "local_files_only": found.offline,
        "trust_remote_code": trust_remote_code,
    }
    return _Source(name, name, found.folder, found.commit, options)


@quiet_transformers()
def _load_config(source: _Source) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.location, **source.options)
    except Exception as error:  # configs check themselves with classes of their own
        if "trust_remote_code" in str(error):
            raise _needs_remote_code(source) from error
        raise SpectuneError(
            f"the model {source.id} must have a config that transformers can read, but it says "
            f"'{reason(error)}'; check the name and the files, or upgrade transformers"
        ) from error


def _needs_remote_code(source: _Source) -> SpectuneError:
    return SpectuneError(
        f"models run only the code of transformers, but {source.id} brings its own; read that "
        "code and pass --trust-remote-code if you trust it"
    )


@quiet_transformers()
def _load_tokenizer(source: _Source) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.location, **source.options)
    except Exception as error:  # the tokenizers library raises no narrower class
        if "trust_remote_code" in str(error):
            raise _needs_remote_code(source) from error
        raise SpectuneError(
            f"the tokenizer of {source.id} must be readable by transformers, but it says "
            f"'{reason(error)}'; copy its files again or install what it asks for"
        ) from error


def _check_room(source: _Source, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that are larger than the device's memory, before they are read.

    Those of models that bring their own code or stay quantised are not known beforehand.
    """
    from transformers import AutoModelForCausalLM

    stays_quantised = getattr(config, "quantization_config", None) and not source.unpacked
    if stays_quantised or source.options.get("trust_remote_code"):
        return
    try:
        with torch.device("meta"), quiet_transformers():
            outline = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except Exception as error:  # some values are looked at by nothing but the model itself
        raise SpectuneError(
            f"config.json must describe a model that can be built, but of that of {source.id} "
            f"transformers says '{reason(error)}'; use the config.json the weights were saved with"
        ) from error
    check_weights_fit(outline, source.id, dtype, device)


def _load_weights(
    source: _Source, config: Any, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    """Read the weights; every tensor of the model must come from the checkpoint."""
    from transformers import AutoModelForCausalLM, GgufConfig

    options = source.options | {"config": config, "dtype": dtype, "output_loading_info": True}
    quantization = getattr(config, "quantization_config", None)
    if source.unpacked:
        options["quantization_config"] = GgufConfig(dequantize=True)
    if device.type != "cpu":
        options["device_map"] = {"": device}
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(source.location, **options)
    except torch.OutOfMemoryError as error:
        raise SpectuneError(
            f"the model must fit the memory of {device}, but {source.id} in {dtype} does not; use "
            "a smaller model or dtype"
        ) from error
    except Exception as error:  # so do models that are built from them
        raise _unreadable(source, quantization, error) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise SpectuneError(
            f"a checkpoint must hold every weight of its model, but {source.id} lacks "
            f"{len(missing)} ({', '.join(missing[:3])}); copy its files again or pass the full "
            "model"
        )
    ignored = sorted(info["unexpected_keys"])
    if ignored:
        warnings.warn(
            f"{source.id} holds {len(ignored)} tensors its model does not use "
            f"({', '.join(ignored[:3])})",
            stacklevel=3,
        )
    return cast(torch.nn.Module, model)


def _unreadable(source: _Source, quantization: Any, error: Exception) -> SpectuneError:
    if quantization is not None and not source.unpacked:
        method = quantization_name(quantization)
        return SpectuneError(
            f"quantised weights must run here, but {source.id} ({method}) does not: "
            f"'{reason(error)}'; use the unquantised model or a GGUF file"
        )
    if "ignore_mismatched_sizes" in str(error):
        return SpectuneError(
            f"the weights must have the shapes that config.json gives, but those of {source.id} "
            "do not; use the config.json they were saved with"
        )
    return SpectuneError(
        f"the weights of {source.id} must be readable by transformers, but it says "
        f"'{reason(error)}'; copy its files again, or install what it asks for"
    )
