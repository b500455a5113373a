"""Measurements that go with the toy profile: every kind of figure, invented."""

from profiles import (
    Acceptance,
    HoldoutTree,
    LatencyPoint,
    MeasuredTree,
    Measurements,
    RoundPoint,
    Score,
    TreeConfig,
)

HEAD = "toy/head"
TREE = TreeConfig(depth=4, width=3, top_k=3, nodes=10)
CHAIN = TreeConfig.chain(2)
PLAIN = TreeConfig(depth=0)


def measurements(draft: str = HEAD) -> Measurements:
    """Return figures of one draft that fit `toy_profiles.profile()`."""
    grid = [
        TreeConfig(depth=depth, width=width, top_k=width, nodes=max(depth, width))
        for depth in (1, 2, 3, 4)
        for width in (1, 2, 3)
    ]
    scores = [
        Score(draft=draft, tree=tree, tau=2.0, predicted_speedup=1.4 - 0.15 * tree.depth)
        for tree in dict.fromkeys(t.canonical() for t in grid)
    ]
    return Measurements(
        latency=[
            _point("reference", None, 0, 1.0),
            *(_point("verify", None, n, 1 + 0.02 * n) for n in (1, 4, 8, 16)),
            *(_point("extend", draft, n, 0.1 + 0.01 * n) for n in (1, 2, 4)),
            *(_point("level", draft, n, 0.05 + 0.01 * n) for n in (1, 2, 4)),
        ],
        rounds=[
            RoundPoint(
                draft=draft,
                tree=TreeConfig.chain(depth),
                nodes=float(depth),
                relative=1 + 0.1 * depth,
                predicted=1.02 + 0.1 * depth,
                left_out=depth == 3,
            )
            for depth in (1, 2, 3, 4)
        ],
        scores=[*scores, Score(draft=draft, tree=TREE, tau=2.9, predicted_speedup=1.8)],
        measured=[
            MeasuredTree(draft=draft, tree=TREE, prompt_ratios=[1.6, 1.9, 1.7]),
            MeasuredTree(draft=draft, tree=PLAIN, prompt_ratios=[1.0, 1.0, 1.0]),
            MeasuredTree(draft=draft, tree=CHAIN, prompt_ratios=[0.8, 0.9]),
        ],
        holdout=[
            HoldoutTree(
                draft=draft,
                tree=TREE,
                plain_ms=[100.0 + n for n in range(32)],
                speculative_ms=[60.0 + n for n in range(32)],
            )
        ],
        acceptance=[
            Acceptance(draft=draft, tried=[300, 200, 90, 4], accepted=[[150, 40], [90], [30], [1]])
        ],
    )


def _point(part: str, draft: str | None, x: int, relative: float) -> LatencyPoint:
    figures = {"context": 128, "relative": relative, "ms": 16.4 * relative, "n": 6}
    return LatencyPoint(part=part, draft=draft, x=x, **figures)
