"""Checkpoints of every format load into a head that equals the reference; broken ones do not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_reference import Reference, Variant
from engine.eagle3 import Eagle3Head
from engine.eagle3_checkpoint import TargetFacts, is_eagle3, load_eagle3, save_eagle3
from profiles.errors import SpectuneError

N_TARGET_LAYERS = 8
N_KNOWN = 5
# (token, parent) of each node; four levels, parents before children, -1 is the root.
TREE = [(3, -1), (9, -1), (4, 0), (7, 0), (4, 1), (11, 2), (3, 4), (30, 5), (12, 6), (13, 6)]
LEVELS = [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


class ListCache:
    """Keeps everything it is given."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        if layer_index in self.layers:
            old_keys, old_values = self.layers[layer_index]
            keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
        self.layers[layer_index] = keys, values
        return keys, values


def flat_config(v: Variant, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": v.hidden,
        "intermediate_size": v.inner,
        "num_attention_heads": v.n_heads,
        "num_key_value_heads": v.n_kv_heads,
        "num_hidden_layers": v.n_layers,
        "rms_norm_eps": v.eps,
        "vocab_size": v.target_vocab,
        "draft_vocab_size": v.draft_vocab,
        "max_position_embeddings": 2048,
    } | more


def nested_config(v: Variant, **more: Any) -> dict[str, Any]:
    layer = flat_config(v, head_dim=v.head_dim, rope_theta=v.theta)
    del layer["draft_vocab_size"], layer["architectures"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": v.draft_vocab,
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3"},
    } | more


def flat_tensors(v: Variant) -> dict[str, Tensor]:
    tensors = {name.replace("layers.0.", "midlayer."): t for name, t in v.tensors.items()}
    in_draft = torch.zeros(v.target_vocab, dtype=torch.bool)
    in_draft[v.target_ids] = True
    return tensors | {"d2t": v.d2t, "t2d": in_draft}


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")


def write_safeailab(path: Path) -> Variant:
    v = Variant(head_dim=4)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(flat_config(v)))
    torch.save(flat_tensors(v), path / "pytorch_model.bin")
    return v


def write_specforge(path: Path) -> Variant:
    v = Variant(theta=1e6)
    config = flat_config(
        v,
        architectures=["LlamaForCausalLMEagle3"],
        head_dim=8,
        rope_theta=1e6,
        norm_output=True,  # in these configs no more than "there is a norm before lm_head"
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
    )
    write(path, config, flat_tensors(v) | {"embed_tokens.weight": v.embedding.clone()})
    return v


def write_angelslim(path: Path) -> Variant:
    v = Variant(theta=1e6)
    config = flat_config(
        v,
        architectures=["Eagle3LlamaForCausalLM"],
        head_dim=4,  # wrong: the tensors say 8
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        target_model_type="qwen3",
        aux_hidden_states_layer_ids=[0, 2, 4],
    )
    write(path, config, flat_tensors(v))
    return v


def write_speculators(path: Path) -> Variant:
    v = Variant(norm_before_residual=True, norm_before_fc=True, window=4, draft_vocab=50)
    v.target_ids = torch.arange(50)
    config = nested_config(v, norm_before_fc=True)
    config["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention"],
        "sliding_window": 4,
    }
    own = {"embed_tokens.weight": v.embedding + 1.0, "verifier_lm_head.weight": torch.ones(2)}
    write(path, config, v.tensors | own)
    v.embedding = own["embed_tokens.weight"]
    return v


def write_speculators_qwen3(path: Path) -> Variant:
    v = Variant(qk_norm=True, target_hidden=12)
    config = nested_config(
        v, norm_before_residual=False, eagle_aux_hidden_state_layer_ids=[1, 3, 5]
    )
    config["transformer_layer_config"]["model_type"] = "qwen3"
    own = {"embed_tokens.weight": v.embedding, "d2t": v.d2t}
    write(path, config, v.tensors | own)
    return v


def write_deepspec(path: Path) -> Variant:
    v = Variant(n_features=5, draft_vocab=50)
    v.target_ids = torch.arange(50)
    config = flat_config(v, head_dim=8, target_layer_ids=[0, 2, 3, 4, 6])
    del config["draft_vocab_size"]
    write(path, config, {f"model.{name}": t for name, t in v.tensors.items()})
    return v


