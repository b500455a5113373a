"""Small random models for the tests; every one is made from a seed, nothing is downloaded."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from engine.cache import KVCache
from engine.eagle3 import Eagle3Config, Eagle3Head
from engine.target import Target
from engine.trace import text_features

VOCAB = 128

WIDE = "éß日本🙂"
"""Characters that the tiny tokenizer splits into two to four tokens."""

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


def tiny_head(
    model: PreTrainedModel,
    seed: int = 0,
    *,
    texts: Sequence[Sequence[int]] = (),
    draft_vocab: int = 32,
    **changes: Any,
) -> Eagle3Head:
    """Return a random EAGLE-3 head for a model, over `draft_vocab` of its tokens.

    With `texts` its output layer is fitted to them by least squares, so that it is often right.
    """
    torch.manual_seed(seed)
    config, n_layers = model.config, model.config.num_hidden_layers
    sizes: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "n_layers": 1,
        "target_hidden_size": config.hidden_size,
        "n_features": 3,
        "target_vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-6,
        "rope": {"rope_type": "default", "rope_theta": 10_000.0},
        "feature_layers": (0, n_layers // 2, n_layers - 1),
    }
    embedding = model.get_input_embeddings().weight.detach()
    head = Eagle3Head(Eagle3Config(**sizes | changes), embedding).to(model.dtype).eval()
    common = [token for token, _ in Counter(t for text in texts for t in text).most_common()]
    others = [token for token in torch.randperm(config.vocab_size).tolist() if token not in common]
    head.target_ids = torch.tensor(sorted((common + others)[:draft_vocab]))
    if texts:
        _fit(head, Target(model), texts)
    return head


@torch.no_grad()
def _fit(head: Eagle3Head, target: Target, texts: Sequence[Sequence[int]]) -> None:
    """Solve for the output layer that predicts the known texts from the target's features."""
    states, wanted = [], []
    for text in texts:
        features = text_features(target, list(text), head.config.feature_layers)
        assert features is not None
        n = len(text) - 2
        cache = KVCache(head.config.n_layers, n)
        hidden = head(
            torch.tensor([text[1:-1]]),
            head.fuse(features[None, :-2]),
            torch.arange(n)[None],
            cache,
        )
        states.append(head.norm(hidden)[0])
        assert head.target_ids is not None
        wanted.append(torch.tensor(text[2:])[:, None] == head.target_ids)
    logits = 8 * torch.cat(wanted).to(head.lm_head.weight.dtype)
    head.lm_head.weight.copy_(torch.linalg.lstsq(torch.cat(states), logits).solution.T)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, so that most characters beyond ASCII are split.

    Ids 0, 1 and 2 are special, the last 8 of VOCAB have no token, as in a padded embedding.
    """
    wide = set(WIDE.encode())
    visible = [10, *range(32, 127)]
    others = [byte for byte in range(128, 256) if byte not in wide]
    shown = bytes_to_unicode()
    tokens = ["<pad>", "<s>", "</s>"]
    tokens += [shown[byte] for byte in [*sorted(wide), *visible, *others]]
    vocabulary = {token: i for i, token in enumerate(tokens[: VOCAB - 8])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
