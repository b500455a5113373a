"""Timing trees on batches of tune prompts: which is best at each size, and what rounds take."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedBatch, ForcedRun, run_forced, run_forced_batch
from engine.trace import Trace
from profiles import PLAIN, TreeConfig

from ..candidates import Candidate, best_chain, best_shallow
from ..job import Job, longest_text
from ..progress import Silent, Tick
from ..settings import Settings
from ..tracing import Conversation
from .blocks import batch_decoder, batches_of

MAX_TREES = 6
"""Trees tried at every batch size."""

N_BATCHES = 3
"""Batches of tune prompts on which trees are compared."""


@dataclass
class SizeTimes:
    """What one batch size took on the tune prompts.

    Attributes:
        size: Prompts in flight.
        single: The first prompt of every batch by itself, plainly.
        plain: Plain decoding, before and after the trees of every batch.
        trees: By tree, a run per batch.
        n_fit: Prompts that the memory holds at a time; below `size` nothing was timed.
    """

    size: int
    single: list[ForcedRun] = field(default_factory=list)
    plain: list[tuple[ForcedBatch, ForcedBatch]] = field(default_factory=list)
    trees: dict[TreeConfig, list[ForcedBatch]] = field(default_factory=dict)
    n_fit: int = sys.maxsize

    @property
    def plain_s(self) -> list[float]:
        """Seconds of plain decoding by batch."""
        return [(before.total_s + after.total_s) / 2 for before, after in self.plain]

    def speedup(self, tree: TreeConfig) -> float:
        """Ratio of total times, plain over the tree."""
        return sum(self.plain_s) / sum(run.total_s for run in self.trees[tree])

    @property
    def best(self) -> TreeConfig | None:
        """The tree with the largest speedup, faster than plain or not; None if none was tried."""
        return max(self.trees, key=self.speedup, default=None)


def larger_sizes(settings: Settings) -> list[int]:
    """Return the batch sizes asked for beyond a single prompt, in order."""
    return sorted({size for size in settings.batch_sizes if size > 1})


def trees_for_batches(leader: Candidate, measured: Sequence[Candidate]) -> list[TreeConfig]:
    """Return trees to try with several prompts: the leader, a shallow tree, chains, smaller ones.

    The more rows share a pass, the more a node costs, so that trees get smaller.
    """
    same = [c for c in measured if c.draft == leader.draft and not c.tree.is_plain]
    rivals = [best_shallow(same), best_chain(same)]
    trees = [leader.tree, leader.tree.limited(max(1, leader.tree.depth // 2))]
    trees += [c.tree for c in rivals if c is not None]
    trees += [leader.tree.limited(2), TreeConfig.chain(2), TreeConfig.chain(1)]
    return list(dict.fromkeys(tree.canonical() for tree in trees))[:MAX_TREES]


def measure_sizes(
    job: Job,
    leader: Candidate,
    measured: Sequence[Candidate],
    texts: Sequence[Conversation],
    progress: Silent,
) -> list[SizeTimes]:
    """Time plain decoding and every tree on batches of tune prompts, at every size asked for."""
    space = job.spaces[leader.draft]
    trees = [tree for tree in trees_for_batches(leader, measured) if space.contains(tree)]
    decoders = [batch_decoder(job, leader.draft, tree) for tree in (PLAIN, *trees)]
    n_tokens = longest_text(job.sample, job.settings)
    n_fit = min(decoder.rows_that_fit(n_tokens) for decoder in decoders)
    planned = {
        n: batches_of(texts, n)[:N_BATCHES] if n <= n_fit else []
        for n in larger_sizes(job.settings)
    }
    n_runs = sum(map(len, planned.values())) * (3 + len(trees))
    with progress.step("Measuring batches", n_runs) as tick:
        return [
            _measure_size(SizeTimes(size, n_fit=n_fit), decoders, batches, job.settings.seed, tick)
            for size, batches in planned.items()
        ]


def _measure_size(
    times: SizeTimes,
    decoders: Sequence[SpeculativeDecoder],
    batches: Sequence[Sequence[Trace]],
    seed: int,
    tick: Tick,
) -> SizeTimes:
    """Add the times of plain decoding, the first of the decoders, and of every tree."""
    plain, *others = decoders
    rng = random.Random(seed)

    def run(decoder: SpeculativeDecoder, batch: Sequence[Trace]) -> ForcedBatch:
        done = run_forced_batch(decoder, batch)
        tick()
        return done

    for batch in batches:
        times.single.append(run_forced(plain, batch[0]))
        tick()
        before = run(plain, batch)
        for decoder in rng.sample(others, len(others)):
            times.trees.setdefault(decoder.tree, []).append(run(decoder, batch))
        times.plain.append((before, run(plain, batch)))
    return times
