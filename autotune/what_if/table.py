"""The answers to a what-if question as tables in a terminal."""

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .answers import TREE_KEYS, Answer, WhatIf

Column = tuple[str, Callable[[Answer], str]]


def print_answers(answers: WhatIf, console: Console) -> None:
    """Print what is gained, then where the time of a round goes, then notes on both."""
    flags = dict.fromkeys(flag for answer in answers.answers for flag in answer.flags)
    numbers = {flag: str(i + 1) for i, flag in enumerate(flags)}
    title = f"What if: {answers.name}{_asked(answers)}, plain decoding = 1"
    speeds = _table(title, answers, _speed_columns(numbers))
    speeds.caption = (
        "tau: tokens per round (~ approximate); even: tau at which speculation breaks even; "
        "decode and total: speedup without and with reading the prompt"
    )
    console.print(speeds)
    parts = _table("Time of a round, ms", answers, _part_columns())
    console.print(parts)
    for flag, number in numbers.items():
        console.print(f"[{number}] {flag}")
    for note in answers.notes:
        console.print(f"    {note}")


def _asked(answers: WhatIf) -> str:
    """Return what was set for all answers alike."""
    asked = answers.answers[0].asked
    return "".join(f", {k} {_value(v)}" for k, v in asked.items() if k not in answers.swept)


def _table(title: str, answers: WhatIf, columns: Sequence[Column]) -> Table:
    shown = [key for key in answers.swept if key not in TREE_KEYS]
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for key in shown:
        table.add_column(key.replace("_", " "), justify="right", overflow="fold")
    table.add_column("tree", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", overflow="fold")
    for answer in answers.answers:
        cells = [_value(answer.asked[key]) for key in shown] + [answer.tree.label()]
        cells += [cell(answer) for _, cell in columns]
        table.add_row(*cells, style="dim" if answer.decode_speedup < 1 else None)
    return table


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _speed_columns(numbers: Mapping[str, str]) -> list[Column]:
    columns: list[Column] = [
        ("tau", lambda a: f"{a.tau.value:.2f}" + ("" if a.tau.is_replayed else "~")),
        ("even", lambda a: f"{a.break_even_tau:.2f}"),
        ("decode", lambda a: f"{a.decode_speedup:.2f}x"),
        ("interval", _interval),
        ("total", lambda a: f"{a.end_to_end_speedup:.2f}x"),
        ("tokens/s", lambda a: f"{a.tokens_per_s:.1f}"),
    ]
    if numbers:
        columns.append(("notes", lambda a: " ".join(numbers[flag] for flag in a.flags)))
    return columns


def _part_columns() -> list[Column]:
    return [
        ("prefill", lambda a: f"{a.round.prefill:.1f}"),
        ("extend", lambda a: f"{a.round.extend:.1f}"),
        ("levels", lambda a: f"{a.round.levels:.1f}"),
        ("verify", lambda a: f"{a.round.verify:.1f}"),
        ("commit", lambda a: f"{a.round.commit:.1f}"),
        ("fixed", lambda a: f"{a.round.overhead:.1f}"),
        ("round", lambda a: f"{a.round.total:.1f}"),
        ("plain token", lambda a: f"{a.plain_ms:.1f}"),
    ]


def _interval(answer: Answer) -> str:
    if answer.interval is None:
        return "unknown"
    low, high = answer.interval
    return f"{low:.2f}-{high:.2f}"
