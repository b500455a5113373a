"""Who decodes what, when, and what is made of it; the contenders are fakes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autotune.bench.contest import Contender, compete, standings, warm_up
from engine.timing import TimedText
from engine.trace import Trace

TEXTS = [Trace(str(i), [1, 2], [10 + i, 20, 30, 40]) for i in range(4)]
BEFORE = Trace("before", [1], [0])


def fake(name: str, log: list[str], total_s: float = 1.0) -> Contender:
    def run(trace: Trace) -> TimedText:
        log.append(f"{name}{trace.id}")
        return TimedText(total_s, total_s / 2, tuple(trace.generated))

    return Contender(name, run)


def failing(name: str, at: str, n_tokens: int | None = None) -> Contender:
    def run(trace: Trace) -> TimedText:
        if trace.id == at and n_tokens is None:
            raise RuntimeError("no such\n operator")
        cut = n_tokens if trace.id == at else None
        return TimedText(1.0, 0.5, tuple(trace.generated[:cut]))

    return Contender(name, run)


def test_the_order_turns_round_from_block_to_block() -> None:
    log: list[str] = []
    runs = compete([fake("a", log), fake("b", log)], TEXTS, block=2, skipped={})
    assert log == ["a0", "a1", "b0", "b1", "b2", "b3", "a2", "a3"]
    assert [run.token_ids[0] for run in runs["b"]] == [10, 11, 12, 13]
    log.clear()
    compete([fake("a", log), fake("b", log)], TEXTS, skipped={})
    assert log == ["a0", "b0", "b1", "a1", "a2", "b2", "b3", "a3"]


def test_a_turn_begins_with_an_untimed_text_and_is_spent_awake() -> None:
    log: list[str] = []

    @contextmanager
    def awake() -> Iterator[None]:
        log.append("wake")
        yield
        log.append("sleep")

    sleeper = Contender("a", fake("a", log).run, awake)
    runs = compete([sleeper], TEXTS[:2], block=2, before=BEFORE, skipped={})
    assert log == ["wake", "abefore", "a0", "a1", "sleep"]
    assert len(runs["a"]) == 2


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(failing("b", "2"), "no such operator"), (failing("b", "2", 3), "4 tokens, but gave 3")],
)
def test_whoever_fails_is_left_out_with_the_reason(bad: Contender, reason: str) -> None:
    skipped: dict[str, str] = {}
    log: list[str] = []
    runs = compete([fake("a", log), bad], TEXTS, skipped=skipped)
    assert set(runs) == {"a"}
    assert len(runs["a"]) == len(TEXTS)
    assert reason in skipped["b"]


def test_the_failure_of_a_required_contender_is_not_hidden() -> None:
    bad = Contender("a", failing("a", "1").run, required=True)
    with pytest.raises(RuntimeError, match="no such"):
        compete([bad], TEXTS, skipped={})


def test_warm_up_finds_who_cannot_run_and_the_contest_goes_on_without() -> None:
    log: list[str] = []
    skipped: dict[str, str] = {}
    contenders = [failing("b", "before"), fake("a", log)]
    warm_up(contenders, BEFORE, skipped)
    assert set(skipped) == {"b"}
    assert set(compete(contenders, TEXTS, skipped=skipped)) == {"a"}


def test_standings_are_medians_and_ratios_of_total_times() -> None:
    runs = {
        "plain": [TimedText(2.0, 1.5, (10, 20, 30, 40)), TimedText(4.0, 3.0, (11, 20, 30, 40))],
        "fast": [TimedText(1.0, 0.5, (10, 20, 30, 41), 2), TimedText(1.0, 0.5, (11, 0, 30, 40))],
    }
    plain, fast = standings(runs, TEXTS[:2], "plain")
    assert plain.over.value == 1.0
    assert fast.over.value == pytest.approx(3.0)
    assert plain.tokens_per_s.value == pytest.approx((2.0 + 1.0) / 2)
    assert fast.decode_tokens_per_s is not None
    assert fast.decode_tokens_per_s.value == pytest.approx((2 / 0.5 + 3 / 0.5) / 2)
    assert fast.first_token_ms == pytest.approx(500)
    assert fast.same_text == pytest.approx((0.75 + 0.25) / 2)
    document = fast.as_json()
    assert document["over"] == pytest.approx(3.0)
    assert document["over_low"] <= 3.0 <= document["over_high"]


def test_one_prompt_of_one_token_has_neither_intervals_nor_a_decoding_speed() -> None:
    runs = {"plain": [TimedText(2.0, 0.0, (7,))]}
    document = standings(runs, [Trace("0", [1], [7])], "plain")[0].as_json()
    assert document["decode_tokens_per_s"] is None
    assert document["tokens_per_s_low"] is None
