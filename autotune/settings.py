"""The settings of a tuning job, each written once with its default."""

from dataclasses import dataclass

from profiles import GREEDY, Sampling
from profiles.engine_spaces import ENGINE_SPACES
from profiles.errors import UsageError

from .space import NODE_BUCKETS

MAX_BATCH = 512
"""Most prompts at a time; every row costs memory for its text."""


OPTIONS = {"n_tune": "--tune-prompts", "n_holdout": "--holdout-prompts", "n_trials": "--trials"}
"""Options of the command line that are called otherwise than their settings."""


@dataclass(frozen=True)
class Settings:
    """How much a tuning job looks at, and what it may propose.

    Attributes:
        n_tune: Prompts to search on; their answers also tell how a head wants its input (44 of
            48 tokens are some 2,000 to tell it by).
        n_holdout: Prompts to prove the result on.
        n_replay: Of the tune prompts, those on which every tree is replayed.
        n_race: Of the tune prompts, those on which candidates are timed.
        max_new_tokens: Tokens per answer.
        max_prompt_tokens: Longer prompts are skipped.
        n_trials: Trees to measure; plain decoding counts as one, and so do the usual defaults.
        n_probe_rounds: Timed rounds per size that the cost model is fitted to.
        max_nodes: Most nodes verified per round.
        max_depth: Deepest tree of a head or a small model.
        max_lookup_depth: Deepest tree of lookup and suffix, whose levels cost next to nothing.
        engine_space: Another engine that must be able to run every draft and tree, such as
            `vllm`; None for our own.
        sampling: Greedy, or temperature with its filters.
        batch_sizes: Prompts at a time for which trees are chosen and proved; 1 always is.
        seed: Of the split, the sampler, the order of runs and the noise of sampling.
        raw: Leave out the chat template.

    Raises:
        UsageError: A count, a size or the seed is out of range, or there is no such engine.
    """

    n_tune: int = 44
    n_holdout: int = 32
    n_replay: int = 12
    n_race: int = 8
    max_new_tokens: int = 48
    max_prompt_tokens: int = 2048
    n_trials: int = 10
    n_probe_rounds: int = 10
    max_nodes: int = 64
    max_depth: int = 8
    max_lookup_depth: int = 16
    engine_space: str | None = None
    batch_sizes: tuple[int, ...] = (1,)
    sampling: Sampling = GREEDY
    seed: int = 0
    raw: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("n_tune", "n_holdout", "n_replay", "n_race", "max_new_tokens", "max_prompt_tokens"),
            *("n_trials", "n_probe_rounds", "max_nodes", "max_depth", "max_lookup_depth"),
        ):
            if getattr(self, name) < 1:
                told = f"{name} ({OPTIONS[name]})" if name in OPTIONS else name
                raise UsageError(f"{told} must be at least 1, but is {getattr(self, name)}")
        for name in ("max_nodes", "max_depth", "max_lookup_depth"):
            if getattr(self, name) > NODE_BUCKETS[-1]:
                raise UsageError(
                    f"{name} must be at most {NODE_BUCKETS[-1]}, the most that is searched, but "
                    f"is {getattr(self, name)}; lower it"
                )
        if not all(1 <= size <= MAX_BATCH for size in self.batch_sizes):
            raise UsageError(
                f"batch_sizes must be from 1 to {MAX_BATCH}, but are "
                f"{', '.join(map(str, self.batch_sizes))}"
            )
        if self.engine_space is not None and self.engine_space not in ENGINE_SPACES:
            raise UsageError(
                f"engine_space must be one of {', '.join(ENGINE_SPACES)}, but is "
                f"{self.engine_space}"
            )
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed must be from 0 to {2**32 - 1}, but is {self.seed}")

    @classmethod
    def quick(cls, **changes: object) -> "Settings":
        """Return settings for a short job, which proves less: fewer prompts, answers and trees.

        Args:
            **changes: Attributes to set otherwise.
        """
        fewer = {"n_tune": 6, "n_holdout": 12, "n_race": 4, "max_new_tokens": 32, "n_trials": 6}
        return cls(**(fewer | {"n_probe_rounds": 6} | changes))  # type: ignore[arg-type]
