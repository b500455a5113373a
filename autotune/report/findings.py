"""What a profile and its measurements say, as plain values: what the terminal and the page show.

Knows nothing of how it is shown; the figures are read, never judged again.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiles import Evidence, Measurements, Profile, TreeConfig
from profiles import draft_name as name_of
from profiles.prices import Prices


@dataclass(frozen=True)
class Subject:
    """The tree a report is about: the proved one, or the rival that came nearest.

    Attributes:
        draft: Name of its draft.
        tree: The tree.
        evidence: Its figures on the holdout, if it was judged.
        tau: Tokens per round: measured on the holdout, else replayed; None if neither is known.
    """

    draft: str
    tree: TreeConfig
    evidence: Evidence | None
    tau: float | None


@dataclass(frozen=True)
class Trial:
    """One tree that ran on tune prompts, in the order of the search.

    Attributes:
        draft, tree: What ran.
        predicted: Predicted decode speedup; None if it was not predicted.
        ratios: Measured speedups by prompt, end to end.
        is_whole: Whether it ran on every prompt; else it was stopped early, being clearly behind.
    """

    draft: str
    tree: TreeConfig
    predicted: float | None
    ratios: tuple[float, ...]
    is_whole: bool

    @property
    def speedup(self) -> float:
        """Mean speedup on the prompts seen."""
        return sum(self.ratios) / len(self.ratios)


def draft_name(profile: Profile) -> str:
    """Return the name of the profile's draft in tables and measurements."""
    return name_of(profile.draft)


def subject_of(profile: Profile, measurements: Measurements | None) -> Subject | None:
    """Return the tree a report is about; None if no tree was ever scored."""
    if profile.evidence is not None:
        judged = profile.evidence
        return Subject(draft_name(profile), profile.tree, judged, judged.tau)
    if profile.alternatives:
        rival = profile.alternatives[0]
        return Subject(rival.draft, rival.tree, rival.evidence, rival.evidence.tau)
    if measurements is None:
        return None
    raced = [trial for trial in trials(measurements) if not trial.tree.is_plain]
    taus = {(score.draft, score.tree): score.tau for score in measurements.scores}
    if raced:
        best = max(raced, key=lambda trial: (trial.is_whole, trial.speedup))
        return Subject(best.draft, best.tree, None, taus.get((best.draft, best.tree)))
    scores = [score for score in measurements.scores if not score.tree.is_plain]
    if not scores:
        return None
    leader = max(scores, key=lambda score: score.predicted_speedup)
    return Subject(leader.draft, leader.tree, None, leader.tau)


def trials(measurements: Measurements) -> list[Trial]:
    """Return what the search measured, in its order."""
    predicted = {(s.draft, s.tree): s.predicted_speedup for s in measurements.scores}
    n_prompts = max((len(m.prompt_ratios) for m in measurements.measured), default=0)
    return [
        Trial(
            measured.draft,
            measured.tree,
            1.0 if measured.tree.is_plain else predicted.get((measured.draft, measured.tree)),
            tuple(measured.prompt_ratios),
            is_whole=len(measured.prompt_ratios) == n_prompts,
        )
        for measured in measurements.measured
        if measured.prompt_ratios
    ]


def headline(profile: Profile) -> str:
    """Return the decision and its gain in a few words."""
    if profile.evidence is None:
        return "Decode plainly"
    return f"Speculate: {profile.evidence.speedup.ratio:.2f}x plain decoding"


def certainty(profile: Profile) -> str:
    """Return how sure the decision is, in one or two sentences."""
    if profile.evidence is None:
        return profile.reason
    speedup = profile.evidence.speedup
    return (
        f"On {speedup.prompts} prompts that the search never saw, plain decoding took "
        f"{speedup.ratio:.2f} times as long, and at least {speedup.low:.2f} times with "
        f"{100 * speedup.confidence:.3g} % confidence. The slowest single prompt ran at "
        f"{speedup.worst_prompt:.2f}x."
    )


def commands(profile: Profile, path: Path) -> list[tuple[str, str]]:
    """Return what to type to use the profile at `path`: a purpose and a command each."""
    name = shlex.quote(str(path))
    if profile.server is not None:
        return [
            ("How to start the server", f"spectune export {name} --to {profile.engine}"),
        ]
    return [
        ("Decode", f"spectune run {name} --prompt TEXT"),
        (
            "Compare with plain on your own prompts",
            f"spectune run {name} --prompts FILE --compare",
        ),
        ("From Python", f"engine.SpeculativeDecoder.from_profile({str(path)!r}).generate(text)"),
    ]


def tree_in_words(tree: TreeConfig) -> str:
    """Return what a tree's four numbers mean."""
    if tree.is_plain:
        return "none: the target alone"
    return (
        f"{tree.label()}: depth {tree.depth}, width {tree.width}, top-k {tree.top_k}, "
        f"{tree.nodes} nodes verified a round"
    )


def judged_evidence(profile: Profile) -> Evidence | None:
    """Return the figures of any tree that was judged: all share the baseline."""
    judged = [profile.evidence, *(rival.evidence for rival in profile.alternatives)]
    return next((evidence for evidence in judged if evidence is not None), None)


def usual_context(profile: Profile) -> float:
    """Return the tokens in the cache halfway through a mean prompt's answer."""
    return profile.domain.mean_prompt_tokens + profile.domain.max_new_tokens / 2


def plain_ms(profile: Profile) -> float | None:
    """Return the modelled time of a plain token behind the usual context, ms."""
    if profile.cost_model is None:
        return None
    return 1e3 * Prices(profile.cost_model).plain_s(usual_context(profile))


def evidence_cells(evidence: Evidence) -> list[str]:
    """Return tau, break-even tau, and the speedups: decoding, end to end, at least, worst."""
    speedup = evidence.speedup
    return [
        f"{evidence.tau:.2f}",
        f"{evidence.break_even_tau:.2f}",
        f"{evidence.decode_speedup:.2f}x",
        f"{speedup.ratio:.2f}x",
        f"{speedup.low:.2f}x",
        f"{speedup.worst_prompt:.2f}x",
    ]


def round_parts(profile: Profile, subject: Subject) -> list[tuple[str, float]]:
    """Return the modelled time of an average round of the subject by part, ms.

    The draft's pass runs over the tau tokens of the round before.
    """
    if profile.cost_model is None or subject.tau is None:
        return []
    prices = Prices(profile.cost_model)
    tree, context = subject.tree, usual_context(profile)
    price = prices.round(tree, subject.tau, tree.nodes, context)
    parts = {
        "draft: extend": price.extend,
        "draft: levels": price.levels,
        "verify": price.verify,
        "commit": price.commit,
    }
    return [(name, 1e3 * prices.reference_s * value) for name, value in parts.items()]


def speedup_grid(measurements: Measurements, draft: str) -> dict[tuple[int, int], float]:
    """Return the best predicted decode speedup of a draft by (depth, width)."""
    grid: dict[tuple[int, int], float] = {}
    for score in measurements.scores:
        if score.draft == draft and not score.tree.is_plain:
            place = score.tree.depth, score.tree.width
            grid[place] = max(grid.get(place, 0.0), score.predicted_speedup)
    return grid


def acceptance_rates(measurements: Measurements, draft: str) -> list[tuple[int, Sequence[float]]]:
    """Return, per depth, the nodes expanded and the share whose child of each rank was right."""
    table = next((table for table in measurements.acceptance if table.draft == draft), None)
    if table is None:
        return []
    return [
        (tried, [count / tried for count in row])
        for tried, row in zip(table.tried, table.accepted, strict=True)
        if tried
    ]
