"""Pictures of the proof on the holdout, and of the job that found it."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from profiles import HoldoutTree, Profile

from .canvas import BLUE, ORANGE, RED, Picture, draw, legend, plain_line


def holdout_picture(profile: Profile, run: HoldoutTree) -> Picture:
    """Draw the speedup of every held-out prompt with the total and its lower bound."""
    ratios = np.sort(run.prompt_ratios)
    judged = [(profile.tree, profile.evidence)] if profile.evidence else []
    judged += [(rival.tree, rival.evidence) for rival in profile.alternatives]
    speedup = next((e.speedup for tree, e in judged if tree == run.tree and e), None)

    def paint(axes: Axes) -> None:
        numbers = np.arange(1, len(ratios) + 1)
        for group, color, label in (
            (ratios >= 1, BLUE, "prompt, faster"),
            (ratios < 1, RED, "prompt, slower"),
        ):
            if group.any():
                axes.plot(numbers[group], ratios[group], "o", color=color, label=label)
        if speedup is not None:
            axes.axhspan(speedup.low, speedup.ratio, color=ORANGE, alpha=0.25, linewidth=0)
            axes.axhline(speedup.ratio, color=ORANGE, label=f"total, {speedup.ratio:.2f}x")
            bound = f"at least {speedup.low:.2f}x at {100 * speedup.confidence:.3g} %"
            axes.axhline(speedup.low, color=ORANGE, linestyle=":", label=bound)
        plain_line(axes)
        axes.set_xlabel("held-out prompts, slowest first")
        axes.set_ylabel("plain / speculative time (x)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(axes)

    slower = int((ratios < 1).sum())
    return Picture(
        f"The proof: {run.draft}, {run.tree.label()}",
        f"{len(ratios)} held-out prompts, each decoded plainly and speculatively in the order "
        f"A B B A on the path that serves; {slower or 'none'} ran slower than plain. The band "
        "reaches from the lower bound, of total and typical prompt alike, to the total.",
        f"Speedup of {len(ratios)} held-out prompts, sorted, with total and lower bound.",
        draw(paint),
    )


def job_picture(profile: Profile) -> Picture | None:
    """Draw the seconds of every step of the job."""
    job = profile.job
    if job is None or job.took_s == 0:
        return None
    steps = list(job.seconds.items())[::-1]

    def paint(axes: Axes) -> None:
        axes.barh([name for name, _ in steps], [s for _, s in steps], height=0.6, color=BLUE)
        axes.tick_params("y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time (s)")

    longest = max(steps, key=lambda step: step[1])
    return Picture(
        "Steps of the tuning job",
        f"The job took {job.took_s / 60:.1f} min, {job.planned_s / 60:.1f} were planned; "
        f"{longest[0]} took {100 * longest[1] / job.took_s:.0f} % of it.",
        "Bars of the seconds each step of the job took.",
        draw(paint, height=0.9 + 0.3 * len(steps)),
    )
