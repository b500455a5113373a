"""The answers to a what-if question: figures of one scenario each, and all of them as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from profiles import TreeConfig

from .acceptance import Tau
from .pricing import RoundParts
from .scenario import Quantity

if TYPE_CHECKING:
    import pandas as pd

TREE_KEYS = ("depth", "width", "top_k", "nodes")


@dataclass(frozen=True)
class Answer:
    """The figures of one scenario.

    Attributes:
        asked: What was set and swept.
        draft, tree: What decodes.
        batch, context, output_length: Under which conditions.
        tau: Tokens per round and row.
        round: Milliseconds of a round by part, the draft's prefill spread over the rounds.
        plain_ms: Time of a plain token of every row.
        end_to_end_speedup: With the target's prefill, over an answer of `output_length`.
        error: Relative error of `decode_speedup`, not exceeded in about 9 of 10 cases; None if
            it is not known.
        flags: Where figures are approximate or extrapolated, in sentences.
    """

    asked: Mapping[str, Any]
    draft: str
    tree: TreeConfig
    batch: int
    context: float
    output_length: int
    tau: Tau
    round: RoundParts
    plain_ms: float
    end_to_end_speedup: float
    error: float | None
    flags: tuple[str, ...]

    @property
    def break_even_tau(self) -> float:
        """Tokens per round below which speculation loses."""
        return 1.0 if self.tree.is_plain else self.round.total / self.plain_ms

    @property
    def decode_speedup(self) -> float:
        """Plain over speculative decoding time, the target's prefill left out."""
        return self.tau.value / self.break_even_tau

    @property
    def interval(self) -> tuple[float, float] | None:
        """The decode speedup with the model's error."""
        if self.error is None:
            return None
        return self.decode_speedup / (1 + self.error), self.decode_speedup * (1 + self.error)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all rows."""
        return 1e3 * self.batch * self.tau.value / self.round.total

    @property
    def plain_tokens_per_s(self) -> float:
        """The same of plain decoding."""
        return 1e3 * self.batch / self.plain_ms

    def row(self) -> dict[str, Any]:
        """Return all figures under flat names; what was asked comes first."""
        low, high = self.interval or (None, None)
        parts = {f"{name}_ms": value for name, value in vars(self.round).items()}
        parts |= {"round_ms": self.round.total, "plain_ms": self.plain_ms}
        tree = {key: getattr(self.tree, key) for key in TREE_KEYS}
        asked = {
            key: str(value) if isinstance(value, Quantity) else value
            for key, value in self.asked.items()
        }
        return {
            **{key: value for key, value in asked.items() if key not in tree},
            "draft": self.draft,
            **tree,
            "batch": self.batch,
            "context": self.context,
            "output_length": self.output_length,
            "tau": self.tau.value,
            "tau_is_replayed": self.tau.is_replayed,
            **parts,
            "tokens_per_s": self.tokens_per_s,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "break_even_tau": self.break_even_tau,
            "decode_speedup": self.decode_speedup,
            "decode_speedup_low": low,
            "decode_speedup_high": high,
            "end_to_end_speedup": self.end_to_end_speedup,
            "flags": list(self.flags),
        }


@dataclass(frozen=True)
class WhatIf:
    """The answers to one question.

    Attributes:
        name: Profile or pair that was asked about.
        swept: The keys that were swept, the first outermost.
        answers: One per scenario.
        notes: What holds for all of them, in sentences.
    """

    name: str
    swept: tuple[str, ...]
    answers: Sequence[Answer]
    notes: tuple[str, ...] = ()

    def to_frame(self) -> "pd.DataFrame":
        """Return a pandas DataFrame with a row per scenario; columns as in `Answer.row`."""
        import pandas as pd

        return pd.DataFrame([answer.row() for answer in self.answers])
