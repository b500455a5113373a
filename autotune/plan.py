"""What a job will take, estimated before it starts and again when the text is recorded."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from engine.rounds import PLAIN_EVERY
from profiles.errors import UsageError

from .batches.trying import MAX_TREES, N_BATCHES, larger_sizes
from .cost.timing import draft_probes, verify_probes
from .job import Job
from .progress import Silent
from .sample import first_of
from .settings import Settings
from .tracing import Conversation, flatten, record_answers

ROUND = 1.6
"""A timed speculative round, in plain rounds."""

CONTEXT_PASSES = 6
"""The passes behind short and long contexts, in plain rounds."""

PROBE = 0.1
"""Probing a head's conventions on an answer, in times of decoding it plainly."""

REPLAY = 1.0
"""Replaying a draft's trees over an answer, in times of decoding it plainly."""

RACED = 0.85
"""Share of a race that stopping early leaves."""

SPECULATIVE = 0.7
"""A speculative request, in times of a plain one."""

ROW = 0.3
"""What every prompt beside the first adds to the time of a batch, in times of a plain answer."""

TYPICAL_RUNGS = 2

BASELINE_ANSWERS = 16
"""Comparing plain decoding with transformers' generate, in times of decoding an answer."""

SCALES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""How much of the settings' counts is kept to fit a budget; the first that fits is taken."""

FLOORS = {
    **{"n_tune": 4, "n_holdout": 8, "n_replay": 4, "n_race": 3},
    **{"n_trials": 5, "n_probe_rounds": 5, "max_new_tokens": 32},
}
"""The least a budget can cut each count to."""

WORDS = {
    **{"n_holdout": "prompts held out", "n_tune": "prompts to search on"},
    **{"n_replay": "of these to replay trees on", "n_race": "of these to time trees on"},
    **{"n_trials": "trees to measure", "n_probe_rounds": "rounds timed for each price"},
    **{"max_new_tokens": "tokens of an answer"},
}
"""The counts in words for people."""


@dataclass(frozen=True)
class Pace:
    """How fast plain decoding is here.

    Attributes:
        token_s: Seconds per token of an answer, prefill included.
        n_tokens: Tokens of a prompt's answers, all its turns together.
        n_turns: Turns of a prompt.
    """

    token_s: float
    n_tokens: float
    n_turns: float = 1.0

    @property
    def answer_s(self) -> float:
        """Seconds of a prompt's answers."""
        return self.token_s * self.n_tokens

    def within(self, max_new_tokens: int) -> "Pace":
        """Return the same pace with answers of at most so many tokens."""
        return replace(self, n_tokens=min(self.n_tokens, self.n_turns * max_new_tokens))

    @classmethod
    def of(cls, seconds: float, conversations: Sequence[Conversation]) -> "Pace":
        """Return the pace at which conversations were recorded."""
        answers, n = flatten(conversations), len(conversations)
        n_tokens = sum(len(trace.generated) for trace in answers)
        return cls(seconds / n_tokens, n_tokens / n, len(answers) / n)


@dataclass(frozen=True)
class Plan:
    """Estimated seconds by step; steps that are done count with what they took."""

    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """Estimated seconds of the whole job."""
        return sum(self.seconds.values())

    def text(self, title: str = "Plan") -> str:
        """Return the plan in one line."""
        return f"{title}: about {self.total_s / 60:.1f} min ({_listed(self.seconds)})."


def plan_of(job: Job, pace: Pace, done: Mapping[str, float]) -> Plan:
    """Estimate a job from its pace and the counts of its settings.

    Args:
        job: The job.
        pace: Of plain decoding.
        done: Seconds by step that the job has taken so far.
    """
    settings, answer_s = job.settings, pace.answer_s
    n_tune, n_holdout = len(job.sample.tune), len(job.sample.holdout)
    n_probes = len(verify_probes(settings.max_nodes))
    n_probes += sum(len(draft_probes(space)) for space in job.spaces.values())
    n_heads = sum(draft.head.ref.kind == "eagle3" for draft in job.drafts.values())
    n_drafts = len(job.drafts) - len(job.variant_of)
    replay = REPLAY * min(settings.n_replay, n_tune) * n_drafts
    race = min(settings.n_race, n_tune) * (2 + RACED * SPECULATIVE * (settings.n_trials - 1))
    rounds = settings.n_probe_rounds * (n_probes * (ROUND + 1 / PLAIN_EVERY) + CONTEXT_PASSES)
    estimates = {
        "trace": answer_s * (n_tune + n_holdout),
        "probe": PROBE * answer_s * n_tune * n_heads,
        "cost": pace.token_s * rounds,
        "search": answer_s * (replay + race),
        "holdout": answer_s
        * (n_holdout * 2 * (1 + TYPICAL_RUNGS * SPECULATIVE) + BASELINE_ANSWERS),
    }
    if sizes := larger_sizes(settings):
        batches = sum(_batch_runs(n, n_tune, n_holdout) * (1 + ROW * (n - 1)) for n in sizes)
        estimates["batches"] = answer_s * batches
    return Plan({"prepare": 0.0} | estimates | dict(done))


