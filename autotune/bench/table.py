"""The table of a contest."""

from collections.abc import Sequence

from rich.table import Table

from .contest import Standing
from .speeds import Figure


def contest_table(title: str, standings: Sequence[Standing], reference: str = "plain") -> Table:
    """Return what every contender reached, one row each.

    Args:
        title: Stands above the table.
        standings: The rows.
        reference: A short name of the contender that the ratios are over.
    """
    table = Table(title=title)
    table.add_column("")
    for column in (
        "tokens/s\nend to end",
        "tokens/s\ndecode only",
        "first token\nms",
        f"speed over\n{reference}",
        "same\ntext",
    ):
        table.add_column(column, justify="right")
    for standing in standings:
        decode = standing.decode_tokens_per_s
        table.add_row(
            standing.name,
            with_interval(standing.tokens_per_s, 1),
            "" if decode is None else with_interval(decode, 1),
            f"{standing.first_token_ms:.0f}",
            with_interval(standing.over, 2, "x"),
            f"{100 * standing.same_text:.0f} %",
        )
    return table


def with_interval(figure: Figure, digits: int, unit: str = "") -> str:
    """Return a figure with its interval, such as `61.2 [60.1, 62.0]`."""
    value = f"{figure.value:.{digits}f}{unit}"
    if figure.low != figure.low:  # a single prompt
        return value
    return f"{value} [{figure.low:.{digits}f}, {figure.high:.{digits}f}]"