def write_eagle31(path: Path) -> Variant:
    v = Variant(fc_norm=True, norm_output=True)
    config = flat_config(v, head_dim=8, eagle_config={"fc_norm": True, "norm_output": True})
    write(path, config, flat_tensors(v))
    return v


def write_deep_biased(path: Path) -> Variant:
    v = Variant(n_layers=2, bias=True)
    write(path, flat_config(v, head_dim=8, attention_bias=True), flat_tensors(v))
    return v


def write_qwen2_biased(path: Path) -> Variant:
    v = Variant(bias=True)
    del v.tensors["layers.0.self_attn.o_proj.bias"], v.tensors["fc.bias"]
    write(path, flat_config(v, head_dim=8), flat_tensors(v))
    return v


FORMATS: dict[Callable[[Path], Variant], tuple[int, ...]] = {
    write_safeailab: (2, 4, 5),
    write_specforge: (1, 3, 5),
    write_angelslim: (1, 3, 5),
    write_speculators: (2, 4, 5),
    write_speculators_qwen3: (1, 3, 5),
    write_deepspec: (1, 3, 4, 5, 7),
    write_eagle31: (2, 4, 5),
    write_deep_biased: (2, 4, 5),
    write_qwen2_biased: (2, 4, 5),
}


def load(path: Path, v: Variant) -> Eagle3Head:
    stored = v.hidden == v.target_hidden
    embedding = v.embedding if stored else torch.randn(v.target_vocab, v.target_hidden)
    return load_eagle3(path, target=TargetFacts(embedding, v.target_hidden, N_TARGET_LAYERS))


def ancestors(node: int) -> list[int]:
    path = [node]
    while TREE[path[-1]][1] >= 0:
        path.append(TREE[path[-1]][1])
    return path[::-1]


def tree_mask(level: list[int], drafted: list[int], window: int | None) -> Tensor:
    """Each node sees the known positions and its own path, as far back as the window."""
    columns = [*range(N_KNOWN), *(N_KNOWN + len(ancestors(n)) - 1 for n in drafted)]
    rows = []
    for node in level:
        own = ancestors(node)
        seen = [True] * N_KNOWN + [n in own for n in drafted]
        here = N_KNOWN + len(own) - 1
        near = [window is None or here - column < window for column in columns]
        rows.append([a and b for a, b in zip(seen, near, strict=True)])
    return torch.tensor(rows)[None, None]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("write_format", FORMATS)
