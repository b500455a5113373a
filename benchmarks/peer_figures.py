"""The figures of `peers.py` from the runs of every domain. Pure arithmetic."""

import statistics
from collections.abc import Mapping, Sequence

from autotune.bench.contenders import GENERATE, PLAIN_NAME
from autotune.bench.contest import Runs, flat
from autotune.bench.measuring import FLOOR
from autotune.bench.speeds import Figure, ratio_of_totals

SPECULATIVE = "spectune speculative"
OURS = (PLAIN_NAME, SPECULATIVE, FLOOR)

Figures = dict[str, float | str | None]


def domain_figures(runs: Runs) -> Figures:
    """Return how fast speculation is beside our plain decoding and beside each engine's best.

    A contender's name begins with that of its engine. An engine's best mode is the one with the
    least total time on these prompts, which flatters the engine a little, never us.
    """
    if SPECULATIVE not in runs:
        return {}
    figures: Figures = {}
    if PLAIN_NAME in runs:
        figures |= flat("speculative_over_plain", _speed(runs, SPECULATIVE, PLAIN_NAME))
    modes: dict[str, list[str]] = {}
    for name in runs.keys() - set(OURS):
        modes.setdefault(name.partition(" ")[0], []).append(name)
    for engine in sorted(modes):
        best = fastest(runs, modes[engine])
        figure = f"speculative_over_{engine.lower()}"
        figures |= flat(figure, _speed(runs, SPECULATIVE, best))
        figures[f"{figure}_against"] = best
    return figures


def overall_figures(by_domain: Mapping[str, Runs]) -> Figures:
    """Return how fast plain decoding is beside transformers' `generate` and the floor.

    `plain_over_transformers` compares whole answers; `plain_over_floor` is the time of a token
    over the least it can take, the prefill left out.
    """
    figures: Figures = {}
    pooled = pool(by_domain)
    if PLAIN_NAME in pooled and GENERATE in pooled:
        figures |= flat("plain_over_transformers", _speed(pooled, PLAIN_NAME, GENERATE))
    if PLAIN_NAME in pooled and FLOOR in pooled:
        seconds = [[run.decode_s for run in pooled[name]] for name in (PLAIN_NAME, FLOOR)]
        figures |= flat("plain_over_floor", ratio_of_totals(*seconds))
    return figures


def pool(by_domain: Mapping[str, Runs]) -> Runs:
    """Return the runs of all domains in one; contenders that miss a domain are left out."""
    common = set.intersection(*(set(runs) for runs in by_domain.values()))
    names = [name for name in next(iter(by_domain.values())) if name in common]
    return {name: [run for runs in by_domain.values() for run in runs[name]] for name in names}


def fastest(runs: Runs, names: Sequence[str]) -> str:
    """Return which of some contenders took the least time in all."""
    return min(names, key=lambda name: sum(run.total_s for run in runs[name]))


def speeds(runs: Runs) -> dict[str, dict[str, float | None]]:
    """Return the median tokens per second of every contender, end to end and decode only."""
    result: dict[str, dict[str, float | None]] = {}
    for name, done in runs.items():
        decode = [speed for run in done if (speed := run.decode_tokens_per_s) is not None]
        result[name] = {
            "end_to_end": statistics.median(run.tokens_per_s for run in done),
            "decode": statistics.median(decode) if decode else None,
        }
    return result


def speed_cell(runs: Runs, name: str) -> str:
    """Return a contender's tokens per second, end to end and (decode only)."""
    if name not in runs:
        return ""
    speed = speeds({name: runs[name]})[name]
    cell, decode = f"{speed['end_to_end']:.0f}", speed["decode"]
    return cell if decode is None else f"{cell} ({decode:.0f})"


def _speed(runs: Runs, ours: str, theirs: str) -> Figure:
    return ratio_of_totals(
        [run.total_s for run in runs[theirs]], [run.total_s for run in runs[ours]]
    )
