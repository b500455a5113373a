"""Load a target or a small draft from `demo`, a folder, a GGUF file or a hub id.

What the engine cannot decode is refused here, by name and before the weights are read. Must not
know about trees, drafts or sampling.
"""

from __future__ import annotations

import contextlib
import re
import ssl
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from profiles.errors import SpectuneError, UsageError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_SEVERAL_GPUS = ("balanced", "balanced_low_0", "sequential")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_TIMEOUT_S = 2.0
# Every other kind of layer keeps a state that cannot be rolled back token by token.
_ROLLBACK_LAYERS = {"full_attention", "sliding_attention"}
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model", "tekken.json", "*.tiktoken")
_FULL_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


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
    _check_decodable(config, source)
    tokenizer = _load_tokenizer(source)
    model = _load_weights(source, config, in_dtype, on_device)
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, source.id, source.revision, source.path)


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the torch device of a name: `auto` (the accelerator, else cpu), cpu, cuda[:i], mps.

    Raises:
        UsageError: There is no such device here, or the name spreads over several GPUs.
    """
    name = str(device)
    if name in _SEVERAL_GPUS or "," in name:
        raise UsageError(
            f"the engine decodes on one device, but {name} spreads the model over several GPUs; "
            "name one of them, such as cuda:0"
        )
    available = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        available.append("mps")
    if name == "auto":
        name = available[1] if len(available) > 1 else "cpu"
    elif name == "cuda":
        name = "cuda:0"
    if name not in available:
        raise UsageError(
            f"the device must be one that torch finds here, but {device} is not; choose from "
            f"{', '.join(available)}"
        )
    return torch.device(name)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; `auto` is the fastest one the device computes in natively.

    That is bfloat16 where the hardware multiplies it, else float16 on GPUs and float32 on CPUs.

    Raises:
        UsageError: There is no such dtype, or not on this device.
    """
    if dtype == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return torch.float16
    if dtype not in DTYPES:
        raise UsageError(
            f"the dtype must be auto or one of {', '.join(DTYPES)}, but it is {dtype}; choose one "
            "of these"
        )
    if dtype == "float64" and device.type == "mps":
        raise UsageError("mps has no float64, which was asked for; use float32 or the cpu")
    return DTYPES[dtype]


