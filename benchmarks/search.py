"""Is the search as good as the exhaustive grid, at a fraction of its cost?

Records, on the demo pair, every tree of a grid on the same prompts in two passes, plain decoding
in between (a prompt's two passes one after the other), and as many fits of the cost model as there
are seeds. Records are kept, one line per run, so a stopped recording goes on where it was. Then
every way of choosing is played on the first pass, charged with the engine time that it would have
taken, and what it chose is valued on the second: spectune's search, the exhaustive grid itself,
Optuna's TPE on measured trials alone, random search, and the best of the usual defaults.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from common import DOMAINS, conditions, parser, publish, say, table

from autotune.candidates import Candidate, best_chain, best_shallow
from autotune.cost import Prediction
from autotune.cost.predicting import Predictor
from autotune.cost.timing import measure_costs
from autotune.job import Job, Models, prepare
from autotune.progress import Silent
from autotune.racing import ForcedTrack, contenders
from autotune.search import MeasuredStudy
from autotune.settings import Settings
from autotune.space import DEFAULTS, SearchSpace
from autotune.tracing import flatten, record_answers
from engine.trace import Trace
from profiles import PLAIN, TreeConfig

DRAFTS = ("lookup", "demo")
RUNS_PER_PLAIN = 8
"""Runs between two plain ones while recording."""

SHARE = 0.15
"""Share of the grid's engine time that rivals may spend."""

N_RESAMPLES = 2000

Point = tuple[str, TreeConfig]


@dataclass(frozen=True)
class Size:
    """How much is recorded and played."""

    domains: tuple[str, ...] = ("code", "chat", "rewrite")
    n_prompts: int = 12
    n_new: int = 96
    n_seeds: int = 10
    n_trials: int = 10
    every: int = 1
    """Only every so many-th tree of the grid."""


QUICK = Size(("code",), n_prompts=4, n_new=16, n_seeds=2, n_trials=6, every=8)


def grid(every: int) -> list[Point]:
    """Return the exhaustive grid: trees of both drafts, chains and the usual defaults too."""
    shapes = {
        "demo": ((1, 2, 3, 4, 6, 8), (1, 2, 4, 10), (4, 8, 16, 32, 59)),
        "lookup": ((2, 4, 8, 16), (1, 2, 4), (4, 8, 16, 32)),
    }
    points: dict[Point, None] = {}
    for draft, (depths, widths, budgets) in shapes.items():
        for depth in depths:
            points[draft, TreeConfig.chain(depth)] = None
            for width in widths[1:]:
                whole = TreeConfig(depth=depth, width=width, top_k=width, nodes=depth).pool
                for nodes in budgets:
                    if depth <= nodes <= whole:
                        tree = TreeConfig(depth=depth, width=width, top_k=width, nodes=nodes)
                        points[draft, tree.canonical()] = None
    kept = list(points)[::every]
    return list(dict.fromkeys([*kept, *(("demo", tree.canonical()) for tree in DEFAULTS)]))


@dataclass(frozen=True)
class GridSpace(SearchSpace):
    """A search space that has the trees of the grid and no others."""

    trees: tuple[TreeConfig, ...] = ()

    def contains(self, tree: TreeConfig) -> bool:
        """Tell whether the grid has a tree."""
        return tree.is_plain or tree in self.trees

    def tree(self, depth: int, width: int, top_k: int, fill: float) -> TreeConfig:
        """Return the tree of the grid that is nearest to a point."""
        wanted = super().tree(depth, width, top_k, fill)
        if wanted.is_plain:
            return PLAIN

        def distance(tree: TreeConfig) -> float:
            pairs = ((getattr(tree, n), getattr(wanted, n)) for n in ("depth", "top_k", "nodes"))
            return sum(abs(float(np.log2(a / b))) for a, b in pairs)

        return min(self.trees, key=distance)


def spaces_of(points: Sequence[Point]) -> dict[str, GridSpace]:
    """Return the grid as search spaces."""
    limits = {"demo": (8, 10, 10, 64, "eagle3"), "lookup": (16, 4, 4, 64, "lookup")}
    return {
        draft: GridSpace(*limits[draft], trees=tuple(t for d, t in points if d == draft))
        for draft in DRAFTS
    }