@torch.no_grad()
def test_b13_b14_logits_equal_the_reference_on_every_root_path(
    tmp_path: Path, write_format: Callable[[Path], Variant]
) -> None:
    """Known tokens and four fed-back levels of a tree, two rows, against one path at a time."""
    v = write_format(tmp_path)
    head = load(tmp_path, v)
    features = torch.randn(2, N_KNOWN, v.n_features * v.target_hidden)
    tokens = torch.randint(v.target_vocab, (2, N_KNOWN))
    cache = ListCache()
    positions = torch.arange(N_KNOWN).expand(2, -1)
    known = head(tokens, head.fuse(features), positions, cache)
    hidden: dict[int, Tensor] = {-1: known[:, -1]}
    drafted: list[int] = []
    for depth, level in enumerate(LEVELS):
        drafted += level
        out = head(
            torch.tensor([[TREE[n][0] for n in level]] * 2),
            torch.stack([hidden[TREE[n][1]] for n in level], dim=1),
            torch.full((2, len(level)), N_KNOWN + depth),
            cache,
            tree_mask(level, drafted, v.window),
        )
        hidden |= {n: out[:, i] for i, n in enumerate(level)}

    for row in range(2):
        for node in range(len(TREE)):
            reference = Reference(v)
            for i in range(N_KNOWN):
                fused = reference.fuse(features[row, i])
                state = reference.step(int(tokens[row, i]), fused, i)
                wanted = reference.logits(state)
                torch.testing.assert_close(head.logits(known[row, i]), wanted, atol=1e-5, rtol=0)
            for depth, n in enumerate(ancestors(node)):
                state = reference.step(TREE[n][0], state, N_KNOWN + depth)
            wanted = reference.logits(state)
            torch.testing.assert_close(head.logits(hidden[node][row]), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("write_format", FORMATS)
def test_b15_recognises_format_layers_and_vocabulary(
    tmp_path: Path, write_format: Callable[[Path], Variant]
) -> None:
    """Every format is a head, names its layers in our convention and maps to its target ids."""
    v = write_format(tmp_path)
    assert is_eagle3(tmp_path)
    head = load(tmp_path, v)
    assert head.config.feature_layers == FORMATS[write_format]
    assert head.to_target(torch.arange(v.draft_vocab)).tolist() == v.target_ids.tolist()
    assert not head.training
    assert not any(p.requires_grad for p in head.parameters())


@pytest.mark.parametrize("write_format", FORMATS)
@torch.no_grad()
def test_a_saved_head_loads_as_the_same_head(
    tmp_path: Path, write_format: Callable[[Path], Variant]
) -> None:
    """The flat format keeps every weight, flag and id; only a foreign embedding is dropped."""
    v = write_format(tmp_path / "in")
    head = load(tmp_path / "in", v)
    save_eagle3(head, tmp_path / "out")
    if v.hidden == v.target_hidden:
        again = load(tmp_path / "out", v)
        assert again.config == head.config
        assert again.state_dict().keys() == head.state_dict().keys()
        for name, tensor in head.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
        ids = torch.arange(v.draft_vocab)
        assert torch.equal(again.to_target(ids), head.to_target(ids))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_shares_the_targets_embedding_where_the_stored_one_is_the_same(tmp_path: Path) -> None:
    """A stored copy costs no memory; the head takes dtype and device of the target's."""
    v = write_specforge(tmp_path)
    facts = TargetFacts(v.embedding.bfloat16(), v.target_hidden, N_TARGET_LAYERS)
    head = load_eagle3(tmp_path, target=facts)
    assert head.embed_tokens is facts.embed_tokens
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("fault", ["renamed", "removed", "misshaped"])
@pytest.mark.parametrize("name", Variant().tensors)
def test_b14_a_wrong_tensor_is_named(tmp_path: Path, name: str, fault: str) -> None:
    """Renaming, removing or reshaping any tensor is refused with its name."""
    v = Variant()
    tensors = dict(v.tensors)
    tensor = tensors.pop(name)
    if fault == "renamed":
        tensors[name + "_old"] = tensor
    if fault == "misshaped":
        tensors[name] = torch.cat([tensor, tensor])
    write(tmp_path, flat_config(v, head_dim=8), tensors | {"d2t": v.d2t})
    with pytest.raises(SpectuneError) as caught:
        load(tmp_path, v)
    assert name in str(caught.value)
    if fault == "renamed":
        assert name + "_old" in str(caught.value)


def change_d2t(v: Variant, kind: str) -> dict[str, Tensor]:
    d2t = v.d2t.clone()
    if kind == "missing":
        return {}
    if kind == "too large":
        d2t[-1] = v.target_vocab
    if kind == "negative":
        d2t[0] = -1
    if kind == "repeated":
        d2t[1] = d2t[0] - 1
    if kind == "short":
        d2t = d2t[:-1]
    return {"d2t": d2t}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "no d2t"),
        ("too large", "points to token 69"),
        ("negative", "points to token"),
        ("repeated", "to only 19 target tokens"),
        ("short", "d2t"),
    ],
)
def test_b13_a_wrong_vocabulary_map_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    """A map that leaves the target's vocabulary, repeats itself or is absent is an error."""
    v = Variant()
    v.target_ids = torch.arange(1, 21)
    write(tmp_path, flat_config(v, head_dim=8), v.tensors | change_d2t(v, kind))
    with pytest.raises(SpectuneError, match=words):
        load(tmp_path, v)


def test_an_eagle1_head_is_refused_by_name(tmp_path: Path) -> None:
    """What was found and what is supported stand in the message."""
    v = Variant()
    tensors = {"fc.weight": torch.ones(16, 32), "layers.0.mlp.up_proj.weight": torch.ones(24, 16)}
    write(tmp_path, flat_config(v), tensors)
    assert is_eagle3(tmp_path)
    with pytest.raises(SpectuneError, match=r"EAGLE-1 or EAGLE-2 .*\[16, 32\].*supported are"):
        load(tmp_path, v)


def test_other_speculators_are_refused_by_name(tmp_path: Path) -> None:
    """The nested format also holds other kinds of heads."""
    v = Variant()
    write(tmp_path, nested_config(v, speculators_model_type="dflash"), v.tensors)
    with pytest.raises(SpectuneError, match="'dflash'"):
        load(tmp_path, v)


