"""Tiny targets, drafts and prompt files on disk, for tests of whole jobs.

Every folder is what a user would pass: weights, configuration, tokenizer and chat template.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import toy_profiles
from engine.fingerprint import describe_device
from engine.pair import LoadedTarget, load_draft
from profiles import Profile
from tiny import tiny_model, twin_with_noise

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ("<bos>", "<eos>", "<turn>")
VOCAB = len(SPECIAL) + len(ALPHABET)
MAX_POSITIONS = 256

TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'][0] + ':' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<turn>a:{% endif %}"
)


def tokenizer(order: int = 1) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer; `order` -1 gives the same tokens other ids."""
    tokens = [*SPECIAL, *ALPHABET[::order]]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<turn>"],
        chat_template=TEMPLATE,
    )


def small_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random 2-layer target that never ends a text by chance."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": MAX_POSITIONS}
    return tiny_model("llama", seed, torch.float32, **sizes | changes)


def save(model: PreTrainedModel, folder: Path, order: int = 1) -> Path:
    """Save a model with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer(order).save_pretrained(folder)
    return folder


def save_target(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random target."""
    return save(small_llama(seed, **changes), folder)


def save_noisy_copy(target: Path, folder: Path, amount: float = 0.1) -> Path:
    """Save a copy of a target with noisy weights: a draft that is right only sometimes."""
    return save(twin_with_noise(LlamaForCausalLM.from_pretrained(target), amount), folder)


def save_cycle(folder: Path, length: int = 3) -> Path:
    """Save a target that repeats `length` tokens for ever, so that looking back always pays."""
    model = small_llama(tie_word_embeddings=False, hidden_size=264)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = torch.eye(VOCAB, model.config.hidden_size)
        model.model.embed_tokens.weight.copy_(rows)
        first = len(SPECIAL) + ALPHABET.index("a")
        for token in range(VOCAB):
            model.lm_head.weight[first + (token + 1 - first) % length].add_(rows[token])
    return save(model, folder)


def write_prompts(path: Path, n: int = 12, n_turns: int = 1) -> Path:
    """Write prompts that are no near-duplicates of each other, one JSON object a line."""
    records = []
    for index in range(n):
        rng = torch.Generator().manual_seed(index)
        letters = torch.randint(97, 123, (n_turns, 20), generator=rng).tolist()
        records.append({"turns": [bytes(turn).decode() for turn in letters]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def save_heavy(target: Path, folder: Path, n_extra: int = 6) -> Path:
    """Save a draft that says what the target says and costs several times as much."""
    model = LlamaForCausalLM.from_pretrained(target)
    n_layers = model.config.num_hidden_layers
    heavy = small_llama(num_hidden_layers=n_layers + n_extra)
    heavy.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in heavy.model.layers[n_layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return save(heavy, folder)


def speculating_profile(
    loaded: LoadedTarget, draft: str = "lookup", changes: dict[str, Any] | None = None
) -> Profile:
    """Return a profile that fits this machine, with invented evidence and `changes` made."""
    facts = {
        "target": loaded.ref.model_dump(mode="json"),
        "draft": load_draft(draft, loaded).ref.model_dump(mode="json"),
        "device": describe_device(loaded.target.device),
        "sampling": {"temperature": 0.0},
        "tree": {"depth": 3, "width": 2, "top_k": 2, "nodes": 5},
        "measurements": None,
    }
    return toy_profiles.profile(facts | (changes or {}))


def read(path: Path) -> bytes:
    """Return what a written file holds, unpacked."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data