def _cpu_has_bfloat16() -> bool:
    """Tell whether the processor multiplies bfloat16; False where torch cannot say."""
    probe = getattr(torch.cpu, "get_capabilities", None)
    found = probe() if probe else {}
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def check_same_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, target_vocab: int, draft_vocab: int
) -> None:
    """Refuse a small draft whose token ids do not mean what the target's mean.

    Embedding rows beyond the tokenizer's ids are padding and may differ in number.

    Args:
        target_tokenizer: The target's tokenizer.
        draft_tokenizer: The draft's tokenizer.
        target_vocab: Embedding rows of the target.
        draft_vocab: Embedding rows of the draft.

    Raises:
        SpectuneError: The vocabularies differ, or the draft lacks rows for tokens in use.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    differing = sorted(
        (token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token)),
        key=lambda token: (target.get(token, len(target)), token),
    )
    if differing:
        examples = ", ".join(
            f"{token!r} is {target.get(token, 'absent')} and {draft.get(token, 'absent')}"
            for token in differing[:3]
        )
        raise SpectuneError(
            "a draft model must share the target's tokenizer, but the two differ in "
            f"{len(differing)} tokens ({examples}); use a draft of the same model family, an "
            "EAGLE-3 head or lookup"
        )
    n_used = min(max(target.values(), default=-1) + 1, target_vocab)
    if draft_vocab < n_used:
        raise SpectuneError(
            f"a draft model must have an embedding row for each of the {n_used} token ids the "
            f"target uses, but it has {draft_vocab}; use a draft of the same model family, an "
            "EAGLE-3 head or lookup"
        )


def _locate(name: str, trust_remote_code: bool, report: Callable[[str], None]) -> _Source:
    """Find out what a name stands for, and refuse folders that hold no model."""
    if name == "demo":
        from .demo import DEMO_REVISION, demo_target_path

        folder = demo_target_path(report)
        return _Source("demo", str(folder), folder, DEMO_REVISION)
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        _check_folder(path)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        return _Source(str(path), str(path), path, options=options)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UsageError(
                f"a model file must be a .gguf file, but {path} is not; pass the folder it lies in"
            )
        return _Source(str(path), str(path.parent), path, options={"gguf_file": path.name})
    if not _HUB_ID.fullmatch(name) or path.suffix == ".gguf":
        raise UsageError(
            "a model must be `demo`, a folder, a .gguf file or a hub id such as org/name, but "
            f"there is no {name}; check the path"
        )
    return _locate_on_hub(name, trust_remote_code)


def _locate_on_hub(hub_id: str, trust_remote_code: bool) -> _Source:
    """Resolve a hub id to one commit, so that all its files come from the same."""
    from huggingface_hub import hf_hub_download

    offline = not _hub_answers()
    try:
        config = Path(hf_hub_download(hub_id, "config.json", local_files_only=offline))
    except (OSError, ValueError) as error:
        if offline:
            raise SpectuneError(
                f"a model must be a local path or a hub id, but {hub_id} is neither here nor in "
                "the Hugging Face cache, and the hub does not answer; connect to the network, or "
                "download it elsewhere and pass its folder"
            ) from error
        raise SpectuneError(
            f"a hub id must name a full model that this account may read, but for {hub_id} the "
            f"hub says '{_reason(error)}'; check the id, or log in with `hf auth login`"
        ) from error
    commit = config.parent.name
    options = {
        "revision": commit,
        "local_files_only": offline,
        "trust_remote_code": trust_remote_code,
    }
    return _Source(hub_id, hub_id, config.parent, commit, options)


def _check_folder(path: Path) -> None:
    has_weights = any(any(path.glob(pattern)) for pattern in _FULL_WEIGHTS)
    if (path / "adapter_config.json").exists() and not has_weights:
        raise SpectuneError(
            f"a model folder must hold full weights, but {path} holds only an adapter; merge it "
            "into its base model first (peft: merge_and_unload) and save the result"
        )
    if not (path / "config.json").is_file():
        entries = sorted(entry.name for entry in path.iterdir())
        gguf = next((entry for entry in entries if entry.endswith(".gguf")), None)
        found = ", ".join(entries[:5]) + (", ..." if len(entries) > 5 else "")
        remedy = f"pass the file {path / gguf}" if gguf else "pass the folder of a saved model"
        raise SpectuneError(
            f"a model folder must hold a config.json, but {path} holds {found or 'nothing'}; "
            f"{remedy}"
        )
    if not any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise SpectuneError(
            f"a model folder must hold its tokenizer, but {path} has no tokenizer.json or other "
            "vocabulary; copy the tokenizer's files from the model it was made from"
        )


def _hub_answers() -> bool:
    """Ask the hub once: transformers itself would retry for half a minute when offline."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True  # an answer, whatever it says
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # there, but with certificates of its own
    except OSError:
        return False
    return True


@quiet_transformers()
def _load_config(source: _Source) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.location, **source.options)
    except (OSError, ValueError, ImportError, KeyError, TypeError, RuntimeError) as error:
        if "trust_remote_code" in str(error):
            raise _needs_remote_code(source) from error
        raise SpectuneError(
            f"the model {source.id} must have a config that transformers can read, but it says "
            f"'{_reason(error)}'; check the name and the files, or upgrade transformers"
        ) from error


def _needs_remote_code(source: _Source) -> SpectuneError:
    return SpectuneError(
        f"models run only the code of transformers, but {source.id} brings its own; read that "
        "code and pass --trust-remote-code if you trust it"
    )


