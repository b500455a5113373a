"""Do what-if answers hold? Predictions of `spectune what-if` against forced-text runs.

For every domain a profile is taken from `--profiles` (a folder with DOMAIN.yaml and its
measurements), or made here by a short tuning job. Every setting is predicted from the profile
alone, then run on the prompts it was made from, paired with plain decoding on forced text, in
random order. The speedup compared is that of decoding, the target's prefill left out.
"""

import math
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import DOMAINS, conditions, parser, publish, say, table

from autotune import Models, Settings, tune
from autotune.job import Job, prepare
from autotune.progress import OnTerminal, Silent
from autotune.tracing import flatten, record_answers
from autotune.what_if import what_if
from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedRun, run_forced
from engine.trace import Trace
from profiles import Profile, TreeConfig, load
from profiles.errors import SpectuneError

DRAFTS = ("demo", "lookup")

SETTINGS: tuple[dict[str, Any], ...] = (
    {"draft": "demo", "depth": 2, "width": 3, "top_k": 3, "nodes": 5},
    {"draft": "lookup", "depth": 4, "width": 1, "top_k": 1, "nodes": 4},
    {"draft": "demo", "depth": 8, "width": 10, "top_k": 10, "nodes": 59},
    {"draft": "demo", "depth": 1, "width": 1, "top_k": 1, "nodes": 1},
    {"draft": "demo", "depth": 3, "width": 1, "top_k": 1, "nodes": 3},
    {"draft": "demo", "depth": 6, "width": 1, "top_k": 1, "nodes": 6},
    {"draft": "demo", "depth": 3, "width": 3, "top_k": 3, "nodes": 9},  # never replayed
    {"draft": "demo", "depth": 4, "width": 4, "top_k": 4, "nodes": 16},
    {"draft": "demo", "depth": 5, "width": 8, "top_k": 8, "nodes": 32},
    {"draft": "demo", "depth": 2, "width": 3, "top_k": 3, "nodes": 5, "output_length": 24},
    {"draft": "lookup", "depth": 10, "width": 1, "top_k": 1, "nodes": 10},
    {"draft": "lookup", "depth": 6, "width": 2, "top_k": 3, "nodes": 14},  # never replayed
    {"draft": "lookup", "depth": 16, "width": 3, "top_k": 3, "nodes": 32},
)
N_QUICK = 4


@dataclass(frozen=True)
class Row:
    """One setting of one domain.

    Attributes:
        domain, label: What ran.
        is_replayed: Whether its tau was replayed, or comes from tables.
        tau, speedup: Predicted.
        real_tau, real_speedup: Measured.
        half: Half the 95 % interval of the measured speedup, relative.
        low, high: The interval of the prediction.
    """

    domain: str
    label: str
    is_replayed: bool
    tau: float
    speedup: float
    real_tau: float
    real_speedup: float
    half: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Relative error of the predicted speedup."""
        return self.speedup / self.real_speedup - 1


def main() -> None:
    """Predict, measure, compare and print."""
    options = parser(__doc__)
    options.add_argument("--target", default="demo")
    options.add_argument("--domains", nargs="+", default=["code", "rewrite"])
    options.add_argument("--profiles", type=Path, help="folder with DOMAIN.yaml of fresh profiles")
    arguments = options.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    domains = arguments.domains[:1] if arguments.quick else arguments.domains
    settings = [s for s in SETTINGS if s["draft"] == "demo"][:N_QUICK]
    if not arguments.quick:
        settings = list(SETTINGS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for domain in domains:
            path = (arguments.profiles or Path(folder)) / f"{domain}.yaml"
            if arguments.profiles is None:
                _tune(arguments.target, domain, path, arguments.quick)
            rows += compare(arguments.target, domain, path, settings, arguments.seed)
    errors = [abs(row.error) for row in rows]
    low, high = _median_interval(errors, arguments.seed)
    figures = {
        "speedup_error_median": statistics.median(errors),
        "speedup_error_median_low": low,
        "speedup_error_median_high": high,
        "speedup_error_p90": float(np.quantile(errors, 0.9)),
        "settings": len(rows),
        "within_interval": sum(r.low <= r.real_speedup <= r.high for r in rows) / len(rows),
        "rows": [vars(row) | {"error": row.error} for row in rows],
    }
    profile_facts = conditions(
        "cpu", threads=torch.get_num_threads(), target=arguments.target, text="forced, greedy"
    )
    publish(figures, profile_facts, [_table(rows), _summary(figures)], arguments.json)


def _tune(target: str, domain: str, path: Path, quick: bool) -> None:
    """Make a profile by a job that measures costs in full and hardly proves anything."""
    n_prompts, n_tokens, n_probes = (4, 32, 4) if quick else (8, 48, 10)
    settings = Settings(
        n_tune=n_prompts,
        n_replay=n_prompts,
        n_race=2,
        n_holdout=1,
        n_trials=1,
        max_new_tokens=n_tokens,
        n_probe_rounds=n_probes,
    )
    models = Models(target, DRAFTS[:1] if quick else DRAFTS)
    tune(models, DOMAINS / f"{domain}.jsonl", path, settings=settings, progress=OnTerminal())


def compare(
    target: str, domain: str, path: Path, settings: Sequence[dict[str, Any]], seed: int
) -> list[Row]:
    """Predict every setting from a profile and run it on the profile's own prompts."""
    profile = load(path)
    answers = [what_if(path, setting).answers[0] for setting in settings]
    job = _job_of(target, domain, profile)
    n_replayed = min(job.settings.n_replay, profile.domain.n_tune)
    traces = flatten(record_answers(job, job.sample.tune[:n_replayed], Silent(), ""))
    runs = run_settings(job, traces, settings, seed)
    rows = []
    for setting, answer, pairs in zip(settings, answers, runs, strict=True):
        speedup, half = _speedup(pairs)
        stats = [speculative.stats for _, speculative in pairs]
        low, high = answer.interval or (math.nan, math.nan)
        length = f", {setting['output_length']} tokens" if "output_length" in setting else ""
        rows.append(
            Row(
                domain=domain,
                label=f"{answer.draft} {answer.tree.label()}{length}",
                is_replayed=answer.tau.is_replayed,
                tau=answer.tau.value,
                speedup=answer.decode_speedup,
                real_tau=sum(s.n_round_tokens for s in stats) / sum(s.n_rounds for s in stats),
                real_speedup=speedup,
                half=half,
                low=low,
                high=high,
            )
        )
    return rows


