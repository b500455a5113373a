"""Two profiles field by field. Knows nothing of files."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from profiles import Profile


@dataclass(frozen=True)
class Difference:
    """A field that two profiles fill differently; None where one has no such field."""

    field: str
    first: Any
    second: Any

    @property
    def change(self) -> float | None:
        """Relative change from the first to the second, for numbers."""
        values = (self.first, self.second)
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
            return None
        return None if self.first == 0 else float(self.second / self.first - 1)


def differences(first: Profile, second: Profile) -> list[Difference]:
    """Return every field that differs, in the order of the schema; the seal is none of them."""
    a, b = (dict(_fields(_content(profile))) for profile in (first, second))
    order = list(Profile.model_fields)
    fields = sorted(a | b, key=lambda field: order.index(re.split(r"[.[]", field)[0]))
    return [Difference(f, a.get(f), b.get(f)) for f in fields if a.get(f) != b.get(f)]


def differences_table(found: Sequence[Difference], first: str, second: str) -> Table:
    """Return differences as a table with the change of numbers; lists are told in one row each."""
    table = Table(box=SIMPLE)
    table.add_column("field", no_wrap=True)
    for title in (first, second):
        table.add_column(title, overflow="fold")
    table.add_column("change", justify="right")
    for row in found:
        if "[" not in row.field:
            change = "" if row.change is None else f"{100 * row.change:+.3g} %"
            table.add_row(row.field, _written(row.first), _written(row.second), change)
    lists = Counter(row.field.partition("[")[0] for row in found if "[" in row.field)
    for field, n_fields in lists.items():
        table.add_row(field, f"{n_fields} fields differ", "(see --json)", "")
    return table


def _content(profile: Profile) -> dict[str, Any]:
    return profile.model_dump(mode="json", exclude_none=True, exclude={"content_sha256"})


def _fields(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and of lists of mappings with their key paths."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _fields(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from _fields(item, f"{key}[{i}]")
    else:
        yield key, value


def _written(value: Any) -> str:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
