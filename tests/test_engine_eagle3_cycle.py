"""A head and a target built by hand, whose right answers are known: is the vocabulary map read?

The target continues every token by a fixed permutation. The head does the same in its own
vocabulary: attention sees the present token alone and passes its embedding on, and the output
layer names the successor. If any id were mapped wrongly, its draft would be rejected.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from engine.decode import Request, decode
from engine.eagle3_checkpoint import TargetFacts, load_eagle3
from engine.eagle3_draft import Eagle3Draft
from engine.sampling import Sampler
from engine.stopping import StopRules
from engine.target import Target
from profiles import TreeConfig
from profiles.errors import SpectuneError
from tiny import tiny_model

VOCAB = 32
SPOKEN = [3, 4, 9, 11, 12, 20, 21, 30]
"""Tokens of the cycle, each followed by the next; they lie scattered in the vocabulary."""
NEXT = dict(zip(SPOKEN, SPOKEN[1:] + SPOKEN[:1], strict=True))
DEPTH = 3
N_NEW = 1 + 5 * (DEPTH + 1)


@pytest.fixture(scope="module")
def cycle() -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": VOCAB, "num_hidden_layers": 8}
    model = tiny_model("llama", 0, torch.float32, tie_word_embeddings=False, **sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.lm_head.weight.zero_()
        for token in range(VOCAB):
            model.lm_head.weight[NEXT.get(token, SPOKEN[0]), token] = 1
    return model


def tensors(target_ids: list[int]) -> dict[str, Tensor]:
    """Return the head over a draft vocabulary of `target_ids`."""
    eye, wide = torch.eye(VOCAB), torch.zeros(VOCAB, 2 * VOCAB)
    head = torch.zeros(len(target_ids), VOCAB)
    for row, token in enumerate(target_ids):
        for before, after in NEXT.items():
            if after == token:
                head[row, before] = 1
    layer = {
        "self_attn.q_proj": wide,
        "self_attn.k_proj": wide.clone(),
        "self_attn.v_proj": torch.cat([eye, torch.zeros(VOCAB, VOCAB)], dim=1),
        "self_attn.o_proj": eye.clone(),
        "mlp.gate_proj": torch.zeros(4, VOCAB),
        "mlp.up_proj": torch.zeros(4, VOCAB),
        "mlp.down_proj": torch.zeros(VOCAB, 4),
        "input_layernorm": torch.ones(VOCAB),
        "hidden_norm": torch.zeros(VOCAB),  # what was fed back is forgotten
        "post_attention_layernorm": torch.ones(VOCAB),
    }
    named = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
    fc = torch.zeros(VOCAB, 3 * VOCAB)
    return named | {"fc.weight": fc, "norm.weight": torch.ones(VOCAB), "lm_head.weight": head}


def write(path: Path, target_ids: list[int], d2t: Tensor | None) -> Path:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": VOCAB,
        "intermediate_size": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(target_ids),
        "norm_before_residual": True,
        "layer_types": ["sliding_attention"],
        "sliding_window": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    extra = {} if d2t is None else {"d2t": d2t}
    save_file(tensors(target_ids) | extra, path / "model.safetensors")
    return path


def offsets(target_ids: list[int]) -> Tensor:
    return torch.tensor(target_ids) - torch.arange(len(target_ids))


def decode_with(path: Path, model: PreTrainedModel) -> Request:
    embedding = model.get_input_embeddings().weight.detach()
    head = load_eagle3(path, target=TargetFacts(embedding, VOCAB, 8))
    target = Target(model)
    rules = StopRules(N_NEW)
    request = Request(target, Eagle3Draft(head), [SPOKEN[0], SPOKEN[1]], Sampler(), rules)
    for _ in decode(request, lambda _: TreeConfig.chain(DEPTH)):
        pass
    expected = [SPOKEN[1]]
    while len(expected) <= N_NEW:
        expected.append(NEXT[expected[-1]])
    assert request.generated == expected[1:]
    return request


@pytest.mark.parametrize("kind", ["offsets", "zero offsets", "no map"])
def test_b13_a_head_that_is_always_right_is_fully_accepted(
    cycle: PreTrainedModel, tmp_path: Path, kind: str
) -> None:
    ids = SPOKEN if kind == "offsets" else list(range(VOCAB))
    request = decode_with(write(tmp_path, ids, None if kind == "no map" else offsets(ids)), cycle)
    assert request.stats.n_rounds == 5
    assert request.stats.n_drafted == sum(request.stats.accepted_by_depth) == 5 * DEPTH


def test_b13_a_shifted_map_is_never_accepted(cycle: PreTrainedModel, tmp_path: Path) -> None:
    """The test above can fail: with each id one too high the same head is always rejected."""
    wrong = [token + 1 for token in SPOKEN]
    request = decode_with(write(tmp_path, SPOKEN, offsets(wrong)), cycle)
    assert sum(request.stats.accepted_by_depth) == 0


def test_b13_ids_in_place_of_offsets_are_refused(cycle: PreTrainedModel, tmp_path: Path) -> None:
    """They point beyond the vocabulary or twice to one token, as soon as the map is long."""
    write(tmp_path, SPOKEN, torch.tensor(SPOKEN))
    with pytest.raises(SpectuneError, match="points to token 37"):
        decode_with(tmp_path, cycle)