# --- recording ----------------------------------------------------------------------------------


class Records:
    """What was recorded of a domain: one JSON line per run or fit, in a file that only grows.

    Args:
        path: The file.
        identity: Everything the records depend on; None takes a file as it is.
    """

    def __init__(self, path: Path, identity: dict[str, Any] | None) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # a stopped recording may end within a line
            self.lines = [json.loads(line) for line in whole.splitlines()]
            if whole != text:
                path.write_text(whole, encoding="utf-8")
        if identity is None:
            if not self.lines:
                raise SystemExit(f"{path} holds no records; leave out --recorded to make them")
        elif not self.lines:
            self.add(kind="identity", **identity)
        elif self.lines[0] != {"kind": "identity"} | json.loads(json.dumps(identity)):
            raise SystemExit(f"{path} was recorded with other inputs; move it away")

    def add(self, **line: Any) -> None:
        """Write a line."""
        self.lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, kind: str, **facts: Any) -> list[dict[str, Any]]:
        """Return the lines of a kind that have these facts."""
        return [
            line
            for line in self.lines
            if line["kind"] == kind and all(line[name] == fact for name, fact in facts.items())
        ]


def record(domain: str, size: Size, folder: Path, seed: int) -> Records:
    """Record what is missing of a domain."""
    settings = Settings(n_tune=size.n_prompts, n_holdout=1, max_new_tokens=size.n_new, seed=seed)
    prompts = DOMAINS / f"{domain}.jsonl"
    job = prepare(Models("demo", DRAFTS), prompts, domain, settings, Silent())
    records = Records(folder / f"{domain}.jsonl", job.identity | {"size": asdict(size)})
    started = time.perf_counter()
    texts = record_answers(job, job.sample.tune, Silent(), "")
    if not records.of("trace"):
        records.add(kind="trace", seconds=time.perf_counter() - started)
    _record_fits(job, flatten(texts), size, records)
    track = ForcedTrack(job, texts)
    for prompt in range(size.n_prompts):
        for number in (1, 2):  # side by side: the machine changes within the hour
            if not records.of("block", number=number, prompt=prompt):
                say(f"{domain}: pass {number}, prompt {prompt + 1} of {size.n_prompts}")
                runs = list(_block(track, prompt, grid(size.every), seed + 1000 * number + prompt))
                records.add(kind="block", number=number, prompt=prompt, runs=runs)
    return records


def _record_fits(job: Job, traces: Sequence[Trace], size: Size, records: Records) -> None:
    """Fit the cost model once per seed and keep what it predicts of every tree."""
    for seed in range(len(records.of("fit")), size.n_seeds):
        say(f"{job.domain}: fit {seed + 1} of {size.n_seeds}")
        started = time.perf_counter()
        fitting = replace(job, settings=replace(job.settings, seed=seed))
        predictor = Predictor(fitting, traces, measure_costs(fitting, traces, Silent()))
        cost_s = time.perf_counter() - started
        predicted = [
            [draft, asdict_of(tree), *figures(predictor.predict(draft, tree))]
            for draft, tree in grid(size.every)
        ]
        replay_s = time.perf_counter() - started - cost_s
        records.add(kind="fit", seed=seed, cost_s=cost_s, replay_s=replay_s, predicted=predicted)


def asdict_of(tree: TreeConfig) -> list[int]:
    """Return a tree as four numbers."""
    return [tree.depth, tree.width, tree.top_k, tree.nodes]


def tree_of(numbers: Sequence[int]) -> TreeConfig:
    """Return the tree of four numbers."""
    return TreeConfig(**dict(zip(("depth", "width", "top_k", "nodes"), numbers, strict=True)))


def figures(prediction: Prediction) -> tuple[float, float]:
    """Return a prediction as two numbers."""
    return prediction.tau, prediction.break_even_tau


