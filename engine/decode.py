"""Decoding one request: prefill, then rounds of draft, verify and commit.

A plain round is a round whose tree is the root alone, so both go through the same code. Token
ids only: text, profiles and the choice of trees belong to the callers.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from profiles import PLAIN, TreeConfig
from profiles.errors import UsageError

from .adaptive import Shaper
from .devices import sent
from .draft import Draft, DraftSession
from .pending_tree import PendingTree
from .sampling import Sampler
from .stopping import StopRules
from .target import Target
from .timing import PhaseClock
from .tree import ROOT_ONLY, DraftTree
from .verify import walk

Policy = Callable[["Request"], TreeConfig]
"""Chooses the tree of the next round."""


@dataclass(frozen=True)
class Round:
    """What one round was.

    Attributes:
        tree: What was asked for, cut to the levels that were grown; plain for a plain round.
        n_nodes: Draft nodes verified.
        n_extend: Tokens the draft, of a hybrid the head, had to catch up with to propose.
        context: Tokens in the target's cache before the round.
        n_emitted: Tokens emitted.
        model_free: Whether it was a model-free round of a hybrid.
    """

    tree: TreeConfig
    n_nodes: int
    n_extend: int
    context: int
    n_emitted: int
    model_free: bool = False


@dataclass(frozen=True)
class Drafted:
    """A round before it is verified.

    Attributes:
        asked: The tree asked for, cut to the levels that were grown.
        tree: The nodes.
        n_extend: Tokens the draft, of a hybrid the head, had to catch up with.
    """

    asked: TreeConfig
    tree: DraftTree | PendingTree
    n_extend: int


Observer = Callable[[Round, float], None]
"""Is told every round and the seconds it took."""


@dataclass
class DecodeStats:
    """Counts and seconds of one request; ratios are the reader's.

    Attributes:
        n_rounds: Rounds after the prefill.
        n_round_tokens: Tokens they emitted (the prefill's token is not among them).
        n_drafted: Draft nodes they verified.
        accepted_by_depth: How many rounds accepted at least one, two, ... draft tokens.
        prefill_s: Seconds up to the first token, the draft's share excluded.
        total_s: Seconds from start to end, everything included.
        seconds: Seconds by phase of the rounds: extend, levels, verify, commit.
    """

    n_rounds: int = 0
    n_round_tokens: int = 0
    n_drafted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    total_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, n_drafted: int, n_emitted: int) -> None:
        """Add one round."""
        self.n_rounds += 1
        self.n_round_tokens += n_emitted
        self.n_drafted += n_drafted
        n_accepted = n_emitted - 1
        missing = n_accepted - len(self.accepted_by_depth)
        self.accepted_by_depth += [0] * missing
        for depth in range(n_accepted):
            self.accepted_by_depth[depth] += 1


class Request:
    """One request in flight.

    Args:
        target: The target.
        draft: The draft, or None: then every round must be plain.
        prompt: Token ids, at least one.
        sampler: Draws the tokens.
        stop: Says when the text ends.
        forced: Forced text: logits and the draw are computed as usual, but the emitted token
            is taken from here and only the end of this list ends the text.
        shaper: Fits every tree to its round, within the policy's; None takes the policy's.

    Raises:
        UsageError: The prompt is empty or holds ids the target does not know, the budget is below
            1, or both exceed the context.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        prompt: list[int],
        sampler: Sampler,
        stop: StopRules,
        forced: list[int] | None = None,
        shaper: Shaper | None = None,
    ) -> None:
        budget = stop.max_new_tokens if forced is None else len(forced)
        _check_prompt(prompt, budget, target)
        self.target = target
        self.tokens = list(prompt)
        self.n_prompt = len(prompt)
        self.stop_reason: str | None = None
        self.stats = DecodeStats()
        self._budget = budget
        self._sampler = sampler
        self._stop = stop
        self._forced = forced
        self._draft = draft if _can_read(draft, len(prompt) + 1) else None
        self.feature_layers = () if self._draft is None else self._draft.feature_layers
        self.session: DraftSession | None = None
        self.shaper = shaper
        self._n_committed = 0  # tokens the draft was told of
        self._n_extended = 0  # tokens it, or the head of a hybrid, ran over
        self._features: list[Tensor] = []  # of the tokens after them
        self.last_round: Round | None = None
        self.clock = PhaseClock(target.device, detailed=False)

    @property
    def n_new(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def budget_left(self) -> int:
        """Tokens it may still generate."""
        return self._budget - self.n_new

    @property
    def is_forced(self) -> bool:
        """Whether its text was given beforehand."""
        return self._forced is not None

    @property
    def generated(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.n_prompt :]

    @property
    def n_behind(self) -> int:
        """Tokens the draft would have to catch up with before it could propose."""
        return len(self.tokens) - self._n_extended

    @torch.inference_mode()
    def prefill(self, room: int | None = None) -> list[int]:
        """Run the prompt through the target and return the first token.

        Args:
            room: Tokens to make room for in the cache beside the prompt; by default the cache is
                lent for the whole text and the nodes of a round.
        """
        started = time.perf_counter()
        if room is None:
            self.cache = self.target.lend_cache(self.n_prompt + self._budget)
        else:
            self.cache = self.target.new_cache(self.n_prompt + room)
        logits, features = self.target.forward(
            self.tokens, self.cache, last_only=True, feature_layers=self.feature_layers
        )
        walk(ROOT_ONLY, self._emitter(logits))
        self.keep_features(features)
        self.stats.prefill_s = time.perf_counter() - started
        self.clock.restart()
        return self.tokens[self.n_prompt :]

    @torch.inference_mode()
    def step(self, tree_config: TreeConfig) -> list[int]:
        """Run one round and return the tokens it emitted."""
        start, n_before = self.cache.length, len(self.tokens)
        drafted = self.draft_round(tree_config)
        tokens, positions, mask = drafted.tree.as_input(self.tokens[-1], start)
        logits, features = self.target.forward(
            tokens,
            self.cache,
            positions=positions,
            mask=mask,
            feature_layers=self.feature_layers,
        )
        path = self.accept(drafted, logits)
        self.clock.lap("verify")
        self.cache.keep_path(start, path)
        self.keep_features(features, path)
        self.clock.lap("commit")
        return self.tokens[n_before:]

    def draft_round(self, tree_config: TreeConfig) -> Drafted:
        """Return the next round with its tree, cut to what the request has room for."""
        tree_config = self.feasible(tree_config)
        if tree_config.is_plain:
            return Drafted(tree_config, ROOT_ONLY, 0)
        session = self.told_session()
        return self.drafted(tree_config, session.propose(tree_config, self.clock, self.shaper))

    def drafted(self, asked: TreeConfig, tree: DraftTree | PendingTree) -> Drafted:
        """Return the round of a proposed tree; takes note of how far the draft has read."""
        n_extend = 0
        if not tree.model_free:
            n_extend = len(self.tokens) - self._n_extended
            self._n_extended = len(self.tokens)
        return Drafted(asked.limited(tree.n_levels), tree, n_extend)

    def accept(self, drafted: Drafted, logits: Tensor) -> list[int]:
        """Emit tokens along the tree as far as the target agrees; return the visited nodes.

        Args:
            drafted: The round.
            logits: The target's [n_nodes + 1, vocabulary].
        """
        context = len(self.tokens) - 1  # the last token enters the cache with this round
        path = walk(drafted.tree, self._emitter(logits))
        tree = drafted.tree
        self.stats.count(tree.n_nodes, len(path))
        self.last_round = Round(
            drafted.asked, tree.n_nodes, drafted.n_extend, context, len(path), tree.model_free
        )
        return path

    def release(self) -> None:
        """Let go of caches and features; the text stays."""
        vars(self).pop("cache", None)
        self.session = None
        self._features.clear()

    def feasible(self, tree_config: TreeConfig) -> TreeConfig:
        """Cut a tree to the budget; plain without a draft, or beyond what the draft can read."""
        if self._draft is None:
            return PLAIN
        if not _can_read(self._draft, len(self.tokens)):  # nor ever again: it is let go
            self._draft, self.feature_layers = None, ()
            self._features.clear()
            return PLAIN
        tree_config = tree_config.limited(self.budget_left - 1)
        in_reach = _can_read(self._draft, len(self.tokens) + tree_config.depth)
        return tree_config if in_reach else PLAIN

    def told_session(self) -> DraftSession:
        """Return the draft's session, told of all that was committed so far."""
        assert self._draft is not None  # noqa: S101 - else no tree is feasible
        if self.session is None:
            n_max = self.n_prompt + self._budget
            self.session = self._draft.open(self.tokens[: self.n_prompt], n_max)
            self._n_committed = self.n_prompt
        features = torch.cat(self._features) if self._features else None
        self.session.commit(self.tokens[self._n_committed :], features)
        self._n_committed = len(self.tokens)
        self._features.clear()
        return self.session

    def keep_features(self, features: Tensor | None, rows: list[int] | None = None) -> None:
        """Keep the features of new tokens until the draft reads them.

        They come with the target's pass, so keeping them costs next to nothing; at most, those of
        a whole text are held, a fraction of what the target's cache holds for it.
        """
        if features is not None:
            if rows is not None:
                features = features[sent(rows, features.device)]
            self._features.append(features)

    def _emitter(self, logits: Tensor) -> Callable[[int], int | None]:
        draw = self._sampler.drawer(logits, self.tokens, self.n_prompt)

        def emit(row: int) -> int | None:
            token, scores = draw(row)
            if self._forced is not None:
                self.tokens.append(self._forced[self.n_new])
                self.stop_reason = "length" if self.n_new == self._budget else None
            else:
                self.tokens.append(token)
                self.stop_reason = self._stop.reason(self.tokens, self.n_prompt, scores)
            return self.tokens[-1] if self.stop_reason is None else None

        return emit


def decode(
    request: Request, policy: Policy, observe: Observer | None = None
) -> Iterator[list[int]]:
    """Decode a request to its end, yielding the tokens of the prefill and of every round."""
    started = time.perf_counter()
    yield request.prefill()
    while request.stop_reason is None:
        tree = policy(request)
        round_started = time.perf_counter()
        emitted = request.step(tree)
        if observe is not None and request.last_round is not None:
            observe(request.last_round, time.perf_counter() - round_started)
        yield emitted
    request.stats.total_s = time.perf_counter() - started
    request.stats.seconds = dict(request.clock.seconds)


def _can_read(draft: Draft | None, n_tokens: int) -> bool:
    """Tell whether a draft can read a text of that many tokens; beyond that rounds are plain."""
    limit = None if draft is None else draft.max_positions
    return limit is None or n_tokens <= limit


def _check_prompt(prompt: list[int], budget: int, target: Target) -> None:
    n_prompt, max_positions = len(prompt), target.max_positions
    if n_prompt == 0:
        raise UsageError("a prompt needs at least one token, but it is empty; give some text")
    if budget < 1:
        raise UsageError(f"max_new_tokens must be at least 1, but is {budget}")
    if max_positions is not None and n_prompt + budget > max_positions:
        raise UsageError(
            f"prompt and new tokens must fit the target's {max_positions} positions, but are "
            f"{n_prompt} + {budget}; shorten the prompt or lower max_new_tokens"
        )
    if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
        raise UsageError(
            f"token ids of a prompt must be from 0 to {target.vocab_size - 1}, but run from "
            f"{min(prompt)} to {max(prompt)}; encode it with the target's tokenizer"
        )
