"""How far rounds get, taken from a recording: for pairs whose weights say nothing.

The draft runs as it does, its tree is verified as it is, and a path of the recorded length is
accepted, along which cache and features are kept as ever. Only the tokens are made up.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from common import DOMAINS
from torch import Tensor

from autotune.bench.measuring import choose_prompts, record_texts
from autotune.progress import Silent
from engine.adaptive import Shaper
from engine.draft import Draft, DraftSession
from engine.pair import load_draft, load_target
from engine.pending_tree import PendingTree
from engine.replay import Replay, ReplayedRounds
from engine.timing import PhaseClock
from engine.tree import DraftTree, Pool
from profiles import TreeConfig
from profiles.io import atomic_write

RECORDED = Path(__file__).with_name("gpu_acceptance.json")

TREES = (
    TreeConfig.from_sglang(num_steps=3, eagle_topk=1, num_draft_tokens=4),
    TreeConfig.from_sglang(num_steps=5, eagle_topk=4, num_draft_tokens=8),
    TreeConfig(depth=4, width=4, top_k=4, nodes=15),
    TreeConfig.from_eagle(total_token=60, depth=7, top_k=10),
)
"""Trees that are timed whole: SGLang's defaults, one between, and EAGLE's."""

Recording = Mapping[str, Sequence[Sequence[int]]]
"""By the label of a tree: for every recorded text the draft tokens accepted round by round."""


def load_recording(path: Path = RECORDED) -> Recording:
    """Return the recorded rounds of a file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    rounds: Recording = document["accepted"]
    return rounds


def record_demo(path: Path, n_each: int, n_new: int, seed: int) -> None:
    """Write how far the demo head gets on answers of three domains with each of the trees.

    Args:
        path: The file to write.
        n_each: Prompts of each domain.
        n_new: Tokens of an answer.
        seed: Chooses the prompts.
    """
    loaded = load_target("demo", device="cpu")
    draft = load_draft("demo", loaded).draft
    prompts: list[list[int]] = []
    for name in ("code", "math", "chat"):
        prompts += choose_prompts(
            loaded,
            DOMAINS / f"{name}.jsonl",
            n_prompts=n_each,
            max_new_tokens=n_new,
            seed=seed,
            raw=False,
            progress=Silent(),
        )
    traces = record_texts(loaded, prompts, n_new, Silent())
    replay = Replay(loaded.target, draft, traces, max(tree.depth for tree in TREES))
    accepted = {
        tree.label(): [(rounds.n_emitted - 1).tolist() for rounds in replay.rounds(tree)]
        for tree in TREES
    }
    source = f"the demo pair on {len(traces)} prompts x {n_new} tokens, {loaded.ref.dtype}, greedy"
    atomic_write(path, json.dumps({"source": source, "accepted": accepted}) + "\n")


def rounds_of(accepted: Sequence[int], tree: TreeConfig, n_new: int) -> ReplayedRounds:
    """Return the rounds in which a text of `n_new` tokens is decoded with recorded acceptance."""
    depths, nodes, emitted = [], [], []
    n_done, source = 1, cycle(accepted)
    while n_done < n_new:
        limited = tree.limited(n_new - n_done - 1)
        depths.append(limited.depth)
        nodes.append(limited.nodes)
        emitted.append(0 if limited.is_plain else min(next(source), limited.depth))
        emitted[-1] += 1
        n_done += emitted[-1]
    columns = (np.array(column, dtype=np.int64) for column in (depths, nodes, emitted))
    return ReplayedRounds(*columns)


@dataclass(frozen=True)
class ForcedTree:
    """A tree of which a path of a given length is accepted, whatever its tokens are.

    Args:
        tree: The tree.
        n_accepted: Nodes of the path.
    """

    tree: DraftTree | PendingTree
    n_accepted: int

    def __getattr__(self, name: str) -> object:
        return getattr(self.tree, name)

    @property
    def children(self) -> "ForcedPath":
        """Stands for the tree's children while it is walked; see `DraftTree`."""
        return ForcedPath(self.tree.parents, self.n_accepted)


class ForcedPath:
    """Answers for the children of nodes: the next of a path of given length.

    It leads to the deepest node. Where a draft that knows nothing has grown too shallow a tree, it
    goes through other nodes as well: what is kept of a round costs the same.
    """

    def __init__(self, parents: Sequence[int], n_accepted: int) -> None:
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        node = max(range(len(depths)), key=depths.__getitem__)
        path = {0}
        while node:
            path.add(node)
            node = parents[node - 1]
        missing = max(0, n_accepted + 1 - len(path))
        others = [node for node in range(len(depths)) if node not in path]
        steps = sorted(path | set(others[:missing]))[: n_accepted + 1]
        self._next = dict(zip(steps, steps[1:], strict=False))

    def get(self, key: tuple[int, int]) -> int | None:
        """Return the node that is taken for the child of (node, any token)."""
        return self._next.get(key[0])


class ForcedDraft:
    """A draft whose rounds get as far as recorded ones did.

    Args:
        draft: Does the work.
        accepted: Draft tokens accepted in one round after another, begun anew when used up.
    """

    kind = "forced"

    def __init__(self, draft: Draft, accepted: Sequence[int]) -> None:
        self._draft = draft
        self._accepted = accepted
        self.feature_layers = draft.feature_layers
        self.max_top_k = draft.max_top_k
        self.max_positions = draft.max_positions

    def open(self, prompt: list[int], n_max: int) -> "ForcedSession":
        """Start a request; see `Draft.open`."""
        return ForcedSession(self._draft.open(prompt, n_max), cycle(self._accepted))

    def pools(
        self, tokens: list[int], features: Tensor | None, roots: list[int], tree: TreeConfig
    ) -> list[Pool]:
        """Return the draft's own pools."""
        return self._draft.pools(tokens, features, roots, tree)


class ForcedSession:
    """The state of a draft whose rounds get as far as recorded ones did."""

    def __init__(self, session: DraftSession, accepted: Iterator[int]) -> None:
        self._session = session
        self._accepted = accepted

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        """Take note of committed tokens."""
        self._session.commit(tokens, features)

    def propose(
        self, tree: TreeConfig, clock: PhaseClock, shaper: Shaper | None = None
    ) -> ForcedTree:
        """Return the draft's tree with the length of the path to accept."""
        n_accepted = min(next(self._accepted), tree.depth)
        return ForcedTree(self._session.propose(tree, clock, shaper), n_accepted)