def _block(
    track: ForcedTrack, prompt: int, points: Sequence[Point], seed: int
) -> Iterator[list[Any]]:
    """Run a prompt with every tree in random order, plain at the ends and in between."""
    order = random.Random(seed).sample(list(points), len(points))
    for i, (draft, tree) in enumerate(order):
        if i % RUNS_PER_PLAIN == 0:
            yield ["", asdict_of(PLAIN), track.seconds(prompt, "", PLAIN)]
        yield [draft, asdict_of(tree), track.seconds(prompt, draft, tree)]
    yield ["", asdict_of(PLAIN), track.seconds(prompt, "", PLAIN)]


# --- what the records say -----------------------------------------------------------------------


@dataclass
class Grid:
    """The times of one pass, as if the machine had kept its pace.

    Attributes:
        plain_s: Seconds of plain decoding by prompt.
        tree_s: Seconds by tree and prompt, by their ratio to the plain runs around them.
    """

    plain_s: list[float] = field(default_factory=list)
    tree_s: dict[Point, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, blocks: Sequence[dict[str, Any]]) -> "Grid":
        """Read the blocks of a pass."""
        result = cls()
        for block in sorted(blocks, key=lambda line: line["prompt"]):
            runs = block["runs"]
            plain = [i for i, (draft, _, _) in enumerate(runs) if not draft]
            usual = float(np.median([runs[i][2] for i in plain]))
            result.plain_s.append(usual)
            for i, (draft, numbers, seconds) in enumerate(runs):
                if draft:
                    before = max(j for j in plain if j < i)
                    after = min(j for j in plain if j > i)
                    pace = (runs[before][2] + runs[after][2]) / 2
                    result.tree_s[draft, tree_of(numbers)].append(seconds * usual / pace)
        return result

    @cached_property
    def total_s(self) -> float:
        """Engine seconds of the whole pass, plain once per prompt."""
        return sum(self.plain_s) + sum(sum(times) for times in self.tree_s.values())

    def speedup(self, point: Point, prompts: Sequence[int] | None = None) -> float:
        """Return total plain over total time of a tree; plain is 1."""
        chosen = range(len(self.plain_s)) if prompts is None else prompts
        times = self.plain_s if point[1].is_plain else self.tree_s[point]
        return sum(self.plain_s[p] for p in chosen) / sum(times[p] for p in chosen)


@dataclass
class RecordedTrack:
    """Plays a race on recorded times and adds up what it would have taken."""

    grid: Grid
    order: list[int]
    spent_s: float = 0.0

    @property
    def n_prompts(self) -> int:
        """Prompts that were recorded."""
        return len(self.order)

    def seconds(self, prompt: int, draft: str, tree: TreeConfig) -> float:
        """Return the recorded seconds; see `autotune.racing.Track`."""
        at = self.order[prompt]
        seconds = self.grid.plain_s[at] if tree.is_plain else self.grid.tree_s[draft, tree][at]
        self.spent_s += seconds
        return seconds


# --- ways of choosing ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What a way of choosing chose, and the engine time it took."""

    point: Point
    spent_s: float


@dataclass(frozen=True)
class _Fit:
    """What a fit predicts, in the place of a `Predictor`."""

    predictions: dict[Point, Prediction]

    def candidate(self, draft: str, tree: TreeConfig) -> Candidate:
        """Return a tree with its prediction."""
        return Candidate(draft, tree, self.predictions[draft, tree])


def spectune(grid_1: Grid, records: Records, size: Size, seed: int) -> Choice:
    """Play spectune's search: predictions of one fit, then the race."""
    fit = records.of("fit")[seed]
    predictions = {(d, tree_of(t)): Prediction(*both) for d, t, *both in fit["predicted"]}
    predicted = [Candidate(*point, prediction) for point, prediction in predictions.items()]
    spaces = spaces_of(list(predictions))
    order = random.Random(seed).sample(range(size.n_prompts), size.n_prompts)
    track = RecordedTrack(grid_1, order)
    stay = [c for c in (best_chain(predicted), best_shallow(predicted)) if c is not None]
    study = MeasuredStudy(
        spaces,
        lambda draft, tree: predictions[draft, tree],
        storage=None,
        name=str(seed),
        seed=seed,
    )
    first = contenders(predicted, spaces, _Fit(predictions))
    measured = study.run(first, track, size.n_trials, stay)
    best = max(measured, key=lambda c: c.speedup or 0.0)
    spent_s = track.spent_s + sum(grid_1.plain_s) + fit["cost_s"] + fit["replay_s"]
    return Choice((best.draft, best.tree), spent_s)


