"""Pictures of what was searched and found: acceptance, speedups, trials."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from profiles import Measurements, Profile

from .canvas import BLUE, GREEN, MUTED, RED, Picture, draw, legend, plain_line
from .findings import Subject, acceptance_rates, draft_name, speedup_grid, trials

Values = NDArray[np.float64]

MIN_TRIED = 10
"""Nodes below which a rate is noise and is not drawn."""

RANK_COLORS = ("#08306b", "#2171b5", "#6baed6", "#c6dbef")
MOST_DEPTHS = 16


def acceptance_picture(measurements: Measurements, subject: Subject) -> Picture | None:
    """Draw how often the draft's children were right, by depth and rank."""
    rates = acceptance_rates(measurements, subject.draft)
    rates = [row for row in rates if row[0] >= MIN_TRIED][:MOST_DEPTHS]
    if not rates:
        return None

    def paint(axes: Axes) -> None:
        depths = np.arange(1, len(rates) + 1)
        bottom = np.zeros(len(rates))
        for rank, color in enumerate(RANK_COLORS):
            last = rank == len(RANK_COLORS) - 1
            share = np.array(
                [sum(row[rank:] if last else row[rank : rank + 1]) for _, row in rates]
            )
            label = f"rank {rank + 1}{' and below' if last else ''}"
            axes.bar(depths, 100 * share, bottom=100 * bottom, color=color, label=label)
            bottom += share
        axes.set_xticks(depths)
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 100)
        axes.set_xlabel("depth in the tree")
        axes.set_ylabel("expanded nodes with a right child (%)")
        legend(axes)

    first = sum(rates[0][1][:1])
    return Picture(
        f"Acceptance of {subject.draft} by depth and rank",
        "Of the nodes on the target's own path that were expanded, the share whose child of that "
        f"rank was the target's token. At depth 1 the first guess is right {100 * first:.0f} % of "
        "the time.",
        "Stacked bars of acceptance in percent for every depth, split by rank among siblings.",
        draw(paint),
    )


def prediction_picture(profile: Profile, measurements: Measurements) -> Picture | None:
    """Draw predicted against measured speedup of every tree that ran."""
    raced = [t for t in trials(measurements) if t.predicted is not None and t.is_whole]
    predicted = {(s.draft, s.tree): s.predicted_speedup for s in measurements.scores}
    proved = [(a.draft, a.tree, a.evidence) for a in profile.alternatives]
    if profile.evidence is not None:
        proved.insert(0, (draft_name(profile), profile.tree, profile.evidence))
    judged = [
        (predicted[draft, tree], evidence.decode_speedup)
        for draft, tree, evidence in proved
        if (draft, tree) in predicted
    ]
    if len(raced) < 2 and not judged:
        return None

    def paint(axes: Axes) -> None:
        points = [(t.predicted or 0.0, t.speedup) for t in raced] + judged
        ends = 0.95 * min(map(min, points)), 1.05 * max(map(max, points))
        axes.plot(ends, ends, color=MUTED, linewidth=1, label="equal")
        for group, marker, color, label in (
            (points[: len(raced)], "o", BLUE, "tune prompts, end to end"),
            (judged, "D", RED, "holdout, decoding only"),
        ):
            if group:
                x, y = zip(*group, strict=True)
                axes.plot(x, y, marker, color=color, markerfacecolor="none", label=label)
        axes.set_xlabel("predicted decode speedup (x)")
        axes.set_ylabel("measured speedup (x)")
        legend(axes)

    return Picture(
        "Predicted against measured speedup",
        "Predictions are replayed tokens per round over modelled round time, prefill left out. "
        "On tune prompts the mean of the prompts' end-to-end ratios is shown, on the holdout the "
        "ratio of decoding times.",
        "Measured against predicted speedup of the trees that ran, with the line of equality.",
        draw(paint),
    )