def test_a_whole_model_is_not_a_head(tmp_path: Path) -> None:
    """A causal LM or an empty folder is left to others."""
    v = Variant()
    write(tmp_path, flat_config(v), {"model.layers.0.mlp.up_proj.weight": torch.ones(24, 16)})
    assert not is_eagle3(tmp_path)
    assert not is_eagle3(tmp_path / "nothing")
    with pytest.raises(SpectuneError, match="no EAGLE-3 head"):
        load(tmp_path, v)


def test_b15_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    """Wrong width, wrong depth and wrong embedding are each told apart."""
    v = write_specforge(tmp_path)
    with pytest.raises(SpectuneError, match="width 48, no multiple"):
        load_eagle3(tmp_path, target=TargetFacts(v.embedding, 17, N_TARGET_LAYERS))
    with pytest.raises(SpectuneError, match=r"names \[1, 3, 5\]"):
        load_eagle3(tmp_path, target=TargetFacts(v.embedding, 16, 4))
    with pytest.raises(SpectuneError, match="needs an embedding"):
        load_eagle3(tmp_path, target=TargetFacts(torch.ones(60, 16), 16, N_TARGET_LAYERS))


@pytest.mark.parametrize("n_layers", range(1, 9))
def test_b15_the_usual_layers_are_only_assumed_where_a_target_is_deep_enough(
    tmp_path: Path, n_layers: int
) -> None:
    """2, half and last but 3 would repeat, fall or turn negative below seven layers."""
    v = write_safeailab(tmp_path)
    facts = TargetFacts(v.embedding, v.target_hidden, n_layers)
    if n_layers >= 7:
        expected = (2, n_layers // 2, n_layers - 3)
        assert load_eagle3(tmp_path, target=facts).config.feature_layers == expected
        return
    with pytest.raises(SpectuneError, match=f"target of {n_layers} layers is too shallow"):
        load_eagle3(tmp_path, target=facts)


@pytest.mark.parametrize("n_layers", range(1, 6))
@pytest.mark.parametrize("last", range(-3, 7))
def test_b15_named_layers_lie_within_the_target(tmp_path: Path, n_layers: int, last: int) -> None:
    """The output of layer i is hidden state i + 1; -1 names the embeddings. The last hidden
    state is normed, so it is no feature; what lies outside is refused, never wrapped around."""
    v = Variant()
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, last]}}
    write(tmp_path, flat_config(v, head_dim=8, **ids), flat_tensors(v))
    facts = TargetFacts(v.embedding, v.target_hidden, n_layers)
    if n_layers > 1 and 0 <= last + 1 < n_layers:
        assert load_eagle3(tmp_path, target=facts).config.feature_layers == (0, 1, last + 1)
        return
    with pytest.raises(SpectuneError, match=r"config.json names \[0, 1, "):
        load_eagle3(tmp_path, target=facts)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "mixes"),
        ({"num_attention_heads": None}, r"num_attention_heads is null: it must be a whole number"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    """A variant without an implementation is refused, never approximated."""
    v = Variant()
    write(tmp_path, flat_config(v, head_dim=8, **more), flat_tensors(v))
    with pytest.raises(SpectuneError, match=words):
        load(tmp_path, v)


def test_b14_damaged_files_are_refused_without_running_them(tmp_path: Path) -> None:
    """Cut weights, foreign pickles and missing files give one sentence."""
    v = write_specforge(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(SpectuneError, match="Cannot read the weights"):
        load(tmp_path, v)
    with pytest.raises(SpectuneError, match="Cannot read the weights"):
        is_eagle3(tmp_path)
    weights.unlink()
    with pytest.raises(SpectuneError, match="has neither"):
        load(tmp_path, v)
    torch.save({"fc.weight": Path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SpectuneError, match="Cannot read the weights"):
        load(tmp_path, v)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpectuneError, match="readable config.json"):
        load(tmp_path, v)


def test_saving_keeps_the_public_key_list(tmp_path: Path) -> None:
    """The flat family's names, as other engines read them."""
    v = write_specforge(tmp_path / "in")
    save_eagle3(load(tmp_path / "in", v), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == flat_tensors(v).keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert config["rope_theta"] == 1e6
    assert config["torch_dtype"] == "float32"
