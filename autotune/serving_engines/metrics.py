"""What a server says of its rounds: counters in Prometheus' text format, read before and after."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest

_LINE = re.compile(r"^([^\s{#]+)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counts:
    """Counters of speculation; all 0 for decoding without a draft.

    Attributes:
        n_drafts: Rounds in which something was drafted, over all requests.
        n_drafted: Tokens drafted.
        n_accepted: Of those, tokens accepted.
        by_position: Tokens accepted, by their place in the chain.
    """

    n_drafts: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    by_position: tuple[int, ...] = ()

    def __add__(self, other: "Counts") -> "Counts":
        return _combined(self, other, 1)

    def __sub__(self, other: "Counts") -> "Counts":
        return _combined(self, other, -1)


def read_counts(text: str, prefix: str) -> Counts:
    """Read the counters of speculation from a `/metrics` page; those that are missing are 0.

    Args:
        text: The page.
        prefix: What stands before `drafts_total` and its like, for example
            `vllm:spec_decode_num_`. Labels other than the position are added up.
    """
    totals: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None or not found[1].startswith(prefix):
            continue
        name, value = found[1].removeprefix(prefix), round(float(found[3]))
        place = _POSITION.search(found[2] or "")
        if name == "accepted_tokens_per_pos_total" and place is not None:
            positions[int(place[1])] += value
        else:
            totals[name] += value
    return Counts(
        n_drafts=totals["drafts_total"],
        n_drafted=totals["draft_tokens_total"],
        n_accepted=totals["accepted_tokens_total"],
        by_position=tuple(positions[place] for place in range(max(positions, default=-1) + 1)),
    )


def _combined(a: Counts, b: Counts, sign: int) -> Counts:
    by_position = zip_longest(a.by_position, b.by_position, fillvalue=0)
    return Counts(
        a.n_drafts + sign * b.n_drafts,
        a.n_drafted + sign * b.n_drafted,
        a.n_accepted + sign * b.n_accepted,
        tuple(x + sign * y for x, y in by_position),
    )
