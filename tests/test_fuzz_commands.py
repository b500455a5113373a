"""Command lines and what-if questions of any content: done, or refused in a sentence."""

import argparse
import json
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import autotune.bench.measuring
import autotune.job
import autotune.pipeline
import autotune.rechecking
import engine.decoder
import engine.pair
import profiles
import toy_what_if
from autotune.commands.cli import parser
from autotune.what_if.ask import what_if
from autotune.what_if.basis import basis_of_profile
from autotune.what_if.command import document
from autotune.what_if.scenario import KEYS
from autotune.what_if.table import print_answers
from engine.devices import resolve_device, resolve_dtype
from engine.pair import LoadedTarget, load_target
from fuzzing import NUMBERS, TEXTS, cases, check_message, leaves, run, used_or_refused, within
from pairs import save_noisy_copy, save_target, speculating_profile, write_prompts
from profiles.errors import SpectuneError

SUBCOMMANDS = next(
    action.choices
    for action in parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)
SLOW_FILES = ("html", "plot")  # pictures take half a second each; other tests draw them


def named(path: object) -> str:
    """Return a path as an argument: what the system could not decode is escaped."""
    return str(path).replace("\0", "")


class Pool:
    """A folder with everything a command line could name."""

    def __init__(self, folder: Path) -> None:
        self.target = save_target(folder / "target")
        noisy = save_noisy_copy(self.target, folder / "noisy")
        loaded = load_target(str(self.target), dtype="float32", device="cpu")
        profiles.save(speculating_profile(loaded, str(noisy)), folder / "fast.yaml")
        profiles.save(speculating_profile(loaded), folder / "lookup.yaml")
        toy_what_if.write(folder)
        (folder / "binary.yaml").write_bytes(bytes(range(256)))
        (folder / "empty.yaml").touch()
        write_prompts(folder / "prompts.jsonl", n=4)
        (folder / "prompts.txt").write_text("abc\nbcd\ncde\n")
        self.loaded: LoadedTarget = loaded
        self.files = [
            *("fast.yaml", "lookup.yaml", "toy.yaml", "toy.yaml", "binary.yaml", "empty.yaml"),
            *("prompts.jsonl", "prompts.txt", ".", "target", "missing.yaml", "missing/x.yaml"),
            *("/dev/null", "x" * 300, "y/" * 3000, "new.yaml", "new.json"),
        ]
        self.models = [
            str(self.target),
            str(self.target),
            str(noisy),
            "lookup",
            "suffix",
            "hybrid",
        ]
        self.models += ["hybrid:lookup", f"hybrid:{noisy}", "org/name", "target", "prompts.txt"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return Pool(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def stop_at_the_work(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stay in the folder, load its target once, and end commands where the work would begin."""
    monkeypatch.chdir(pool.target.parent)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def load(name: str, *, dtype: str = "auto", device: str = "auto", **options: Any) -> Any:
        if name != str(pool.target):
            return load_target(name, dtype=dtype, device=device, **options)
        resolve_dtype(dtype, resolve_device(device))
        return pool.loaded

    def stop(*_: object, **__: object) -> None:
        raise SpectuneError("here the work would begin")

    for module in (autotune.job, engine.decoder, engine.pair):
        monkeypatch.setattr(module, "load_target", load)
    monkeypatch.setattr(autotune.pipeline, "record_answers", stop)
    monkeypatch.setattr(autotune.bench.measuring, "record_texts", stop)
    monkeypatch.setattr(autotune.rechecking, "recheck", stop)
    set_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None if n < 2**20 else set_threads(n))


def values_for(action: argparse.Action, pool: Pool) -> st.SearchStrategy[str]:
    """Return what could be given for an option or argument."""
    odd = st.sampled_from(TEXTS).map(named)
    if action.choices is not None:
        return st.one_of(st.sampled_from(sorted(action.choices)), odd)
    if action.type is int:
        numbers = st.one_of(st.integers(-2, 20), st.sampled_from([n for n in NUMBERS if n == n]))
        return st.one_of(numbers.map(lambda n: f"{n:g}"), numbers.map(str), odd)
    if action.type is float:
        return st.one_of(st.floats().map(str), st.sampled_from(NUMBERS).map(str), odd)
    if action.type is Path:
        return st.one_of(st.sampled_from(pool.files), st.sampled_from(pool.files), odd)
    if action.dest in ("target", "draft"):
        return st.one_of(st.sampled_from(pool.models), st.sampled_from(pool.models), odd)
    if action.dest in ("set", "sweep"):
        return settings_text()
    if action.dest in ("device", "dtype"):
        return st.one_of(st.sampled_from(("cpu", "auto", "float32", "cuda", "cuda:999")), odd)
    if action.dest == "storage":
        return st.sampled_from(("x://u:p@h/d", "sqlite:///:memory:", "://", "journal.log"))
    return st.one_of(odd, st.text(max_size=8).map(named))


def settings_text() -> st.SearchStrategy[str]:
    """Return what could be given to `what-if --set` or `--sweep`."""
    number = st.one_of(
        st.sampled_from(NUMBERS).map(str), st.integers(-3, 200).map(str), st.floats().map(str)
    )
    quantity = st.tuples(number, st.sampled_from(("", "x", "B", "M", "k", "q"))).map("".join)
    span = st.lists(quantity, min_size=2, max_size=4).map(":".join)
    several = st.lists(quantity, min_size=1, max_size=4).map(",".join)
    names = st.sampled_from(("L4", "T4", "toy.yaml", "toy/head", "lookup", "code", *TEXTS))
    value = st.one_of(number, quantity, quantity, span, several, names.map(named))
    key = st.one_of(
        st.sampled_from(sorted(KEYS)), st.sampled_from(sorted(KEYS)), st.text(max_size=3)
    )
    return st.tuples(key, value).map("=".join)


@st.composite
def command_lines(draw: st.DrawFn, pool: Pool) -> list[str]:
    """Draw a command with its arguments and some options, each with some value."""
    name = draw(st.sampled_from(sorted(SUBCOMMANDS)))
    actions = [a for a in SUBCOMMANDS[name]._actions if a.dest not in ("help", *SLOW_FILES)]
    needed = [a for a in actions if not a.option_strings or a.required]
    optional = [a for a in actions if a not in needed]
    chosen = needed + draw(st.lists(st.sampled_from(optional), max_size=4))
    if name == "run":  # of a group that needs one
        chosen += [a for a in optional if a.dest == draw(st.sampled_from(("prompt", "prompts")))]
    line = [name]
    for action in chosen:
        if draw(st.integers(0, 30)) == 0:
            continue
        if action.option_strings:
            line.append(action.option_strings[-1])
        if action.nargs != 0:
            line.append(draw(values_for(action, pool)))
    if draw(st.integers(0, 30)) == 0:
        line.append(draw(st.sampled_from(TEXTS).map(named)))
    return line


@cases(few=150, many=4000)
def test_any_command_line_is_done_or_refused(n_cases: int, pool: Pool) -> None:
    @given(command_lines(pool))
    def check(line: list[str]) -> None:
        used_or_refused(line)

    run(check, n_cases)


@cases(few=150, many=4500)
def test_any_question_is_answered_in_finite_figures_or_refused(
    n_cases: int, tmp_path: Path
) -> None:
    toy_what_if.write(tmp_path)
    basis = basis_of_profile(tmp_path / "toy.yaml")
    options = st.lists(settings_text(), max_size=3)

    @given(options, options)
    def check(changes: list[str], sweeps: list[str]) -> None:
        asked, swept = (dict(text.split("=", 1) for text in given) for given in (changes, sweeps))
        try:
            with within():
                answers = what_if(basis, asked, sweep=swept)
                print_answers(answers, Console(file=StringIO(), width=150))
        except SpectuneError as error:
            check_message(str(error))
            return
        json.dumps(document(answers), allow_nan=False)
        for answer in answers.answers:
            row = answer.row()
            assert all(v > 0 for _, v in leaves(row["tokens_per_s"]))
            assert 1 <= answer.tau.value <= answer.tree.depth + 1
            for key in ("depth", "width", "top_k", "nodes", "batch", "output_length"):
                if key in answer.asked and not answer.tree.is_plain:
                    assert row[key] == answer.asked[key], key
            if answer.tree.is_plain:
                assert answer.decode_speedup == answer.end_to_end_speedup == 1

    run(check, n_cases)
