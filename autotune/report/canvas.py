"""One look for every picture of a report: size, colours, and how it becomes a PNG.

Drawn without a display and without matplotlib's global state. Texts are taken literally: a model
id may hold dollar signs.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every common kind of colour blindness.
BLUE, ORANGE, GREEN, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
INK, MUTED, FAINT = "#1f2933", "#5f6c7b", "#d9dee4"

_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so pictures are alike everywhere
    "font.size": 10.5,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


@dataclass(frozen=True)
class Picture:
    """A picture with the words that go with it.

    Attributes:
        title: What it shows.
        caption: What to read from it.
        alt: The same for those who do not see it.
        png: The file.
    """

    title: str
    caption: str
    alt: str
    png: bytes


def draw(paint: Callable[[Axes], None], height: float = 3.4) -> bytes:
    """Return a PNG of what `paint` puts on the axes, 5 inches wide and `height` inches high."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.0, height), dpi=180, layout="constrained")
        FigureCanvasAgg(figure)
        paint(figure.add_subplot())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def plain_line(axes: Axes) -> None:
    """Draw the line of plain decoding, where a speedup is 1."""
    axes.axhline(1.0, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), label="plain decoding")


def legend(axes: Axes, n_columns: int = 2) -> None:
    """Put the legend above the axes, where it hides no point."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        ncols=n_columns,
        handlelength=1.6,
        columnspacing=1.4,
    )