def tpe(grid_1: Grid, records: Records, size: Size, seed: int) -> Choice:
    """Play Optuna's TPE on measured trials alone."""
    spaces = spaces_of(list(grid_1.tree_s))
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)

    def propose() -> tuple[Point, Callable[[float], None]]:
        trial = study.ask()
        draft = trial.suggest_categorical("draft", DRAFTS)
        tree = spaces[draft].tree(
            trial.suggest_int("depth", 1, 16),
            trial.suggest_int("width", 1, 10),
            trial.suggest_int("top_k", 1, 10),
            trial.suggest_float("fill", 0.0, 1.0),
        )
        return (draft, tree), lambda speedup: study.tell(trial, speedup)

    return _measured_only(grid_1, propose)


def at_random(grid_1: Grid, records: Records, size: Size, seed: int) -> Choice:
    """Play random search."""
    points = iter(random.Random(seed).sample(list(grid_1.tree_s), len(grid_1.tree_s)))
    return _measured_only(grid_1, lambda: (next(points), lambda _: None))


def _measured_only(
    grid_1: Grid, propose: Callable[[], tuple[Point, Callable[[float], None]]]
) -> Choice:
    """Measure proposals on all prompts, plain beside them, until the share is spent."""
    spent_s, known = sum(grid_1.plain_s), {(DRAFTS[0], PLAIN): 1.0}
    for _ in range(10 * len(grid_1.tree_s)):
        point, tell = propose()
        if point not in known:
            cost_s = sum(grid_1.tree_s[point])
            if spent_s + cost_s > SHARE * grid_1.total_s:
                break
            spent_s += cost_s
            known[point] = grid_1.speedup(point)
        tell(known[point])
    return Choice(max(known, key=lambda point: known[point]), spent_s)


def best_default(grid_1: Grid, records: Records, size: Size, seed: int) -> Choice:
    """Measure the usual defaults and take the best of them."""
    points = [("demo", tree.canonical()) for tree in DEFAULTS]
    spent_s = sum(grid_1.plain_s) + sum(sum(grid_1.tree_s[point]) for point in points)
    return Choice(max(points, key=grid_1.speedup), spent_s)


def exhaustive(grid_1: Grid, records: Records, size: Size, seed: int) -> Choice:
    """Take the best tree of the whole first pass: what is left then is the grid's own noise."""
    return Choice(max(grid_1.tree_s, key=grid_1.speedup), grid_1.total_s)


WAYS = {
    "spectune": spectune,
    "exhaustive": exhaustive,
    "tpe": tpe,
    "random": at_random,
    "best_default": best_default,
}
RIVALS = tuple(way for way in WAYS if way != "spectune")


# --- verdict ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """The choices of all ways on one domain, by seed."""

    domain: str
    grid_2: Grid
    choices: dict[str, list[Choice]]
    grid_1_s: float

    def regrets(self, way: str, prompts: Sequence[int] | None = None) -> list[float]:
        """Return by seed what a choice falls short of the second pass's best."""
        best = max(self.grid_2.speedup(point, prompts) for point in self.grid_2.tree_s)
        return [1 - self.grid_2.speedup(c.point, prompts) / best for c in self.choices[way]]

    def share(self, way: str) -> float:
        """Return the mean engine time spent over that of the grid."""
        return float(np.mean([c.spent_s for c in self.choices[way]]) / self.grid_1_s)

    @property
    def spread(self) -> float:
        """How much slower the median tree of the grid is than the best."""
        speedups = [self.grid_2.speedup(point) for point in self.grid_2.tree_s]
        return 1 - float(np.median(speedups)) / max(speedups)


