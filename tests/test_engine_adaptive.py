"""Adaptive drafting: hand arithmetic of the rule, and replay against what is really decoded."""

import math

import pytest
import torch

from engine.adaptive import Shaper
from engine.adaptive_replay import AdaptiveReplay
from engine.decode import Request
from engine.sampling import Sampler, request_seed
from engine.stopping import StopRules
from engine.tree import Pool
from profiles import Calibration, CostModelSummary, CostTable, PathTable, TreeConfig
from profiles.prices import Prices
from test_engine_replay import GREEDY, SAMPLED, SEED, setting

LIMITS = TreeConfig(depth=2, width=2, top_k=2, nodes=6)


def shaper(rate: float) -> Shaper:
    """Scores are taken at their word; a node costs 0.1 (the first one 0.2), a level 0.1."""
    tables = [
        CostTable(name="verify", x=[0.0, 1.0, 6.0], relative=[1.0, 1.2, 1.7]),
        CostTable(name="level", x=[1.0, 2.0], relative=[0.1, 0.1]),
    ]
    score = [math.log(p) for p in (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)]
    table = PathTable(score=score, probability=[0.01, 0.1, 0.25, 0.5, 0.75, 1.0], hit=0.5)
    calibration = Calibration(limits=LIMITS, tokens_per_pass=rate, depths=[table] * 2)
    return Shaper(calibration, Prices(CostModelSummary(reference_ms=1.0, tables=tables)), True)


def pool(*levels: list[float]) -> Pool:
    """Return a pool of paths with these probabilities; only scores matter here."""
    scores = [math.log(p) for level in levels for p in level]
    ends = [sum(map(len, levels[: i + 1])) for i in range(len(levels))]
    parents = [-1] * len(levels[0]) + [0] * (len(scores) - len(levels[0]))
    return Pool(list(range(len(scores))), parents, scores, ends)


def test_a_level_is_grown_if_what_it_may_add_exceeds_its_price() -> None:
    """0.5 of (0.5 + 0.25) is expected below: worth 0.1 up to a rate of 3.75 tokens per pass."""
    scores = [math.log(0.25), math.log(0.5), math.log(0.1)]
    assert shaper(3.7).goes_deeper(scores, 1)
    assert not shaper(3.8).goes_deeper(scores, 1)
    assert not shaper(0.01).goes_deeper([], 1)


def test_the_nodes_verified_maximise_tokens_minus_rate_times_price() -> None:
    """At rate 2 a node costs 0.2 tokens and the first one 0.2 more: 0.75 and 0.5 are worth it,
    0.1 is not; where nothing is, nothing is verified."""
    assert shaper(2.0).select(pool([0.75, 0.1], [0.5, 0.25])).n_nodes == 3
    assert shaper(3.0).select(pool([0.75, 0.1], [0.5, 0.25])).n_nodes == 2
    assert shaper(2.0).select(pool([0.1, 0.1], [0.01])).n_nodes == 0
    assert shaper(0.01).select(pool([0.75, 0.1], [0.5, 0.25])).n_nodes == 4


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["lookup", "model", "eagle3"])
def test_replayed_adaptive_rounds_are_the_rounds_really_decoded(name: str, sampling) -> None:
    """Levels grown, nodes verified and tokens emitted agree round by round, at several rates,
    whether or not growth stops early; and not all rounds are alike."""
    where = setting(torch.float64, sampling)
    draft = where.drafts[name]
    limits = TreeConfig(depth=5, width=2, top_k=3, nodes=20)
    replay = AdaptiveReplay(where.target, draft, where.traces, limits)
    shapes = set()
    for rate, stops_early in ((0.5, True), (1.0, True), (1.5, True), (1.0, False)):
        score = [-6.0, -3.0, -1.5, 0.0]
        tables = [
            PathTable(score=score, probability=[0.0, 0.1, 0.4, 0.9], hit=0.8 - 0.1 * depth)
            for depth in range(5)
        ]
        made = Shaper(
            Calibration(limits=limits, tokens_per_pass=rate, depths=tables),
            Prices(COSTS),
            stops_early,
        )
        for index, (trace, found) in enumerate(
            zip(where.traces, replay.rounds(made), strict=True)
        ):
            request = Request(
                where.target,
                draft,
                trace.prompt,
                Sampler(sampling, request_seed(SEED, index)),
                StopRules(len(trace.generated)),
                shaper=made,
            )
            request.prefill()
            expected = []
            while request.stop_reason is None:
                request.step(limits)
                done = request.last_round
                assert done is not None
                expected.append((done.tree.depth, done.n_nodes, done.n_emitted))
            assert request.generated == trace.generated
            columns = (found.depths, found.n_nodes, found.n_emitted)
            rounds = list(zip(*(column.tolist() for column in columns), strict=True))
            assert rounds == expected
            shapes |= {(depth, n_nodes) for depth, n_nodes, _ in rounds}
    assert len(shapes) >= 4


COSTS = CostModelSummary(
    reference_ms=1.0,
    tables=[
        CostTable(name="verify", x=[0.0, 1.0, 20.0], relative=[1.0, 1.1, 1.8]),
        CostTable(name="level", x=[1.0, 2.0], relative=[0.2, 0.25]),
    ],
)


def test_samples_are_counted_by_hand() -> None:
    """Every candidate is a sample of its depth, right only on the recorded path."""
    where = setting(torch.float64, GREEDY)
    draft, trace = where.drafts["model"], where.traces[1]
    limits = TreeConfig(depth=2, width=1, top_k=2, nodes=4)
    first, second = AdaptiveReplay(where.target, draft, [trace], limits).samples()
    roots = list(range(len(trace.prompt), len(trace.tokens) - 1))
    pools = draft.pools(trace.tokens, None, roots, limits)
    assert first.n_expanded == len(roots)
    assert len(first.scores) == 2 * len(roots)
    hits, both = 0, 0
    for root, grown in zip(roots, pools, strict=True):
        following = trace.tokens[root + 1 : root + 3]
        hit = following[0] in grown.tokens[:2]
        hits += hit
        on_path = hit and grown.tokens.index(following[0]) == grown.parents[2]
        both += on_path and len(following) > 1 and following[1] in grown.tokens[2:]
    assert (first.n_hit, sum(first.accepted)) == (hits, hits)
    assert (second.n_hit, sum(second.accepted)) == (both, both)
    assert 0 < both < hits < len(roots)
