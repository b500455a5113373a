"""The answers to a what-if question as a picture: a line for one sweep, a map for two."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .answers import WhatIf
from .scenario import KEYS, Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}


def plot(answers: WhatIf) -> bytes:
    """Return a PNG of the decode speedup over what was swept, the line of plain decoding in it."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}):  # a name may hold dollar signs
        figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if len(answers.swept) == 2:
            _map(answers, axes, figure)
        else:
            _lines(answers, axes)
        axes.set_title(answers.name)
        axes.set_xlabel(_label(answers.swept[0]))
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _lines(answers: WhatIf, axes: "Axes") -> None:
    x, ticks = _places([answer.asked[answers.swept[0]] for answer in answers.answers])
    axes.axhline(1.0, color="black", linewidth=1, label="plain decoding")
    speedups = [answer.decode_speedup for answer in answers.answers]
    axes.plot(x, speedups, marker="o", label="decode speedup")
    axes.plot(
        x, [a.end_to_end_speedup for a in answers.answers], linestyle="--", label="end to end"
    )
    intervals = [a.interval or (a.decode_speedup,) * 2 for a in answers.answers]
    low, high = zip(*intervals, strict=True)
    axes.fill_between(x, low, high, alpha=0.2, label="model's error")
    if ticks:
        axes.set_xticks(x, ticks)
    axes.set_ylabel("speedup over plain decoding (x)")
    axes.legend()
    axes.grid(alpha=0.3)


def _map(answers: WhatIf, axes: "Axes", figure: "Figure") -> None:
    import numpy as np
    from matplotlib.colors import TwoSlopeNorm

    first, second = answers.swept
    columns = list(dict.fromkeys(a.asked[first] for a in answers.answers))
    rows = list(dict.fromkeys(a.asked[second] for a in answers.answers))
    grid = np.full((len(rows), len(columns)), np.nan)
    for answer in answers.answers:
        place = rows.index(answer.asked[second]), columns.index(answer.asked[first])
        grid[place] = answer.decode_speedup
    low, high = min(0.95, float(np.nanmin(grid))), max(1.05, float(np.nanmax(grid)))
    norm = TwoSlopeNorm(1.0, low, high)
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap="RdBu", norm=norm)
    figure.colorbar(image, label="decode speedup over plain decoding (x)")
    if min(grid.shape) > 1 and not np.isnan(grid).any():
        axes.contour(grid, levels=[1.0], colors="black")
    if grid.size <= 150:
        for (row, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                color = "black" if 0.2 < norm(value) < 0.8 else "white"
                axes.text(column, row, f"{value:.2f}", color=color, **_CENTRED)
    axes.set_xticks(range(len(columns)), [str(c) for c in columns])
    axes.set_yticks(range(len(rows)), [str(r) for r in rows])
    axes.set_ylabel(_label(second))


def _places(values: Sequence[Any]) -> tuple[list[float], list[str]]:
    """Return x positions, with labels where the values are no numbers."""
    numbers = [v.value if isinstance(v, Quantity) else v for v in values]
    if all(isinstance(number, int | float) for number in numbers):
        return [float(number) for number in numbers], []
    return [float(i) for i in range(len(values))], [str(v) for v in values]


def _label(key: str) -> str:
    unit = KEYS[key].unit
    return key.replace("_", " ") + (f" ({unit})" if unit else "")