def _batch_runs(size: int, n_tune: int, n_holdout: int) -> float:
    """Return the runs of batches of a size, in times of a plain one."""
    tried = min(N_BATCHES, n_tune // size) * (2 + SPECULATIVE * MAX_TREES)
    return tried + (n_holdout // size) * 2 * (1 + SPECULATIVE)


def first_pace(job: Job) -> Pace:
    """Decode two of the tune prompts to see how fast that is; the first one warms up."""
    record_answers(job, job.sample.tune[:1], Silent(), "")
    few = job.sample.tune[1:3] or job.sample.tune
    started = time.perf_counter()
    answers = record_answers(job, few, Silent(), "")
    return Pace.of(time.perf_counter() - started, answers)


def fit_budget(job: Job, pace: Pace, done: Mapping[str, float], budget_s: float) -> Job:
    """Return the job with its counts cut so that its plan fits the budget.

    Raises:
        UsageError: Even the shortest job takes longer.
    """
    for scale in SCALES:
        cut = _scaled(job, scale)
        planned = plan_of(cut, pace.within(cut.settings.max_new_tokens), done)
        if planned.total_s <= budget_s:
            return cut
    raise UsageError(
        f"a job here takes at least {planned.total_s / 60:.1f} min, but the budget is "
        f"{budget_s / 60:.1f}; raise --budget-min, or give fewer drafts"
    )


def agree(
    job: Job,
    pace: Pace,
    done: Mapping[str, float],
    budget_s: float | None,
    progress: Silent,
) -> tuple[Job, Plan]:
    """Return the job, cut to the budget if there is one, and its plan; say both.

    Raises:
        UsageError: Even the shortest job takes longer than the budget.
    """
    asked = job.settings
    if budget_s is not None:
        job = fit_budget(job, pace, done, budget_s)
    if cut := cuts(asked, job.settings):
        progress.say(f"Cut to fit the budget: {cut}.")
    planned = plan_of(job, pace.within(job.settings.max_new_tokens), done)
    progress.say(planned.text())
    return job, planned


def cuts(before: Settings, after: Settings) -> str | None:
    """Return what a budget has cut, in words; None if nothing."""
    changed = (name for name in WORDS if getattr(after, name) != getattr(before, name))
    texts = [f"{getattr(after, n)} {WORDS[n]} instead of {getattr(before, n)}" for n in changed]
    return ", ".join(texts) or None


def _scaled(job: Job, scale: float) -> Job:
    """Return the job with its counts cut to a share; counts that prompts are short of first."""
    has = {"n_tune": len(job.sample.tune), "n_holdout": len(job.sample.holdout)}
    counts = {}
    for name, floor in FLOORS.items():
        asked = getattr(job.settings, name)
        wanted = max(floor, int(scale * min(asked, has.get(name, asked))))
        counts[name] = asked if scale == 1 else min(asked, wanted)
    settings = replace(job.settings, **counts)
    return replace(job, settings=settings, sample=first_of(job.sample, settings))


class Stopwatch:
    """Seconds spent in each step of a job."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step; a name that was used before is added to."""
        started = time.perf_counter()
        try:
            yield
        finally:
            before = self.seconds.get(name, 0.0)
            self.seconds[name] = before + time.perf_counter() - started

    def text(self) -> str:
        """Return where the time went, in one line."""
        total = sum(self.seconds.values())
        return f"Took {total / 60:.1f} min ({_listed(self.seconds)})."


def _listed(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