def _job_of(target: str, domain: str, profile: Profile) -> Job:
    """Draw a profile's sample again and load what it was made with."""
    if profile.search is None:
        raise SpectuneError(f"{profile.name} must say with which seed it was made: tune it again")
    settings = Settings(
        n_tune=profile.domain.n_tune,
        n_holdout=max(1, profile.domain.n_holdout),
        max_new_tokens=profile.domain.max_new_tokens,
        seed=profile.search.seed,
        sampling=profile.sampling,
    )
    job = prepare(Models(target, DRAFTS), DOMAINS / f"{domain}.jsonl", domain, settings, Silent())
    if job.sample.fingerprint != profile.domain.sample_sha256:
        raise SpectuneError(f"{profile.name} was not made from {domain}.jsonl: tune it again")
    return job


Pair = tuple[ForcedRun, ForcedRun]
"""A plain run and the speculative one beside it."""


def run_settings(
    job: Job, traces: Sequence[Trace], settings: Sequence[dict[str, Any]], seed: int
) -> list[list[Pair]]:
    """Run every setting once on every text, in random order, plain runs among them."""
    plain = SpeculativeDecoder(job.loaded, sampling=job.settings.sampling)
    decoders = [_decoder(job, setting) for setting in settings]
    rng, pairs = random.Random(seed), defaultdict(list)
    for decoder, trace in [(d, traces[0]) for d in (plain, *decoders)]:
        run_forced(decoder, trace)  # warm-up
    for i, trace in enumerate(traces):
        say(f"Running text {i + 1} of {len(traces)}")
        order = rng.sample(range(len(settings)), len(settings))
        before = _run(plain, trace, None)
        for place, index in enumerate(order):
            length = settings[index].get("output_length")
            run = _run(decoders[index], trace, length)
            # A plain run after every second setting: each setting stands next to one.
            if place % 2 == 0:
                reference = before
            else:
                reference = before = _run(plain, trace, None)
            if length is not None:
                reference = _run(plain, trace, length)
            pairs[index].append((reference, run))
    return [pairs[index] for index in range(len(settings))]


def _decoder(job: Job, setting: dict[str, Any]) -> SpeculativeDecoder:
    tree = TreeConfig(**{key: setting[key] for key in ("depth", "width", "top_k", "nodes")})
    draft = job.drafts[setting["draft"]].draft
    return SpeculativeDecoder(job.loaded, draft, tree, job.settings.sampling)


def _run(decoder: SpeculativeDecoder, trace: Trace, length: int | None) -> ForcedRun:
    return run_forced(decoder, Trace(trace.id, trace.prompt, trace.generated[:length]))


def _speedup(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the ratio of total decoding times, and half its relative 95 % interval."""
    plain = np.array([p.decode_s for p, _ in pairs])
    speculative = np.array([s.decode_s for _, s in pairs])
    ratio = float(plain.sum() / speculative.sum())
    # Spread of the ratio of sums, with the texts taken as given: only their timing varies.
    residuals = plain - ratio * speculative
    spread = math.sqrt(float((residuals**2).sum())) / float(speculative.sum())
    return ratio, 1.96 * spread / ratio


def _median_interval(errors: Sequence[float], seed: int) -> tuple[float, float]:
    """Return a 95 % interval of the median by bootstrap over settings."""
    drawn = np.random.default_rng(seed).choice(errors, (2000, len(errors)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


def _table(rows: Sequence[Row]) -> Any:
    columns = ("setting", "domain", "tau", "real tau", "speedup", "interval", "real", "error")
    cells = [
        (
            row.label,
            row.domain,
            f"{row.tau:.2f}" + ("" if row.is_replayed else "~"),
            f"{row.real_tau:.2f}",
            f"{row.speedup:.2f}x",
            f"{row.low:.2f}-{row.high:.2f}",
            f"{row.real_speedup:.2f}x ±{100 * row.half:.0f} %",
            f"{100 * row.error:+.1f} %",
        )
        for row in rows
    ]
    return table("What-if predictions and forced-text runs, decoding only", columns, cells)


def _summary(figures: dict[str, Any]) -> Any:
    shown = [(name, value) for name, value in figures.items() if name != "rows"]
    return table("Figures", ("figure", "value"), shown)


if __name__ == "__main__":
    main()
