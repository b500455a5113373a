"""Step 4: time served rounds and fit the cost model to them."""

from collections.abc import Sequence

from engine.contexts import N_NODES, measure_contexts
from engine.draft import Draft
from engine.hybrid import HybridDraft
from engine.memory import free_bytes, need_of
from engine.rounds import PLAIN_EVERY, VERIFY_PROBES, ProbeDraft, measure_rounds
from engine.trace import Trace
from profiles import TreeConfig

from ..job import Job
from ..progress import Silent
from ..space import SearchSpace
from .model import CostModel

SHORT_CONTEXT, LONG_CONTEXT = 64, 1024
"""Tokens before the passes that tell what context costs."""


def measure_costs(job: Job, traces: Sequence[Trace], progress: Silent) -> CostModel:
    """Return the cost model of the job's target and drafts on this device."""
    settings = job.settings
    probes = [
        TreeConfig(depth=1, width=1, top_k=n, nodes=n) for n in verify_probes(settings.max_nodes)
    ]
    drafts = {n: loaded.draft for n, loaded in job.drafts.items() if n not in job.variant_of}
    trees = {name: draft_probes(job.spaces[name]) for name in drafts}
    n_rounds = 0
    for n in (len(probes), *(len(group) for group in trees.values())):
        n_rounds += settings.n_probe_rounds * (n + -(-n // PLAIN_EVERY) + 1)
    with progress.step("Timing rounds", n_rounds) as tick:
        times = {
            name: measure_rounds(
                job.loaded.target,
                draft,
                traces,
                chosen,
                n_rounds=settings.n_probe_rounds,
                sampling=settings.sampling,
                seed=settings.seed,
                tick=tick,
            )
            for name, draft, chosen in (
                ("", ProbeDraft(), probes),
                *((name, _to_time(draft), trees[name]) for name, draft in drafts.items()),
            )
        }
    contexts = measure_contexts(
        job.loaded.target, contexts_of(job, traces), settings.n_probe_rounds, settings.seed
    )
    costs = CostModel(times.pop(""), times, contexts)
    costs.share(job.variant_of)
    return costs


def _to_time(draft: Draft) -> Draft:
    """Return the draft whose rounds show every part of its price."""
    return draft.never_matching() if isinstance(draft, HybridDraft) else draft


def verify_probes(max_nodes: int) -> list[int]:
    """Return the sizes at which verify passes are timed, the largest being `max_nodes`."""
    return [*(n for n in VERIFY_PROBES if n < max_nodes), max_nodes]


def contexts_of(job: Job, traces: Sequence[Trace]) -> tuple[int, int]:
    """Return the two lengths of context to time: none of the sample's is beyond them."""
    shortest = min(SHORT_CONTEXT, *(len(trace.prompt) for trace in traces))
    longest = max(LONG_CONTEXT, *(len(trace.tokens) for trace in traces))
    target = job.loaded.target
    room = (target.max_positions or longest + N_NODES + 1) - N_NODES - 1
    room = min(room, need_of(target).longest(free_bytes(target.device)) // 2)  # two caches
    return shortest, max(shortest, min(longest, room))


def draft_probes(space: SearchSpace) -> list[TreeConfig]:
    """Return the trees on which a draft's own share of a round is timed."""
    shapes = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (3, 4), (6, 4), (2, 8), (5, 8))
    trees = []
    for depth, width in shapes:
        depth, width = min(depth, space.max_depth), min(width, space.max_width, space.max_top_k)
        fill = 0.5 if width > 1 else 1.0
        trees.append(space.tree(depth, width, width, fill))
    return list(dict.fromkeys(trees))