def play(records: Records, size: Size) -> Played:
    """Let every way choose on the first pass, once per seed."""
    domain = records.lines[0]["domain"]
    if len(records.of("block")) < 2 * size.n_prompts or len(records.of("fit")) < size.n_seeds:
        raise SystemExit(f"the records of {domain} are not whole; leave out --recorded to go on")
    grids = [Grid.of(records.of("block", number=number)) for number in (1, 2)]
    choices = {
        name: [way(grids[0], records, size, seed) for seed in range(size.n_seeds)]
        for name, way in WAYS.items()
    }
    return Played(domain, grids[1], choices, grids[0].total_s)


def interval(
    played: Sequence[Played], way: str, minus: str | None = None, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % interval of a mean regret, or of a difference of two, by bootstrap.

    Prompts and seeds are drawn anew, the same ones for both ways.
    """
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(N_RESAMPLES):
        values = []
        for domain in played:
            n = len(domain.grid_2.plain_s)
            prompts = rng.integers(0, n, n).tolist()
            regrets = np.array(domain.regrets(way, prompts))
            if minus is not None:
                regrets = regrets - np.array(domain.regrets(minus, prompts))
            values.append(regrets[rng.integers(0, len(regrets), len(regrets))].mean())
        means.append(float(np.mean(values)))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def plot(played: Sequence[Played], path: Path) -> None:
    """Draw regret against the share of the grid's engine time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for way in WAYS:
        shares = [100 * c.spent_s / d.grid_1_s for d in played for c in d.choices[way]]
        regrets = [100 * regret for d in played for regret in d.regrets(way)]
        axes.scatter(shares, regrets, label=way.replace("_", " "), alpha=0.6)
    axes.axhline(2, color="grey", linewidth=0.8)
    axes.axvline(100 * SHARE, color="grey", linewidth=0.8)
    axes.set_xlabel("engine time, % of the exhaustive grid's")
    axes.set_ylabel("regret against the grid's best, %")
    axes.legend()
    figure.savefig(path, dpi=150)


def options() -> argparse.Namespace:
    """Read the command line."""
    arguments = parser(__doc__)
    arguments.add_argument("--domains", nargs="+")
    arguments.add_argument("--folder", type=Path, default=Path("out/search"), help="raw records")
    arguments.add_argument(
        "--recorded",
        action="store_true",
        help="play whole records, of whatever machine; load no model and record nothing",
    )
    arguments.add_argument("--plot", type=Path, metavar="FILE.png")
    return arguments.parse_args()


def main() -> None:
    """Record what is missing, play, and print."""
    arguments = options()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    size = QUICK if arguments.quick else Size()
    folder = arguments.folder / ("quick" if arguments.quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        Records(folder / f"{domain}.jsonl", None)
        if arguments.recorded
        else record(domain, size, folder, arguments.seed)
        for domain in arguments.domains or size.domains
    ]
    played = [play(each, size) for each in records]
    means = {way: float(np.mean([r for d in played for r in d.regrets(way)])) for way in WAYS}
    figures = {
        "regret": means["spectune"],
        "regret_high": interval(played, "spectune")[1],
        "engine_time_share": float(np.mean([d.share("spectune") for d in played])),
        **{f"regret_{way}": means[way] for way in RIVALS},
    }
    by_domain = [
        [d.domain, d.spread, way, float(np.mean(d.regrets(way))), d.share(way)]
        for d in played
        for way in WAYS
    ]
    rivals = [
        [way, means[way] - means["spectune"], *interval(played, way, "spectune")] for way in RIVALS
    ]
    tables = [
        table(
            "Regret on the second pass, mean over seeds",
            ["domain", "grid's spread", "way", "regret", "share of the grid's time"],
            by_domain,
        ),
        table("Regret beyond spectune's", ["way", "mean", "low", "high"], rivals),
        table("Search", ["figure", "value"], list(figures.items())),
    ]
    if arguments.plot:
        plot(played, arguments.plot)
    facts = conditions("cpu", **records[0].lines[0]["device"])
    facts |= (
        {"trees": len(grid(size.every))}
        | vars(size)
        | {"domains": [each.domain for each in played]}
    )
    publish(figures, facts, tables, arguments.json)


if __name__ == "__main__":
    main()
