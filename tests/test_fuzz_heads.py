"""EAGLE-3 checkpoints and configs of targets, edited at random: what loads is right."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.eagle3_checkpoint import is_eagle3, load_eagle3, save_eagle3
from engine.eagle3_config import TargetFacts
from engine.eagle3_draft import Eagle3Draft
from engine.pair import load_target
from engine.target import Target
from fuzzing import cases, check_message, edited, mangled, run, within
from lossless_cases import Wanted, Way
from lossless_cases import run as decode
from pairs import save_target
from profiles import GREEDY, TreeConfig
from profiles.errors import SpectuneError
from tiny import tiny_head, tiny_model

TREE = TreeConfig(depth=3, width=2, top_k=2, nodes=6)

State = dict[str, Any]


@st.composite
def edited_state(draw: st.DrawFn, tensors: dict[str, Tensor]) -> State:
    """Draw a state dict with one or two tensors removed, renamed, doubled or made unusable."""
    state: State = dict(tensors)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(state)))
        edit = draw(st.sampled_from(sorted(EDITS)))
        if edit == "remove":
            del state[name]
        elif edit == "rename":
            others = (f"model.{name}", f"{name}.x", name.replace("midlayer", "layers.0"), "fc.x")
            state[draw(st.sampled_from((*others, "layers.x.y", "layers.7.y", "")))] = state.pop(
                name
            )
        elif edit == "double":
            state[name.replace("midlayer.", "layers.0.")] = state[name] + 1
        elif isinstance(state[name], Tensor):
            state[name] = EDITS[edit](state[name])
    return state


def _with(value: float) -> Any:
    def fill(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        if changed.is_floating_point() or abs(value) < 2**60:
            changed.view(-1)[:1] = value
        return changed

    return fill


def _to(dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return (tensor.real if tensor.is_complex() else tensor).to(dtype)

    return cast


EDITS: dict[str, Any] = {
    **dict.fromkeys(("remove", "rename", "double")),
    "int8": _to(torch.int8),
    "int64": _to(torch.int64),
    "bool": _to(torch.bool),
    "float64": _to(torch.float64),
    "float32": _to(torch.float32),
    "float8": lambda t: t.to(torch.float8_e4m3fn) if t.is_floating_point() else t,
    "complex": lambda t: t.to(torch.complex64),
    "flat": lambda t: t.reshape(-1),
    "scalar": lambda t: t.reshape(-1)[0] if t.numel() else t,
    "empty": lambda t: t[:0],
    "turned": lambda t: t.T.contiguous() if t.dim() == 2 else t,
    "longer": lambda t: torch.cat([t, t]),
    "deeper": lambda t: t[None],
    "minus one": _with(-1),
    "large": _with(1e6),
    "huge": _with(1e38),
    "nan": _with(float("nan")),
    "infinite": _with(float("inf")),
}


@pytest.fixture(scope="module")
def head_case() -> tuple[Wanted, TargetFacts, list[int]]:
    """Return a request, what a head must know of its target, and the plain text."""
    model = tiny_model("llama")
    wanted = Wanted("llama", model, Target(model), [5, 9, 7, 5, 9], GREEDY, 0, 8)
    facts = TargetFacts(model.get_input_embeddings().weight.detach(), model.config.hidden_size, 4)
    return wanted, facts, decode(wanted).generated


def check_head(folder: Path, head_case: tuple[Wanted, TargetFacts, list[int]]) -> None:
    """Check that a folder holds a head that changes no text, or is refused in a sentence."""
    wanted, facts, plain = head_case
    try:
        with within():
            is_eagle3(folder)
            head = load_eagle3(folder, target=facts)
    except SpectuneError as error:
        check_message(str(error))
        return
    assert all(bool(p.isfinite().all()) for p in head.parameters())
    with within():
        assert decode(wanted, Way("edited", Eagle3Draft(head), TREE)).generated == plain


def save(folder: Path, config: Any, state: State, as_bin: bool) -> None:
    """Write a head as its author would have."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if as_bin:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file({n: t.clone() for n, t in state.items()}, folder / "model.safetensors")


@cases(few=120, many=2500)
def test_an_edited_head_drafts_or_is_refused(
    n_cases: int, head_case: tuple[Wanted, TargetFacts, list[int]], tmp_path: Path
) -> None:
    save_eagle3(tiny_head(head_case[0].model), tmp_path / "good")
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    config |= {"max_position_embeddings": 64, "rope_scaling": None, "hidden_act": "silu"}
    nested = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "transformer_layer_config": config,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
    }
    yarn = config | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    tensors = load_file(tmp_path / "good" / "model.safetensors")
    configs = st.sampled_from([config, nested, yarn])

    @given(
        st.one_of(configs, configs.flatmap(edited), configs.flatmap(edited)),
        st.one_of(st.just(tensors), edited_state(tensors)),
        st.booleans(),
    )
    def check(config: Any, state: State, as_bin: bool) -> None:
        save(tmp_path / "head", config, state, as_bin)
        check_head(tmp_path / "head", head_case)

    run(check, n_cases)


@cases(few=40, many=800)
def test_mangled_files_of_a_head_are_refused(
    n_cases: int, head_case: tuple[Wanted, TargetFacts, list[int]], tmp_path: Path
) -> None:
    good, folder = tmp_path / "good", tmp_path / "head"
    save_eagle3(tiny_head(head_case[0].model), good)
    state = load_file(good / "model.safetensors")
    torch.save(state, good / "pytorch_model.bin")
    files = {
        name: (good / name).read_bytes()
        for name in ("config.json", "model.safetensors", "pytorch_model.bin")
    }
    objects = [[], state["fc.weight"], {"state_dict": state}, {1: state["fc.weight"]}, None, "x"]

    @given(
        st.one_of(
            *(st.tuples(st.just(name), mangled(data)) for name, data in files.items()),
            st.tuples(st.just("object"), st.sampled_from(range(len(objects)))),
        )
    )
    def check(drawn: tuple[str, Any]) -> None:
        name, content = drawn
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        weights = (
            "pytorch_model.bin" if name in ("pytorch_model.bin", "object") else "model.safetensors"
        )
        for part in ("config.json", weights):
            (folder / part).write_bytes(files[part])
        if name == "object":
            torch.save(objects[content], folder / weights)
        else:
            (folder / name).write_bytes(content)
        check_head(folder, head_case)

    run(check, n_cases)


@cases(few=20, many=500)
def test_an_edited_target_decodes_or_is_refused(n_cases: int, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target")
    files = {
        name: json.loads((folder / name).read_text("utf-8"))
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    }
    choices = [st.tuples(st.just(name), edited(data)) for name, data in files.items()]

    @given(st.one_of(choices))
    def check(drawn: tuple[str, Any]) -> None:
        name, data = drawn
        for other, content in files.items():
            (folder / other).write_text(json.dumps(data if other == name else content), "utf-8")
        try:
            with within(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = load_target(str(folder), dtype="float32", device="cpu")
        except SpectuneError as error:
            check_message(str(error))
            return
        assert all(isinstance(i, int) for i in loaded.eos_ids)

    run(check, n_cases)
