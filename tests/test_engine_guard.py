"""The guard in the decoder: plain rounds are truly plain, and coming back loses nothing."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.decode import Request, decode
from engine.decoder import SpeculativeDecoder
from engine.draft import Draft
from engine.eagle3_draft import Eagle3Draft
from engine.lookup import LookupDraft
from engine.model_draft import ModelDraft
from engine.pair import LoadedTarget
from engine.sampling import Sampler
from engine.stopping import StopRules
from engine.target import Target
from engine.timing import PhaseClock
from engine.tree import DraftTree
from profiles import (
    PLAIN,
    CostModelSummary,
    CostTable,
    GuardSettings,
    Serving,
    TargetRef,
    TreeConfig,
)
from tiny import VOCAB, tiny_head, tiny_model, tiny_tokenizer, twin_with_noise
from toy_drafts import ScriptedDraft

MODEL = tiny_model("llama", 0, num_hidden_layers=2)
TARGET = Target(MODEL)
PROMPT = [5, 17, 90, 5, 17]
TREE = TreeConfig(depth=3, width=2, top_k=3, nodes=9)
PRICES = CostModelSummary(
    reference_ms=10.0,
    tables=[CostTable(name="verify", x=[0.0, 1.0, 2.0], relative=[1.0, 1.3, 1.3])],
)


def plain_ids(n_new: int, prompt: list[int] = PROMPT) -> list[int]:
    request = Request(TARGET, None, prompt, Sampler(), StopRules(n_new))
    for _ in decode(request, lambda _: PLAIN):
        pass
    return request.generated


TEXT = plain_ids(60)


def head() -> Eagle3Draft:
    return Eagle3Draft(tiny_head(MODEL, texts=[PROMPT + TEXT], draft_vocab=64))


class Recording:
    """A draft that notes every tree it proposed, by the length of the text."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.trees: dict[int, DraftTree] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def open(self, prompt: list[int], n_max: int) -> "RecordingSession":
        return RecordingSession(self._draft.open(prompt, n_max), self.trees, len(prompt))


class RecordingSession:
    def __init__(self, session: Any, trees: dict[int, DraftTree], n_tokens: int) -> None:
        self._session, self._trees, self._n_tokens = session, trees, n_tokens

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        self._n_tokens += len(tokens)
        self._session.commit(tokens, features)

    def propose(self, tree: TreeConfig, clock: PhaseClock, shaper: Any = None) -> DraftTree:
        proposed: DraftTree = self._session.propose(tree, clock, shaper)
        self._trees[self._n_tokens] = proposed
        return proposed


def proposals(draft: Draft, prompt: list[int], n_new: int, leaves: Any) -> dict[int, DraftTree]:
    """Decode with rounds that `leaves` turns plain; return the trees by the text's length."""
    recording = Recording(draft)
    request = Request(TARGET, recording, prompt, Sampler(), StopRules(n_new))
    for _ in decode(request, lambda r: PLAIN if leaves(r) else TREE):
        pass
    assert request.generated == plain_ids(n_new, prompt)
    return recording.trees


@pytest.mark.parametrize("name", ["eagle3", "model", "lookup"])
def test_after_leaving_and_returning_proposals_are_those_of_a_draft_that_never_left(
    name: str,
) -> None:
    """Left at random moments for random stretches, from the first round on or later, wherever a
    draft proposes again its tree is, node for node, the one of a session that saw every token
    as it came."""
    drafts = {"eagle3": head(), "model": ModelDraft(twin_with_noise(MODEL, 0.1), VOCAB)}
    draft = drafts.get(name) or LookupDraft(1, 3)
    never_left: dict[int, DraftTree] = {}
    for n_plain in range(8):  # every length of text is a root of one of these runs
        never_left |= proposals(draft, PROMPT, 60, lambda r, n=n_plain: r.n_new <= n)
    rng, n_compared = random.Random(0), 0
    for _ in range(6):
        out = {"left": rng.random() < 0.5}

        def leaves(request: Request, out: dict[str, bool] = out) -> bool:
            if rng.random() < 0.25:
                out["left"] = not out["left"]
            return out["left"]

        for length, tree in proposals(draft, PROMPT, 60, leaves).items():
            if length in never_left:
                n_compared += 1
                limited = never_left[length]
                assert (tree.tokens, tree.parents) == (limited.tokens, limited.parents)
    assert n_compared > 30


