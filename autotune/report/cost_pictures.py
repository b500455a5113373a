"""Pictures of what a round costs: verify passes, draft steps, the fit, and where the time goes."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from profiles import CostModelSummary, LatencyPoint, Measurements, Profile
from profiles.prices import Prices

from .canvas import BLUE, GREEN, INK, MUTED, ORANGE, RED, SKY, Picture, draw, legend
from .findings import Subject, draft_name, plain_ms, round_parts

NEARLY_FREE = 1.1
"""Cost of a verify pass, in plain tokens, up to which it is called nearly free."""

PARTS = {"draft: extend": ORANGE, "draft: levels": RED, "verify": BLUE, "commit": GREEN}


def verify_picture(profile: Profile, measurements: Measurements) -> Picture | None:
    """Draw the time of a verify pass against the draft nodes in it."""
    summary = profile.cost_model
    points = [p for p in measurements.latency if p.part in ("verify", "reference")]
    if summary is None or not any(point.x for point in points):
        return None
    prices, last = Prices(summary), max(point.x for point in points)
    context = float(np.median([point.context for point in points]))

    costs = {n: prices.verify(n, context) for n in range(1, last + 1)}
    nearly_free = max((n for n, cost in costs.items() if cost <= NEARLY_FREE), default=0)

    def paint(axes: Axes) -> None:
        nodes = np.arange(1, last + 1)
        fit = [summary.reference_ms * prices.verify(float(n), context) for n in nodes]
        axes.plot(nodes, fit, color=BLUE, label="cost model")
        _scatter(axes, [p for p in points if p.x], summary, BLUE, "measured")
        _scatter(axes, [p for p in points if not p.x], summary, ORANGE, "plain, 1 token")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("draft nodes verified in one pass")
        axes.set_ylabel("time of the pass (ms)")
        _from_zero(axes)
        _in_plain_tokens(axes, summary)
        legend(axes)

    return Picture(
        "Verifying nodes",
        "Medians of served rounds, each next to a plain round of "
        f"{_told(summary.reference_ms)} ms, behind {context:.0f} tokens. "
        f"Up to {nearly_free} nodes cost at most {NEARLY_FREE} plain tokens, {last} nodes cost "
        f"{costs[last]:.2f}.",
        f"Verify time in milliseconds against nodes, from 1 to {last}; measured points and fit.",
        draw(paint),
    )


def draft_picture(profile: Profile, measurements: Measurements) -> Picture | None:
    """Draw the time of the draft's steps against the tokens or nodes in them."""
    summary, name = profile.cost_model, draft_name(profile)
    mine = [p for p in measurements.latency if p.draft == name and p.x]
    groups = {part: [p for p in mine if p.part == part] for part in ("extend", "level")}
    if summary is None or not any(groups.values()):
        return None
    prices = Prices(summary)

    def paint(axes: Axes) -> None:
        for part, color, label, price in (
            ("extend", ORANGE, "extend pass, by its tokens", prices.extend),
            ("level", RED, "one level, by its nodes", prices.level),
        ):
            if not groups[part]:
                continue
            _fitted(axes, summary, part, price, color)
            _scatter(axes, groups[part], summary, color, label)
        _fitted(axes, summary, "prefill", prices.prefill, ORANGE)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("tokens or nodes in the pass")
        axes.set_ylabel("time of the pass (ms)")
        _from_zero(axes)
        _in_plain_tokens(axes, summary)
        legend(axes)

    level = prices.level(4)
    return Picture(
        f"Drafting with {name}",
        "Points are medians of served rounds, lines the cost model. Every level of depth after "
        f"the first adds one step; a level of 4 nodes costs {level:.2g} plain tokens. The points "
        "of a level carry a share of what growing any tree costs, the line does not. Extend "
        "passes over a whole prompt are the draft's first, priced by a line of their own.",
        f"Time of the draft's extend pass and of a level in milliseconds, draft {name}.",
        draw(paint),
    )


