"""What a tuning job asks of an engine, and of one way of decoding with it.

A new engine is one more file with a `ServingEngine`; its servers are most easily made of
`server.OpenAiServer`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engine.timing import TimedText
from engine.trace import Trace
from profiles import GREEDY, DraftRef, Sampling, TreeConfig

from .metrics import Counts


class Decoding(Protocol):
    """One way of decoding, ready to be timed: our engine's or a server's, plain or with a draft.

    Attributes:
        name: Its name in tables.
    """

    name: str

    def awake(self) -> AbstractContextManager[object]:
        """Let it run inside the `with` block only; others are timed outside of it."""

    def run(self, trace: Trace) -> TimedText:
        """Answer a trace's prompt with as many tokens as the trace has; from several threads
        where several requests are to be served at once.

        Raises:
            SpectuneError: It cannot.
        """

    def counts(self) -> Counts:
        """Return what was drafted and accepted so far; asked for inside `awake` only."""


class Served(Decoding, Protocol):
    """A way of decoding that is a server of its own.

    Attributes:
        start_s: Seconds its last start took.
    """

    start_s: float

    def start(self) -> None:
        """Start it, wait until it can answer, and let it sleep.

        Raises:
            SpectuneError: It did not start.
        """

    def stop(self) -> None:
        """End it and all its children, whatever state they are in; once more does nothing."""

    def answer(self, prompt: list[int], max_new_tokens: int) -> TimedText:
        """Answer a prompt until it ends by itself or the budget does."""


@dataclass(frozen=True)
class Speculation:
    """A setting of speculation: a draft with its knobs, and the length of its chain.

    Attributes:
        draft: Name of the draft in this job.
        ref: The draft with its knobs.
        depth: Tokens drafted at most per round.
    """

    draft: str
    ref: DraftRef
    depth: int

    @property
    def tree(self) -> TreeConfig:
        """The chain."""
        return TreeConfig.chain(self.depth)

    @property
    def label(self) -> str:
        """A short name for tables and logs."""
        return f"{self.draft} {self.depth}"


@dataclass(frozen=True)
class Deployment:
    """What all servers of a job have in common.

    Attributes:
        model: Folder of the target.
        dtype: Such as `bfloat16`.
        threads: CPU threads that compute.
        max_tokens: Longest prompt and answer together.
        logs: Folder for the logs.
        concurrency: Requests served at once.
        sampling: How tokens are drawn.
        seed: Of sampling.
        folders: Of drafts with weights, by the id in their reference.
        more: Further arguments of the user's.
        trust_remote_code: Let checkpoints run their own Python code.
    """

    model: Path
    dtype: str
    threads: int
    max_tokens: int
    logs: Path
    concurrency: int = 1
    sampling: Sampling = GREEDY
    seed: int = 0
    folders: Mapping[str, Path] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    trust_remote_code: bool = False


class ServingEngine(Protocol):
    """An engine that serves.

    Attributes:
        name: Its name in profiles and options, a key of `profiles.engine_spaces.ENGINE_SPACES`.
        title: Its name as its authors write it.
        version: Its version.
        device_kind: What it computes on: cpu or cuda.
        libraries: Versions of torch and transformers in its environment, where they are known.
        drafts: Kinds of draft that it runs.
    """

    name: str
    title: str
    version: str
    device_kind: str
    libraries: Mapping[str, str]
    drafts: frozenset[str]

    def server(self, deployment: Deployment, speculation: Speculation | None) -> Served:
        """Return a server that can be started; a plain one, without any draft, for None."""

    def arguments(self, deployment: Deployment) -> list[str]:
        """Return the arguments all its servers get, the model, its name and speculation apart."""

    def environment(self, deployment: Deployment) -> dict[str, str]:
        """Return the variables that matter to its speed."""
