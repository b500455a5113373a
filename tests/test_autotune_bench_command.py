"""`spectune bench` on tiny models: who takes part, what is printed, what is refused."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

import engine.floor
from autotune.bench import contenders, measuring
from autotune.commands.cli import main
from engine.pair import load_target
from pairs import save_noisy_copy, save_target, speculating_profile, write_prompts
from profiles import save
from profiles.errors import UsageError

SHORT = ("--limit", "2", "--max-new-tokens", "6", "--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("bench")
    target = save_target(base / "target")
    save_noisy_copy(target, base / "small")
    write_prompts(base / "prompts.jsonl")
    loaded = load_target(str(target), dtype="float32", device="cpu")
    save(speculating_profile(loaded), base / "fast.yaml")
    save(speculating_profile(loaded, changes={"domain.template": "none"}), base / "raw.yaml")
    hot = {"sampling": {"temperature": 0.7}}
    save(speculating_profile(loaded, changes=hot), base / "hot.yaml")
    return base


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.floor, "N_BYTES", 2**20)
    monkeypatch.setattr(engine.floor, "SIDE", 64)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def bench(base: Path, *arguments: object) -> int:
    prompts = base / "prompts.jsonl"
    words = ["bench", "--prompts", prompts, *SHORT, *arguments]
    return main([str(word) for word in words])


def test_a_bench_times_everybody_on_the_same_tokens(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = ("--draft", "lookup", "--draft", base / "small")
    assert bench(base, "--target", base / "target", *drafts, "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    names = [contender["name"] for contender in document["contenders"]]
    assert names == [
        "spectune plain",
        "spectune lookup, untuned D4 W1 K1 N4",
        f"spectune {base / 'small'}, untuned D3 W1 K1 N3",
        "transformers generate",
        "transformers static cache",
        "transformers prompt lookup",
        f"transformers assistant {base / 'small'}",
        "floor of this machine",
    ]
    assert document["skipped"] == {}
    assert document["prompts"] == 2
    assert document["tokens"] == 12
    for contender in document["contenders"]:
        assert contender["same_text"] == 1.0
        assert contender["over_low"] <= contender["over"] <= contender["over_high"]
    assert document["contenders"][0]["over"] == 1.0


def test_a_profile_brings_target_draft_and_tree(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(base, "--profile", base / "fast.yaml") == 0
    out = capsys.readouterr().out
    assert "D3 W2 K2 N5" in out
    assert "untuned" not in out
    assert "GB/s" in out


@pytest.mark.parametrize("name", ["fast.yaml", "raw.yaml"])
def test_prompts_are_built_as_when_the_profile_was_made(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[bool] = []

    def choose(*_: Any, raw: bool, **__: Any) -> list[list[int]]:
        seen.append(raw)
        raise UsageError("enough is known")

    monkeypatch.setattr(measuring, "choose_prompts", choose)
    assert bench(base, "--profile", base / name) == 2
    assert seen == [name == "raw.yaml"]


def test_without_a_compiler_the_compiled_mode_is_left_out_with_the_reason(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "has_compiler", lambda: False)
    assert bench(base, "--target", base / "target", "--compiled") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Left out: transformers compiled: there is no C++ compiler." in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--target", "--profile")),
        (("--target", "TARGET", "--limit", "0"), ("--limit", "at least 1")),
        (("--target", "TARGET", "--max-new-tokens", "1000"), ("max_new_tokens", "lower it")),
        (("--profile", "HOT"), ("temperature 0.7", "run --compare")),
    ],
)
def test_wrong_usage_is_one_sentence(
    base: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    places = {"TARGET": str(base / "target"), "HOT": str(base / "hot.yaml")}
    assert bench(base, *(places.get(word, word) for word in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    sentence = captured.err.strip().splitlines()[-1]
    assert sentence.startswith("spectune: ")
    assert all(word in sentence for word in words)