def test_a_head_that_returns_has_the_features_of_every_token() -> None:
    """Its cache after a return is, to rounding, the cache of a head that never left."""
    draft, n_known = head(), len(PROMPT) + 38

    def cache_after(pattern: list[TreeConfig]) -> tuple[int, Tensor]:
        request = Request(
            TARGET, draft, PROMPT, Sampler(), StopRules(len(TEXT)), forced=list(TEXT)
        )
        request.prefill()
        for tree in pattern:
            request.step(tree)
        while request.n_new < 40:  # the same text behind both
            request.step(PLAIN)
        request.step(TreeConfig.chain(1))
        cache = request.session._cache  # type: ignore[union-attr]
        keys = [layer.keys[:, :, :n_known].clone() for layer in cache.layers]
        return cache.length, torch.cat(keys)

    n_left, left = cache_after([PLAIN] * 20)
    n_stayed, stayed = cache_after([TREE, TREE, PLAIN, TREE])
    assert min(n_left, n_stayed) >= n_known
    assert torch.allclose(left, stayed, atol=1e-9)


def decoder(draft: Draft, settings: GuardSettings | None = None) -> SpeculativeDecoder:
    ref = TargetRef(id="tiny", sha256="a" * 64, dtype="float64")
    loaded = LoadedTarget(TARGET, tiny_tokenizer(), ref, ())
    serving = Serving(PRICES, settings or GuardSettings())
    return SpeculativeDecoder(loaded, draft, TREE, serving=serving)


def test_below_the_least_length_no_draft_is_opened_and_no_features_are_read() -> None:
    def refuse(tokens: list[int], tree: TreeConfig) -> DraftTree:
        raise AssertionError("a short answer needs no draft")

    draft = ScriptedDraft(refuse)
    short = decoder(draft, GuardSettings(min_new_tokens=31))
    assert short.generate(PROMPT, max_new_tokens=30).token_ids == plain_ids(30)
    assert short.request(PROMPT, max_new_tokens=30)._draft is None
    assert short.request(PROMPT, max_new_tokens=31)._draft is draft


def test_a_draft_that_is_always_wrong_is_left_and_what_happened_can_be_read() -> None:
    """Forced times: every speculative round costs 1.3 plain tokens and emits one."""
    wrong = decoder(ScriptedDraft(lambda tokens, tree: DraftTree([VOCAB - 1], [0])))
    guard = wrong._guard
    assert guard is not None
    settle = guard.settle
    guard.settle = lambda own, done, seconds: settle(  # type: ignore[method-assign]
        own, done, 0.01 if done.tree.is_plain else 0.013
    )
    for _ in range(4):
        assert wrong.generate(PROMPT, max_new_tokens=60).token_ids == TEXT
    stats = wrong.stats
    assert stats is not None
    assert stats.n_rounds == stats.n_tokens == 4 * 59
    assert stats.n_leaves == 1
    assert stats.n_plain_rounds > 0.8 * stats.n_rounds
    assert -8 - 0.006 * stats.n_tokens <= stats.gained_tokens < 0
    assert 0 <= stats.balance_tokens < 8
    assert 0 < stats.worst_request_tokens <= 8
    assert stats.drift == pytest.approx(1.0)
    assert stats.guard_s > 0


def test_a_decoder_without_a_profile_has_no_guard() -> None:
    guarded = decoder(LookupDraft())
    assert SpeculativeDecoder(guarded.loaded, guarded.draft, TREE).stats is None
