"""How far the cost model is off on trees it was not fitted on, and what it saves.

On the demo pair: fits the cost model as a tuning job does, then times trees left out of the fit
(medians of rounds as they are served, each against plain rounds beside it) and decodes the tune
prompts with some of them, interleaved with plain. Prints the predicted break-even tau and decode
speedup beside the measured ones, and what measuring one further tree costs over scoring it.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from common import DOMAINS, conditions, parser, publish, say, table

from autotune.cost.fitting import grouped
from autotune.cost.predicting import Predictor
from autotune.cost.timing import draft_probes, measure_costs
from autotune.job import Job, Models, prepare
from autotune.progress import Silent
from autotune.settings import Settings
from autotune.tracing import flatten, record_answers
from engine.decoder import SpeculativeDecoder
from engine.forced import run_forced
from engine.rounds import measure_rounds
from engine.trace import Trace
from profiles import PLAIN, TreeConfig


@dataclass(frozen=True)
class Size:
    """How much is measured, per domain and draft."""

    domains: tuple[str, ...]
    n_prompts: int
    n_new: int
    n_trees: int
    n_rounds: int
    n_decoded: int


FULL = Size(
    ("code", "chat", "rewrite"), n_prompts=12, n_new=64, n_trees=12, n_rounds=20, n_decoded=5
)
QUICK = Size(("code",), n_prompts=3, n_new=32, n_trees=4, n_rounds=6, n_decoded=2)


@dataclass(frozen=True)
class Row:
    """One tree: what was predicted and what was measured."""

    domain: str
    draft: str
    tree: TreeConfig
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted / self.measured - 1)


def left_out(job: Job, draft: str, n: int, rng: random.Random) -> list[TreeConfig]:
    """Return random trees of a draft's space that no fit has seen."""
    space = job.spaces[draft]
    seen = set(draft_probes(space))
    return rng.sample([tree for tree in space.enumerate() if tree not in seen], n)


def time_rounds(
    job: Job, predictor: Predictor, draft: str, trees: Sequence[TreeConfig], n_rounds: int
) -> list[Row]:
    """Return predicted and measured break-even tau of every tree."""
    times = measure_rounds(
        job.loaded.target,
        job.drafts[draft].draft,
        predictor.traces,
        trees,
        n_rounds=n_rounds,
        sampling=job.settings.sampling,
        seed=job.settings.seed + 1,
    )
    served = grouped(timed for timed in times if not timed.is_first)
    return [
        Row(
            job.domain,
            draft,
            tree,
            predicted=statistics.median(predictor.costs.expected(draft, t) for t in group),
            measured=statistics.median(t.total_s / t.reference_s for t in group),
        )
        for tree, group in served.items()
    ]


def decode_both(decoders: Sequence[SpeculativeDecoder], trace: Trace) -> list[tuple[float, float]]:
    """Return decode and total seconds of every decoder on a text, run there and back again."""
    seconds = np.zeros((len(decoders), 2))
    for i in (*range(len(decoders)), *reversed(range(len(decoders)))):
        run = run_forced(decoders[i], trace)
        seconds[i] += run.decode_s, run.total_s
    return [(float(decode_s), float(total_s)) for decode_s, total_s in seconds / 2]


def decode_trees(
    job: Job, predictor: Predictor, draft: str, trees: Sequence[TreeConfig]
) -> tuple[list[Row], float]:
    """Return predicted and measured decode speedups, and the mean seconds to measure a tree."""
    loaded, sampling = job.loaded, job.settings.sampling
    decoders = [
        SpeculativeDecoder(
            loaded, None if tree.is_plain else job.drafts[draft].draft, tree, sampling
        )
        for tree in (PLAIN, *trees)
    ]
    seconds = np.array([decode_both(decoders, trace) for trace in predictor.traces]).sum(axis=0)
    rows = [
        Row(
            job.domain,
            draft,
            tree,
            predicted=predictor.predict(draft, tree).decode_speedup,
            measured=float(seconds[0, 0] / decode_s),
        )
        for tree, (decode_s, _) in zip(trees, seconds[1:], strict=True)
    ]
    return rows, float(seconds[1:, 1].mean())


def scoring_s(job: Job, predictor: Predictor, draft: str) -> float:
    """Return the mean seconds it takes to score a tree by replay, over the whole space."""
    trees = list(job.spaces[draft].enumerate())
    started = time.perf_counter()
    for tree in trees:
        predictor.predict(draft, tree)
    return (time.perf_counter() - started) / len(trees)


def measure(domain: str, size: Size, seed: int) -> tuple[list[Row], list[Row], list[float]]:
    """Return break-even rows, speedup rows, and measuring over scoring by draft."""
    settings = Settings(n_tune=size.n_prompts, n_holdout=1, max_new_tokens=size.n_new, seed=seed)
    job = prepare(
        Models("demo", ["lookup", "demo"]), DOMAINS / f"{domain}.jsonl", domain, settings, Silent()
    )
    traces = flatten(record_answers(job, job.sample.tune, Silent(), ""))
    say(f"{domain}: {len(traces)} texts; fitting")
    predictor = Predictor(job, traces, measure_costs(job, traces, Silent()))
    rng, rounds, speedups, ratios = random.Random(seed), [], [], []
    for draft in job.drafts:
        score_s = scoring_s(job, predictor, draft)
        trees = left_out(job, draft, size.n_trees, rng)
        say(f"{domain}: {len(trees)} trees of {draft}")
        rounds += time_rounds(job, predictor, draft, trees, size.n_rounds)
        rows, measure_s = decode_trees(job, predictor, draft, trees[: size.n_decoded])
        speedups += rows
        ratios.append(measure_s / score_s)
    return rounds, speedups, ratios


def as_table(title: str, rows: Sequence[Row]) -> object:
    """Return rows as a table."""
    cells = [[r.domain, r.draft, r.tree.label(), r.predicted, r.measured, r.error] for r in rows]
    return table(title, ["domain", "draft", "tree", "predicted", "measured", "error"], cells)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--domains", nargs="+", help=f"default: {' '.join(FULL.domains)}")
    arguments = options.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size = QUICK if arguments.quick else FULL
    rounds: list[Row] = []
    speedups: list[Row] = []
    ratios: list[float] = []
    for domain in arguments.domains or size.domains:
        more = measure(domain, size, arguments.seed)
        rounds, speedups, ratios = rounds + more[0], speedups + more[1], ratios + more[2]
    errors = [row.error for row in rounds]
    figures = {
        "round_error_median": statistics.median(errors),
        "round_error_p90": float(np.quantile(errors, 0.9)),
        "speedup_error_median": statistics.median(row.error for row in speedups),
        "replay_speed_ratio": min(ratios),
    }
    facts = conditions("cpu", **vars(size) | {"domains": arguments.domains or size.domains})
    tables = [
        as_table("Break-even tau of trees left out of the fit", rounds),
        as_table("Decode speedup on the tune prompts", speedups),
        table("Cost model", ["figure", "value"], list(figures.items())),
    ]
    publish(figures, facts, tables, arguments.json)


if __name__ == "__main__":
    main()
