"""What `decision.py` draws from: how much real runs vary, extracted from measurements files."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles import TreeConfig, load_measurements
from profiles.errors import SpectuneError

Floats = NDArray[np.float64]

COMMITTED = Path(__file__).with_name("decision_records.json")
"""Extracted from jobs of the demo pair; its `provenance` says which."""

MIN_PROMPTS = 4
"""Fewer prompts tell too little of a spread."""


@dataclass(frozen=True)
class Records:
    """The variation of recorded runs.

    Attributes:
        races: For each recorded race, the trees and their mean log speedup below the best one's.
        residuals: Log ratios by prompt, of all trees, in units of their own spread and centred.
        spreads: Standard deviation of the log ratios, by tree.
        alike: Correlation of two trees' log ratios on the same prompts.
        lengths: Plain time by prompt over its mean.
        noises: Standard deviation of the log time of a single run, by tree.
    """

    races: tuple[tuple[tuple[TreeConfig, ...], tuple[float, ...]], ...]
    residuals: Floats
    spreads: Floats
    alike: float
    lengths: Floats
    noises: Floats


def extract(paths: Iterable[Path]) -> dict[str, Any]:
    """Return what the measurements of profiles say of variation, as plain data."""
    races, holdouts = [], []
    for path in paths:
        measured = load_measurements(path)
        whole = [m for m in measured.measured if not m.tree.is_plain]
        n_prompts = max((len(m.prompt_ratios) for m in whole), default=0)
        whole = [m for m in whole if len(m.prompt_ratios) == n_prompts >= MIN_PROMPTS]
        if len(whole) > 1:
            races.append([m.model_dump(mode="json", exclude={"draft"}) for m in whole])
        for rung in measured.holdout:
            if len(rung.plain_ms) >= MIN_PROMPTS:
                holdouts.append(rung.model_dump(mode="json", exclude={"draft"}))
    return {"races": races, "holdouts": holdouts}


def load(path: Path) -> Records:
    """Read records written by `decision.py --record`."""
    return records_of(json.loads(path.read_text(encoding="utf-8")))


def records_of(data: dict[str, Any]) -> Records:
    """Return the records of plain data as `extract` gives it.

    Raises:
        SpectuneError: There is no race of several trees, or no holdout with the noise of a run.
    """
    groups = [[np.log(tree["prompt_ratios"]) for tree in race] for race in data["races"]]
    ratios = [np.divide(h["plain_ms"], h["speculative_ms"]) for h in data["holdouts"]]
    noises = [h["run_noise"] for h in data["holdouts"] if h.get("run_noise") is not None]
    if not groups or not noises:
        raise SpectuneError(
            "the decision is simulated from races of at least two trees and holdouts with the "
            "noise of a run, but these measurements lack one of them; give those of newer jobs"
        )
    logs = [log for group in groups for log in group] + [np.log(ratio) for ratio in ratios]
    return Records(
        races=tuple(
            (tuple(TreeConfig(**tree["tree"]) for tree in race), _behind(group))
            for race, group in zip(data["races"], groups, strict=True)
        ),
        residuals=np.concatenate([_standardised(log) for log in logs]),
        spreads=np.array([log.std(ddof=1) for log in logs]),
        alike=_alike(groups),
        lengths=np.concatenate(
            [np.divide(h["plain_ms"], np.mean(h["plain_ms"])) for h in data["holdouts"]]
        ),
        noises=np.array(noises),
    )


def _behind(group: Sequence[Floats]) -> tuple[float, ...]:
    means = [float(log.mean()) for log in group]
    return tuple(max(means) - mean for mean in means)


def _standardised(log: Floats) -> Floats:
    """Return residuals of variance 1: n of them, centred, have lost one degree of freedom."""
    n = len(log)
    return (log - log.mean()) / log.std(ddof=1) * math.sqrt(n / (n - 1))


def _alike(groups: Sequence[Sequence[Floats]]) -> float:
    """Return the mean correlation between trees of a race, weighted by pairs."""
    pairs = [
        matrix[np.triu_indices(len(matrix), 1)]
        for group in groups
        for matrix in [np.corrcoef(group)]
    ]
    return float(np.clip(np.concatenate(pairs).mean(), 0.0, 1.0))
