"""Small random models for the tests; every one is made from a seed, nothing is downloaded."""

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

VOCAB = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda **kw: LlamaConfig(**_COMMON | {"tie_word_embeddings": True} | kw),
    "qwen3": lambda **kw: Qwen3Config(**_COMMON | {"head_dim": 24} | kw),
    "mistral": lambda **kw: MistralConfig(**_COMMON | {"sliding_window": 8} | kw),
    "gemma2": lambda **kw: Gemma2Config(
        **_COMMON | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16} | kw
    ),
    "neox": lambda **kw: GPTNeoXConfig(
        **{k: v for k, v in _COMMON.items() if k != "num_key_value_heads"} | kw
    ),
}


def tiny_model(
    kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    """Return a random model; float64, so that two ways of computing a logit agree to 1e-12."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**changes), dtype=torch.float32)
    with torch.no_grad():  # default weights are so small that every text ends in a loop
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.12)
    return model.to(dtype).eval()


def twin_with_noise(model: PreTrainedModel, amount: float, seed: int = 1) -> PreTrainedModel:
    """Return a copy of a model with noisy weights: a draft that is right only sometimes."""
    copy = type(model)(model.config).to(model.dtype).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(amount * parameter.std() * noise.to(parameter.dtype))
    return copy
