"""Step 5, second half: the most promising trees timed on the tune prompts, side by side.

On every prompt plain decoding runs first and last and the trees in between, in random order, so
that all of them meet the same machine; a tree that is clearly behind the best one leaves.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from scipy import stats

from engine.decoder import SpeculativeDecoder
from engine.forced import run_forced
from engine.trace import Tick, no_tick
from profiles import PLAIN, TreeConfig

from .candidates import (
    PLAIN_PREDICTION,
    Candidate,
    best_chain,
    best_shallow,
    defaults_within,
    leaders,
)
from .cost.predicting import Predictor
from .job import Job
from .space import SearchSpace
from .tracing import Conversation

N_LEADERS = 5
"""Predicted leaders that are measured whatever Optuna proposes."""

MIN_PROMPTS = 3
"""Prompts before a tree can leave a race."""

ENOUGH_PROMPTS = 6
"""Prompts after which a race ends once nothing is left to decide."""

P_BEHIND = 0.05
"""A tree leaves when it would look this far behind by chance with this probability."""

P_DOUBT = 0.005
"""A tree is ahead of plain decoding beyond doubt if chance explains it no better than this."""

LEAST_SPREAD = 0.01
"""Spread of log ratios below which agreement between few prompts is chance."""


class Track(Protocol):
    """What a race is run on."""

    @property
    def n_prompts(self) -> int:
        """Prompts to race on."""

    def seconds(self, prompt: int, draft: str, tree: TreeConfig) -> float:
        """Run a prompt with a tree, plainly if the tree is plain, and return its seconds.

        Raises:
            MemoryError: The tree does not fit the device.
        """


@dataclass
class Runner:
    """A tree in a race.

    Attributes:
        draft: Its draft's name.
        tree: The tree.
        stays: Whether it is measured to the end even if it is behind.
        ratios: Its speedups by prompt so far.
        state: `running`, `finished`, `behind` or `failed`.
    """

    draft: str
    tree: TreeConfig
    stays: bool = False
    ratios: dict[int, float] = field(default_factory=dict)
    state: str = "running"

    @property
    def speedup(self) -> float:
        """Mean speedup on the prompts seen."""
        return sum(self.ratios.values()) / len(self.ratios)

    def report(self, prompt: int, ratio: float) -> None:
        """Take note of the speedup on a prompt."""
        self.ratios[prompt] = ratio


def race(
    track: Track, runners: Sequence[Runner], rivals: Sequence[Mapping[int, float]], seed: int = 0
) -> None:
    """Time trees on one prompt after another until they are behind, or nothing is undecided.

    Args:
        track: Times them.
        runners: The trees; their states and ratios are filled in.
        rivals: Speedups by prompt of trees that were measured before.
        seed: Of the order on each prompt.
    """
    rng = random.Random(seed)
    for prompt in range(track.n_prompts):
        running = [runner for runner in runners if runner.state == "running"]
        if not running or (prompt >= ENOUGH_PROMPTS and not _undecided(running, rivals)):
            break
        _run_prompt(track, prompt, [r for r in running if prompt not in r.ratios], rng)
        best = _best([*rivals, *(r.ratios for r in runners if r.state == "running")])
        for runner in running:
            if runner.state == "running" and not runner.stays and is_behind(runner.ratios, best):
                runner.state = "behind"
    for runner in runners:
        if runner.state == "running":
            runner.state = "finished"


def is_behind(ratios: Mapping[int, float], best: Mapping[int, float]) -> bool:
    """Tell whether a tree is slower than the best one on the prompts that both have."""
    prompts = ratios.keys() & best.keys()
    return _p_of_chance([best[prompt] / ratios[prompt] for prompt in prompts]) < P_BEHIND


def is_ahead(ratios: Sequence[float]) -> bool:
    """Tell whether a tree is faster than plain decoding beyond doubt."""
    return _p_of_chance(ratios) < P_DOUBT


def _p_of_chance(ratios: Sequence[float]) -> float:
    """Return how likely ratios of a true 1 look this large: one-sided t on their logs."""
    if len(ratios) < MIN_PROMPTS:
        return 1.0
    logs = np.log(np.array(ratios))
    error = max(float(logs.std(ddof=1)), LEAST_SPREAD) / math.sqrt(len(logs))
    return float(stats.t.sf(logs.mean() / error, len(logs) - 1))


def _run_prompt(track: Track, prompt: int, runners: Sequence[Runner], rng: random.Random) -> None:
    """Run one prompt with every tree between two plain runs."""
    if not runners:
        return
    plain_s = track.seconds(prompt, "", PLAIN)
    seconds: dict[int, float] = {}
    for i in rng.sample(range(len(runners)), len(runners)):
        try:
            seconds[i] = track.seconds(prompt, runners[i].draft, runners[i].tree)
        except MemoryError:  # this tree is infeasible; the others go on
            runners[i].state = "failed"
    plain_s = (plain_s + track.seconds(prompt, "", PLAIN)) / 2
    for i, tree_s in seconds.items():
        ratio = plain_s / tree_s if tree_s > 0 else math.inf
        if math.isfinite(ratio) and ratio > 0:
            runners[i].report(prompt, ratio)
        else:
            runners[i].state = "failed"


def _undecided(running: Sequence[Runner], rivals: Sequence[Mapping[int, float]]) -> bool:
    """Tell whether more prompts could change which tree leads."""
    contesting = [runner.speedup for runner in running if not runner.stays]
    others = [runner.speedup for runner in running if runner.stays]
    others += [sum(ratios.values()) / len(ratios) for ratios in rivals]
    return len(contesting) > 1 or any(other > lead for other in others for lead in contesting)


def _best(measured: Sequence[Mapping[int, float]]) -> Mapping[int, float]:
    """Return the ratios with the best mean on the prompts that all have; empty if none."""
    measured = [ratios for ratios in measured if ratios]
    if not measured:
        return {}
    shared = set.intersection(*(set(ratios) for ratios in measured))
    return max(measured, key=lambda ratios: sum(math.log(ratios[p]) for p in shared))


def contenders(
    predicted: Sequence[Candidate],
    spaces: Mapping[str, SearchSpace],
    predictor: Predictor,
    variant_of: Mapping[str, str] | None = None,
) -> list[Candidate]:
    """Return what is measured first: the leader, plain, chain and shallow tree, more leaders."""
    first, *others = leaders(predicted, N_LEADERS, variant_of)
    chosen = [first, Candidate(next(iter(spaces)), PLAIN, PLAIN_PREDICTION)]
    chosen += [c for c in (best_chain(predicted), best_shallow(predicted)) if c is not None]
    chosen += others
    given = {name: space for name, space in spaces.items() if name not in (variant_of or {})}
    chosen += [predictor.candidate(draft, tree) for draft, tree in defaults_within(given)]
    unique = {(c.draft, c.tree.canonical()): c for c in reversed(chosen)}
    return list(reversed(unique.values()))


class ForcedTrack:
    """Times requests end to end on forced text.

    Args:
        job: Its target and drafts.
        conversations: The recorded text; the turns of one are timed together.
        tick: Called after each run.
    """

    def __init__(
        self, job: Job, conversations: Sequence[Conversation], tick: Tick = no_tick
    ) -> None:
        self._job = job
        self._conversations = conversations
        self._tick = tick
        self._decoders: dict[tuple[str, TreeConfig], SpeculativeDecoder] = {}

    @property
    def n_prompts(self) -> int:
        """Conversations to race on."""
        return len(self._conversations)

    def seconds(self, prompt: int, draft: str, tree: TreeConfig) -> float:
        """Return the seconds of a conversation; see `Track.seconds`."""
        if (draft, tree) not in self._decoders:
            self._decoders[draft, tree] = self._decoder(prompt, draft, tree)
        decoder, conversation = self._decoders[draft, tree], self._conversations[prompt]
        try:
            seconds = sum(run_forced(decoder, trace).total_s for trace in conversation)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        decoder.remember(conversation)
        self._tick()
        return seconds

    def _decoder(self, prompt: int, draft: str, tree: TreeConfig) -> SpeculativeDecoder:
        """Return a decoder that has answered the prompts before this one."""
        job = self._job
        drafting = None if tree.is_plain else job.drafts[draft].draft
        decoder = SpeculativeDecoder(job.loaded, drafting, tree, job.settings.sampling)
        for conversation in self._conversations[:prompt]:
            decoder.remember(conversation)
        return decoder
