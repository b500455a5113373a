"""What a job will take, estimated before it starts, and what it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.rounds import VERIFY_PROBES

from .costing import draft_probes
from .job import Job

ROUND = 2.0
"""A timed speculative round, in plain rounds."""

PROBE = 0.05
"""Probing a head's conventions on an answer, in times of decoding it plainly."""

REPLAY = 0.3
"""Replaying a draft's trees over an answer, in times of decoding it plainly."""

RACED = 0.7
"""Share of a race that stopping early leaves."""

SPECULATIVE = 0.8
"""A speculative request, in times of a plain one."""

TYPICAL_RUNGS = 2


@dataclass(frozen=True)
class Plan:
    """Estimated seconds by step."""

    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        """Estimated seconds of the whole job."""
        return sum(self.seconds.values())

    def text(self) -> str:
        """Return the plan in one line."""
        return f"Plan: about {self.total_s / 60:.1f} min ({_listed(self.seconds)})."


def plan_of(job: Job) -> Plan:
    """Estimate a job from the time of one plain token and the counts of its settings."""
    settings, n_holdout = job.settings, len(job.sample.holdout)
    answer_s = settings.max_new_tokens * job.plain_token_s
    n_probes = len(VERIFY_PROBES) + sum(len(draft_probes(s)) for s in job.spaces.values())
    n_tune = len(job.sample.tune)
    n_heads = sum(draft.head.ref.kind == "eagle3" for draft in job.drafts.values())
    n_race = min(settings.n_race, n_tune)
    return Plan(
        {
            "trace": answer_s * (n_tune + n_holdout),
            "probe": PROBE * answer_s * n_tune * n_heads,
            "cost": (1 + ROUND) * settings.n_probe_rounds * n_probes * job.plain_token_s,
            "search": answer_s
            * (
                REPLAY * min(settings.n_replay, n_tune) * len(job.drafts)
                + RACED * (1 + SPECULATIVE) * n_race * settings.n_trials
            ),
            "holdout": answer_s * n_holdout * 2 * (1 + TYPICAL_RUNGS * SPECULATIVE),
        }
    )


class Stopwatch:
    """Seconds spent in each step of a job."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - started

    def text(self) -> str:
        """Return where the time went, in one line."""
        total = sum(self.seconds.values())
        return f"Took {total / 60:.1f} min ({_listed(self.seconds)})."


def _listed(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