def _fitted(
    axes: Axes,
    summary: CostModelSummary,
    part: str,
    price: Callable[[float], float],
    color: str,
) -> None:
    """Draw the price of a part over the sizes that it was fitted on."""
    sizes = [x for table in summary.tables if table.name == part for x in table.x]
    if not sizes:
        return
    x = np.linspace(min(sizes), max(sizes), 60)
    axes.plot(x, [summary.reference_ms * price(float(n)) for n in x], color=color)


def fit_picture(profile: Profile, measurements: Measurements) -> Picture | None:
    """Draw predicted against measured time of whole rounds, left-out trees marked."""
    rounds = measurements.rounds
    if not rounds or profile.cost_model is None:
        return None

    def paint(axes: Axes) -> None:
        ends = [min(min(p.relative, p.predicted) for p in rounds) * 0.97]
        ends.append(max(max(p.relative, p.predicted) for p in rounds) * 1.03)
        axes.plot(ends, ends, color=MUTED, linewidth=1, label="equal")
        for left_out, face, label in (
            (False, BLUE, "used for the fit"),
            (True, "white", "left out of the fit that predicts it"),
        ):
            group = [p for p in rounds if p.left_out == left_out]
            if group:
                x, y = [p.relative for p in group], [p.predicted for p in group]
                axes.plot(x, y, "o", color=BLUE, markerfacecolor=face, label=label)
        axes.set_xlabel("measured round time (plain tokens)")
        axes.set_ylabel("predicted (plain tokens)")
        legend(axes)

    error = profile.cost_model.heldout_error
    told = (
        "No tree was left out."
        if error is None
        else (
            f"On left-out trees the model is off by {100 * error.median:.1f} % in the median and "
            f"{100 * error.p90:.1f} % at the 90th percentile."
        )
    )
    return Picture(
        "Whole rounds: the cost model against the clock",
        f"One point per timed tree, all drafts; both axes in times of a plain token. {told}",
        "Predicted against measured round time with the line of equality.",
        draw(paint),
    )


def round_picture(profile: Profile, subject: Subject) -> Picture | None:
    """Draw where the time of a round goes, beside the same tokens decoded plainly."""
    parts, plain = round_parts(profile, subject), plain_ms(profile)
    if not parts or plain is None or subject.tau is None:
        return None
    total = sum(ms for _, ms in parts)

    def paint(axes: Axes) -> None:
        left = 0.0
        for name, ms in parts:
            axes.barh(1, ms, left=left, height=0.55, color=PARTS[name], label=name)
            left += ms
        axes.barh(0, plain * (subject.tau or 1), height=0.55, color=SKY, label="plain tokens")
        axes.set_yticks([1, 0], ["one round", "the same\nplainly"])
        axes.tick_params("y", length=0, labelcolor=INK)
        axes.grid(visible=False, axis="y")
        axes.set_ylim(-0.5, 1.5)
        axes.set_xlabel("time (ms)")
        legend(axes, 3)

    shares = ", ".join(f"{name} {_told(ms)} ms" for name, ms in parts)
    return Picture(
        "Where the time of a round goes",
        f"A round of {subject.tree.label()} gives {subject.tau:.2f} tokens and takes about "
        f"{_told(total)} ms by the cost model ({shares}); a plain token takes {_told(plain)} ms.",
        f"Bar of a round by part, {_told(total)} ms, above the bar of as many plain tokens.",
        draw(paint, height=2.3),
    )


def _told(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def _scatter(
    axes: Axes, points: Sequence[LatencyPoint], summary: CostModelSummary, color: str, label: str
) -> None:
    """Draw points by their relative time, which drift of the machine does not move."""
    milliseconds = [point.relative * summary.reference_ms for point in points]
    axes.plot([point.x for point in points], milliseconds, "o", color=color, label=label)


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])


def _in_plain_tokens(axes: Axes, summary: CostModelSummary) -> None:
    """Add a right-hand axis in units of a plain token."""
    unit = summary.reference_ms
    scales = (lambda ms: np.asarray(ms) / unit, lambda tokens: np.asarray(tokens) * unit)
    right = axes.secondary_yaxis("right", functions=scales)
    right.set_ylabel("in plain tokens")
    right.spines["right"].set_visible(False)
