"""How often is the decision right? Thousands of tuning jobs over a known truth, simulated.

Every job has several trees, whose luck on the tune prompts decides which of them are judged. The
choice of rungs, the order of the runs and the test are the product's own functions; only the
clock is invented, with the variation of recorded runs.

The true speedup is the ratio of total times over all prompts there could be. A job is wrongly
decided if the tree it would serve is truly slower than plain decoding.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import conditions, parser, publish, say, table
from decision_records import COMMITTED, Floats, Records, extract, load, records_of
from scipy import stats

from autotune.candidates import Candidate
from autotune.cost import Prediction
from autotune.holdout import first_proved, judge, measure_block, paired
from autotune.proving import choose_rungs
from autotune.settings import Settings
from profiles import TreeConfig

TRUTH = (0.90, 1.30)
TO_FIND, AT_SPREAD = 1.10, 0.15
SPREADS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.45)
TRUTHS = (0.95, 1.00, 1.02, 1.05, 1.10, 1.20, 1.30)
PREDICTION_ERROR = 0.05
"""Deviation of the log of a predicted speedup."""


@dataclass(frozen=True)
class World:
    """What a simulated job runs in.

    Attributes:
        records: What its variation is drawn from.
        n_race: Tune prompts on which trees are timed.
        n_holdout: Prompts that judge.
    """

    records: Records
    n_race: int
    n_holdout: int

    def run_job(self, rng: np.random.Generator, truth: float, spread: float) -> float | None:
        """Run one job and return the true speedup of the tree it chose, None for plain.

        Args:
            rng: Source of all luck.
            truth: True speedup of the best tree.
            spread: Standard deviation of the log ratios by prompt, timing noise included.
        """
        records = self.records
        trees, behind = records.races[rng.integers(len(records.races))]
        noise = min(float(rng.choice(records.noises)), spread)
        true = {tree: truth * math.exp(-gap) for tree, gap in zip(trees, behind, strict=True)}
        raced = self.ratios(rng, true, math.sqrt(spread**2 - noise**2), self.n_race)
        rungs = choose_rungs([_race(rng, tree, raced[tree], true[tree], noise) for tree in trees])
        if not rungs:
            return None
        ratios = self.ratios(rng, true, math.sqrt(spread**2 - noise**2), self.n_holdout)
        lengths = rng.choice(records.lengths, self.n_holdout)

        def block(prompt: int) -> list[tuple[float, float]]:
            def run(rung: int) -> float:
                speedup = 1.0 if rung < 0 else ratios[rungs[rung].tree][prompt]
                return float(lengths[prompt] / speedup * math.exp(rng.normal(0, noise)))

            return measure_block(len(rungs), run)

        times = paired([block(prompt) for prompt in range(self.n_holdout)], len(rungs))
        winner = first_proved([judge(pair, len(rungs)) for pair in times])
        return None if winner is None else true[rungs[winner].tree]

    def ratios(
        self, rng: np.random.Generator, true: dict[TreeConfig, float], spread: float, n: int
    ) -> dict[TreeConfig, Floats]:
        """Return speedups by prompt; their ratio of totals, over all prompts, is the true one."""
        shared, own = math.sqrt(self.records.alike), math.sqrt(1 - self.records.alike)
        pool = self.records.residuals
        easy = rng.choice(pool, n)
        centre = sum(math.log(np.exp(-spread * part * pool).mean()) for part in (shared, own))
        return {
            tree: speedup * np.exp(centre + spread * (shared * easy + own * rng.choice(pool, n)))
            for tree, speedup in true.items()
        }


def _race(
    rng: np.random.Generator, tree: TreeConfig, ratios: Floats, true: float, noise: float
) -> Candidate:
    """Time a tree on the tune prompts, once on each side."""
    seen = ratios * np.exp(rng.normal(0, math.sqrt(2) * noise, len(ratios)))
    predicted = Prediction(true * math.exp(rng.normal(0, PREDICTION_ERROR)), 1.0)
    return Candidate("simulated", tree, predicted, float(seen.mean()), tuple(seen.tolist()))


def false_rate(world: World, rng: np.random.Generator, n_jobs: int) -> tuple[int, int]:
    """Return how many jobs had no tree that is faster, and how many served one that is slower."""
    n_hopeless = n_false = 0
    for _ in range(n_jobs):
        truth = rng.uniform(*TRUTH)
        chosen = world.run_job(rng, truth, float(rng.choice(world.records.spreads)))
        n_hopeless += truth < 1
        n_false += chosen is not None and chosen < 1
    return n_hopeless, n_false


def found_rate(
    world: World, rng: np.random.Generator, truth: float, spread: float, n_jobs: int
) -> float:
    """Return the share of jobs that serve a tree."""
    found = [world.run_job(rng, truth, spread) is not None for _ in range(n_jobs)]
    return sum(found) / n_jobs


def interval(n_hits: float, n: int) -> list[float]:
    """Return the exact two-sided 95 % interval of a rate (Clopper and Pearson)."""
    found = stats.binomtest(round(n_hits), n).proportion_ci()
    return [float(found.low), float(found.high)]


def main() -> None:
    """Simulate, or record what to simulate from."""
    options, defaults = parser(__doc__), Settings()
    options.add_argument(
        "measurements", nargs="*", type=Path, help="measurements files to draw from"
    )
    options.add_argument("--record", type=Path, help="write what is drawn from, and stop")
    options.add_argument("--provenance", default="", help="kept in the record")
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--holdout-prompts", type=int, default=defaults.n_holdout)
    arguments = options.parse_args()
    files = arguments.measurements
    if arguments.record:
        document = {"provenance": arguments.provenance} | extract(files)
        records_of(document)  # refuses what cannot be drawn from
        arguments.record.write_text(json.dumps(document) + "\n", encoding="utf-8")
        return
    records = records_of(extract(files)) if files else load(COMMITTED)
    world = World(records, defaults.n_race, arguments.holdout_prompts)
    rng = np.random.default_rng(arguments.seed)
    n_jobs = 2_000 if arguments.quick else arguments.jobs
    figures = simulate(world, rng, n_jobs)
    power = power_table(world, rng, n_jobs // 20)
    facts = conditions(
        "cpu",
        holdout_prompts=world.n_holdout,
        race_prompts=world.n_race,
        drawn_from=[str(path) for path in files] or COMMITTED.name,
        recorded_spreads=np.sort(records.spreads).round(3).tolist(),
        recorded_run_noises=np.sort(records.noises).round(3).tolist(),
        correlation_of_trees=round(records.alike, 3),
    )
    columns = ["spread", *(f"{truth:.2f}x" for truth in TRUTHS)]
    tables = [
        table("Decisions", ["figure", "value"], list(figures.items())),
        table(
            "Share of jobs that speculate, by spread of the log ratios and true speedup",
            columns,
            power,
        ),
    ]
    if arguments.json:
        facts["power"] = [dict(zip(columns, row, strict=True)) for row in power]
    publish(figures, facts, tables, arguments.json)


def simulate(world: World, rng: np.random.Generator, n_jobs: int) -> dict[str, Any]:
    """Return the figures of `n_jobs` jobs of any truth, and of a fifth as many of one each."""
    n_case = n_jobs // 5
    say(f"Simulating {n_jobs} jobs, and {n_case} at each of 2 true speedups")
    n_hopeless, n_false = false_rate(world, rng, n_jobs)
    found = found_rate(world, rng, TO_FIND, AT_SPREAD, n_case)
    return {
        "false_speculate_rate": n_false / n_hopeless,
        "false_speculate_rate_interval": interval(n_false, n_hopeless),
        "false_speculate_rate_at_1_00": found_rate(world, rng, 1 - 1e-9, AT_SPREAD, n_case),
        "found_rate_at_1_10": found,
        "found_rate_at_1_10_interval": interval(found * n_case, n_case),
        "jobs": n_jobs,
        "jobs_truly_below_1": n_hopeless,
    }


def power_table(world: World, rng: np.random.Generator, n_jobs: int) -> list[list[float]]:
    """Return, by spread, the share of jobs that speculate at each true speedup."""
    say(f"Simulating {n_jobs} jobs for each of {len(SPREADS) * len(TRUTHS)} cells of the table")
    return [
        [spread, *(found_rate(world, rng, truth, spread, n_jobs) for truth in TRUTHS)]
        for spread in SPREADS
    ]


if __name__ == "__main__":
    main()