@quiet_transformers()
def _check_decodable(config: Any, source: _Source) -> None:
    """Refuse by name what is not a text-only causal LM whose cache can be rolled back."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.quantizers.auto import AutoHfQuantizer

    kind = config.model_type
    remote = _runs_own_code(config, source)
    causal = remote or kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    problem = None
    if config.is_encoder_decoder:
        problem = "is an encoder-decoder"
    elif kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    ):
        problem = "is an encoder, which does not write from left to right"
    elif config.get_text_config() is not config or any(
        part.startswith(("vision", "audio")) for part in config.sub_configs
    ):
        problem = "also takes images or sound"
    elif not causal or _has_other_head(config):
        problem = "is none"
    if problem:
        raise SpectuneError(
            f"target and draft must be text-only causal language models, but {source.id} ({kind}) "
            f"{problem}; use a decoder-only text model such as Llama, Qwen or Mistral"
        )
    stateful = _state_that_stays(config, None if remote else auto.MODEL_FOR_CAUSAL_LM_MAPPING)
    if stateful:
        raise SpectuneError(
            "speculation must take back rejected tokens, which only full and sliding-window "
            f"attention can, but {source.id} ({kind}) has {stateful}; use a model without them"
        )
    method = getattr(config, "quantization_config", None)
    # Transformers would load the weights of a format it does not know as if they were plain.
    if (
        method
        and "gguf_file" not in source.options
        and not AutoHfQuantizer.supports_quant_method(method)
    ):
        raise SpectuneError(
            f"weights must be plain or in a format of transformers, but {source.id} is quantised "
            f"as {_method(method)}; use the unquantised model or a GGUF file"
        )


def _runs_own_code(config: Any, source: _Source) -> bool:
    trusted = source.options.get("trust_remote_code", False)
    return trusted and "AutoModelForCausalLM" in getattr(config, "auto_map", {})


def _has_other_head(config: Any) -> bool:
    """Tell whether the checkpoint was saved for another task than writing text."""
    names = [name for name in config.architectures or [] if "For" in name]
    writes = [name for name in names if "CausalLM" in name or "ConditionalGeneration" in name]
    return bool(names) and not writes


def _state_that_stays(config: Any, classes: Any) -> str | None:
    """Return the parts of the model that cannot forget a token, in words."""
    layers = set(getattr(config, "layer_types", None) or []) - _ROLLBACK_LAYERS
    if layers:
        return f"layers of type {', '.join(sorted(layers))}"
    if getattr(config, "layer_types", None):  # hybrid classes also come with attention alone
        return None
    if classes is not None and getattr(classes[type(config)], "_is_stateful", False):
        return "a recurrent state"
    return None


def _method(quantization: Any) -> str:
    if isinstance(quantization, dict):
        return str(quantization.get("quant_method", "an unnamed method"))
    return str(getattr(quantization.quant_method, "value", quantization.quant_method))


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
            f"'{_reason(error)}'; copy its files again or install what it asks for"
        ) from error


def _load_weights(
    source: _Source, config: Any, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    """Read the weights; every tensor of the model must come from the checkpoint."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GgufConfig

    options = source.options | {"config": config, "dtype": dtype, "output_loading_info": True}
    quantization = getattr(config, "quantization_config", None)
    if "gguf_file" in source.options:
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
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
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
    if quantization is not None and "gguf_file" not in source.options:
        return SpectuneError(
            f"quantised weights must run here, but {source.id} ({_method(quantization)}) does "
            f"not: '{_reason(error)}'; use the unquantised model or a GGUF file"
        )
    if "ignore_mismatched_sizes" in str(error):
        return SpectuneError(
            f"the weights must have the shapes that config.json gives, but those of {source.id} "
            "do not; use the config.json they were saved with"
        )
    return SpectuneError(
        f"the weights of {source.id} must be readable by transformers, but it says "
        f"'{_reason(error)}'; copy its files again, or install what it asks for"
    )


def _reason(error: Exception) -> str:
    """Return the first sentence of another library's message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[a-z)'`\]])\. ", text, maxsplit=1)[0].rstrip(". ")[:200]
