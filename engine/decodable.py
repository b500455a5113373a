"""Refusals by name, from the files and the config of a model, before its weights are read.

Must not know where a model comes from.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from profiles.errors import SpectuneError

# Every other kind of layer keeps a state that cannot be rolled back token by token.
_ROLLBACK_LAYERS = {"full_attention", "sliding_attention"}
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model", "tekken.json", "*.tiktoken")
MAX_LAYERS = 1000
"""More are a mistake that would take hours to build."""
_KINDS: dict[str, TypeAdapter[Any]] = {
    "architectures": TypeAdapter(Sequence[str] | None),
    "auto_map": TypeAdapter(Mapping[str, Any] | None),
    "is_decoder": TypeAdapter(bool | None),
    "is_encoder_decoder": TypeAdapter(bool | None),
    "layer_types": TypeAdapter(Sequence[str] | None),
}
"""What is read of a config beside its sizes."""
_FULL_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def is_model(path: Path) -> bool:
    """Tell whether a folder holds what `load_model` answers for, if only to refuse it.

    True for models and adapters; False for weights without a tokenizer, which may be anything.
    """
    if (path / "config.json").is_file():
        return _has_any(path, _TOKENIZER_FILES)
    return (path / "adapter_config.json").is_file() or _has_any(path, ("*.gguf",))


def contents(path: Path) -> str:
    """Return the first names in a folder, as words for a sentence."""
    names = sorted(entry.name for entry in path.iterdir())
    return (", ".join(names[:5]) + (", ..." if len(names) > 5 else "")) or "nothing"


def check_folder(path: Path) -> None:
    """Refuse a folder that does not hold a model with its tokenizer.

    Raises:
        SpectuneError: Names what is missing.
    """
    if (path / "adapter_config.json").exists() and not _has_any(path, _FULL_WEIGHTS):
        raise SpectuneError(
            f"a model folder must hold full weights, but {path} holds only an adapter; merge it "
            "into its base model first (peft: merge_and_unload) and save the result"
        )
    if not (path / "config.json").is_file():
        gguf = next(iter(sorted(path.glob("*.gguf"))), None)
        remedy = f"pass the file {gguf}" if gguf else "pass the folder of a saved model"
        raise SpectuneError(
            f"a model folder must hold a config.json, but {path} holds {contents(path)}; {remedy}"
        )
    if not _has_any(path, _TOKENIZER_FILES):
        raise SpectuneError(
            f"a model folder must hold its tokenizer, but {path} has no tokenizer.json or other "
            "vocabulary; copy the tokenizer's files from the model it was made from"
        )


def _has_any(path: Path, patterns: Iterable[str]) -> bool:
    return any(any(path.glob(pattern)) for pattern in patterns)


def check_decodable(config: Any, model_id: str, *, trusted: bool, unpacked: bool) -> None:
    """Refuse by name what is not a text-only causal LM whose cache can be rolled back.

    Args:
        config: The model's configuration.
        model_id: How the user knows the model.
        trusted: Its own Python code may run.
        unpacked: Its weights are unpacked while loading, whatever format they are stored in.

    Raises:
        SpectuneError: The engine cannot decode it, or transformers cannot read its weights.
    """
    from transformers.models.auto import modeling_auto as auto
    from transformers.quantizers.auto import AutoHfQuantizer

    kind, n_layers = config.model_type, getattr(config, "num_hidden_layers", 1)
    if not isinstance(n_layers, int) or not 1 <= n_layers <= MAX_LAYERS:
        raise SpectuneError(
            f"a model must have 1 to {MAX_LAYERS} layers, but the config.json of {model_id} says "
            f"{n_layers}; use the one it was saved with"
        )
    _check_types(config, model_id)
    remote = trusted and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    problem = _other_kind(config, remote)
    if problem:
        raise SpectuneError(
            f"target and draft must be text-only causal language models, but {model_id} ({kind}) "
            f"{problem}; use a decoder-only text model such as Llama, Qwen or Mistral"
        )
    stateful = _state_that_stays(config, None if remote else auto.MODEL_FOR_CAUSAL_LM_MAPPING)
    if stateful:
        raise SpectuneError(
            "speculation must take back rejected tokens, which only full and sliding-window "
            f"attention can, but {model_id} ({kind}) has {stateful}; use a model without them"
        )
    method = getattr(config, "quantization_config", None)
    # Transformers would load the weights of a format it does not know as if they were plain.
    if method and not unpacked and not AutoHfQuantizer.supports_quant_method(method):
        raise SpectuneError(
            f"weights must be plain or in a format of transformers, but {model_id} is quantised "
            f"as {quantization_name(method)}; use the unquantised model or a GGUF file"
        )


def _check_types(config: Any, model_id: str) -> None:
    """Refuse values of another kind than any model's, which transformers takes as they are."""
    for name, kind in _KINDS.items():
        value = getattr(config, name, None)
        try:
            kind.validate_python(value, strict=True)
        except ValidationError as error:
            raise SpectuneError(
                f"{name} in the config.json of {model_id} must be what models have there, but is "
                f"{value!r}; use the config.json it was saved with"
            ) from error


def quantization_name(quantization: Any) -> str:
    """Return the name of the method in a quantisation config, as a mapping or an object."""
    if isinstance(quantization, dict):
        return str(quantization.get("quant_method", "an unnamed method"))
    return str(getattr(quantization.quant_method, "value", quantization.quant_method))


def _other_kind(config: Any, remote: bool) -> str | None:
    """Return what the model is instead of a text-only causal LM, as the end of a sentence."""
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    if config.is_encoder_decoder:
        return "is an encoder-decoder"
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        return "is an encoder, which does not write from left to right"
    if config.get_text_config() is not config or any(
        part.startswith(("vision", "audio")) for part in config.sub_configs
    ):
        return "also takes images or sound"
    causal = remote or kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return "is none" if not causal or _has_other_head(config) else None


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
