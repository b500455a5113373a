"""Transformers' `generate` in its modes: the same text as ours, and a clock that fits it."""

from pathlib import Path
from typing import Any

import pytest

from engine.generate import STATIC_CACHE, has_compiler, prompt_lookup, run_generate
from engine.pair import LoadedTarget, load_draft, load_target
from engine.trace import Trace, record
from pairs import save_noisy_copy, save_target
from profiles import GREEDY


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    folder = tmp_path_factory.mktemp("generate")
    target = load_target(str(save_target(folder / "target")), dtype="float32", device="cpu")
    save_noisy_copy(folder / "target", folder / "draft", amount=0.02)
    return target


@pytest.fixture(scope="module")
def text(loaded: LoadedTarget) -> Trace:
    return record(
        loaded.target, "a", [5, 9, 5, 9, 5], max_new_tokens=12, sampling=GREEDY, seed=0, index=0
    )


@pytest.mark.parametrize("options", [{}, STATIC_CACHE, prompt_lookup(4, 4)])
def test_every_mode_gives_the_text_of_plain_decoding_and_times_it(
    loaded: LoadedTarget, text: Trace, options: dict[str, Any]
) -> None:
    run = run_generate(loaded, text, **options)
    assert run.token_ids == tuple(text.generated)
    assert 0 < run.decode_s < run.total_s
    assert 1 <= run.n_first < run.n_tokens


def test_an_assistant_may_bring_several_tokens_first(loaded: LoadedTarget, text: Trace) -> None:
    draft = load_draft(str(Path(loaded.ref.id).with_name("draft")), loaded).draft
    run = run_generate(
        loaded,
        text,
        assistant_model=draft.model,  # type: ignore[attr-defined]
        num_assistant_tokens=4,
        num_assistant_tokens_schedule="constant",
    )
    assert run.token_ids == tuple(text.generated)
    assert run.n_first >= 1


def test_a_single_token_has_no_decoding_speed(loaded: LoadedTarget, text: Trace) -> None:
    run = run_generate(loaded, Trace("a", text.prompt, text.generated[:1]))
    assert run.n_tokens == run.n_first == 1
    assert run.decode_tokens_per_s is None
    assert run.tokens_per_s > 0


def test_a_compiler_is_looked_for_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert not has_compiler()
    monkeypatch.setenv("CXX", "/bin/sh")
    assert has_compiler()