def grid_picture(measurements: Measurements, subject: Subject) -> Picture | None:
    """Draw the best predicted speedup over depth and width, with the 1.0 line."""
    grid = speedup_grid(measurements, subject.draft)
    if not grid:
        return None
    depths, widths = (sorted({place[axis] for place in grid}) for axis in (0, 1))
    values = np.array([[grid.get((d, w), np.nan) for d in depths] for w in widths])
    best = max(grid, key=lambda place: grid[place])

    middle = (np.nanmin(values) + np.nanmax(values)) / 2

    def paint(axes: Axes) -> None:
        axes.grid(visible=False)
        image = axes.imshow(values, origin="lower", aspect="auto", cmap="cividis")
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                axes.text(
                    column,
                    row,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=8.5 if len(depths) <= 8 else 6,
                    color="white" if value < middle else "black",
                )
        _break_even_line(axes, values)
        corner = depths.index(best[0]) - 0.5, widths.index(best[1]) - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=RED, linewidth=2.2))
        axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
        axes.set_yticks(range(len(widths)), [str(width) for width in widths])
        axes.set_xlabel("depth (levels)")
        axes.set_ylabel("width (nodes expanded per level)")
        axes.figure.colorbar(image, ax=axes, pad=0.02, label="predicted decode speedup (x)")

    return Picture(
        f"Speedup of {subject.draft} over depth and width",
        "The best top-k and node budget of every cell, predicted for these prompts. "
        f"{_told_losses(values)} The best cell, outlined, is depth {best[0]}, width {best[1]}.",
        "Map of predicted speedup over depth and width with the line where it is 1.",
        draw(paint),
    )


def history_picture(measurements: Measurements) -> Picture | None:
    """Draw the trials of the search in their order."""
    ran = trials(measurements)
    if len(ran) < 2:
        return None

    def paint(axes: Axes) -> None:
        numbers = np.arange(1, len(ran) + 1)
        best = np.maximum.accumulate([t.speedup if t.is_whole else 0.0 for t in ran])
        known = best > 0
        axes.plot(
            numbers[known], best[known], color=GREEN, drawstyle="steps-post", label="best so far"
        )
        for number, trial in zip(numbers, ran, strict=True):
            low, high = np.quantile(trial.ratios, [0.25, 0.75])
            axes.plot([number, number], [low, high], color=BLUE, linewidth=1.2, alpha=0.6)
        for whole, face, label in (
            (True, BLUE, "on all tune prompts"),
            (False, "white", "stopped early"),
        ):
            group = [
                (n, t.speedup) for n, t in zip(numbers, ran, strict=True) if t.is_whole == whole
            ]
            if group:
                x, y = zip(*group, strict=True)
                axes.plot(x, y, "o", color=BLUE, markerfacecolor=face, label=label)
        plain_line(axes)
        axes.set_xlabel("trial")
        axes.set_ylabel("measured speedup, end to end (x)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(axes)

    n_stopped = sum(not trial.is_whole for trial in ran)
    told = f"Stopped early, being clearly behind: {n_stopped}." if n_stopped else ""
    return Picture(
        "The search's history",
        f"{len(ran)} trees ran on tune prompts, plain among them. {told} Bars span the middle "
        "half of the prompts.",
        "Measured speedup of every trial in the order they ran, with the best so far.",
        draw(paint),
    )


def _break_even_line(axes: Axes, values: Values) -> None:
    """Draw the edges between cells above and below 1."""
    known, above = np.isfinite(values), values > 1
    edges: list[tuple[list[float], list[float]]] = []
    for row, column in np.ndindex(above.shape):
        for other, edge in (
            ((row, column + 1), ([column + 0.5, column + 0.5], [row - 0.5, row + 0.5])),
            ((row + 1, column), ([column - 0.5, column + 0.5], [row + 0.5, row + 0.5])),
        ):
            if other[0] == above.shape[0] or other[1] == above.shape[1]:
                continue
            if known[row, column] and known[other] and above[row, column] != above[other]:
                edges.append(edge)
    for color, width in (("white", 4.5), ("black", 2.2)):
        for x, y in edges:
            axes.plot(x, y, color=color, linewidth=width, solid_capstyle="round")


def _told_losses(values: Values) -> str:
    n_cells, n_losing = int(np.isfinite(values).sum()), int((values < 1).sum())
    if n_losing in (0, n_cells):
        return f"{'No' if n_losing == 0 else 'Every'} cell lies below plain decoding, 1.0."
    return f"The black line is plain decoding, 1.0: {n_losing} of {n_cells} cells lie below it."
