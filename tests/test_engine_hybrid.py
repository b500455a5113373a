"""Hybrid drafts: which rounds the head is spared, and that it is none the worse for it."""

import math
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from engine.decode import Drafted, Request
from engine.draft import Draft, fresh, remember
from engine.eagle3_draft import Eagle3Draft
from engine.hybrid import HybridDraft
from engine.model_draft import ModelDraft
from engine.replay import Replay
from engine.rounds import measure_rounds
from engine.sampling import Sampler
from engine.stopping import StopRules
from engine.suffix import SuffixDraft
from engine.target import Target
from engine.timing import PhaseClock
from engine.trace import Trace
from engine.tree import DraftTree
from profiles import Sampling, TreeConfig
from tiny import VOCAB, tiny_head, tiny_model

TREE = TreeConfig(depth=2, width=2, top_k=2, nodes=4)
PASSAGE = list(range(20, 40))
GREEDY = Sampling(temperature=0.0)


@lru_cache
def target() -> Target:
    return Target(tiny_model("llama", 4, torch.float64, num_hidden_layers=2))


def suffix(history: int = 0) -> SuffixDraft:
    return SuffixDraft(1, 8, 0.05, history)


def hybrid(head: Draft, *, match_nodes: int = 6, match_tau: float = 3.0) -> HybridDraft:
    return HybridDraft(head, suffix(), match_nodes=match_nodes, match_tau=match_tau)


class Spy(ModelDraft):
    """A small model that keeps what it was made to run over."""

    def __init__(self) -> None:
        super().__init__(target().model, VOCAB)
        self.extended: list[list[int]] = []

    def extend(
        self, tokens: list[int], features: Tensor | None, cache: object, last_only: bool
    ) -> tuple[Tensor, Tensor | None]:
        self.extended.append(list(tokens))
        return super().extend(tokens, features, cache, last_only)  # type: ignore[arg-type]


def forced(draft: Draft, prompt: list[int], answer: list[int]) -> Request:
    request = Request(
        target(), draft, prompt, Sampler(), StopRules(len(answer)), forced=list(answer)
    )
    request.prefill()
    return request


def test_where_the_text_repeats_the_head_does_not_run_and_catches_up_afterwards() -> None:
    """Rounds in a repeated passage extend nothing and grow nothing; the first round after it runs
    the head once over all tokens it missed, and only over those."""
    spy = Spy()
    prompt = [1, *PASSAGE, 2, *PASSAGE[:6]]
    answer = [*PASSAGE[6:], 90, 91, 92, 93, 94]
    request = forced(hybrid(spy), prompt, answer)
    kinds = []
    while request.stop_reason is None:
        n_runs, seen = len(spy.extended), len(request.tokens)
        request.step(TREE)
        assert request.last_round is not None
        model_free = request.last_round.model_free
        kinds.append((model_free, request.last_round.n_emitted))
        assert (len(spy.extended) == n_runs) == (model_free or request.last_round.tree.is_plain)
        if not model_free and not request.last_round.tree.is_plain:
            assert sum(map(len, spy.extended)) == seen
            assert request.last_round.n_extend == len(spy.extended[-1])
        elif model_free:
            assert request.last_round.n_extend == 0
    assert kinds[:2] == [(True, 7), (True, 7)]  # six nodes of the passage and a bonus token
    assert not all(model_free for model_free, _ in kinds)
    assert len(spy.extended[0]) > len(prompt)


def test_the_clock_tells_what_a_round_was_made_of() -> None:
    """A model-free round has the lap "match" and none of the head's."""
    request = forced(hybrid(Spy()), [1, *PASSAGE, 2, *PASSAGE[:6]], [*PASSAGE[6:], 90, 91, 92])
    request.clock = PhaseClock(target().device)
    request.step(TREE)
    assert set(request.clock.seconds) == {"match", "verify", "commit"}


@pytest.mark.parametrize("match_tau", [1.0, 2.0, math.inf])
def test_a_round_is_model_free_if_and_only_if_enough_tokens_are_promised(
    match_tau: float,
) -> None:
    """The promise is 1 and the sum of the nodes' probabilities, with the budget's limit."""
    draft = hybrid(Spy(), match_tau=match_tau)
    for n_repeated in range(1, 10):
        text = [1, *PASSAGE, 2, *PASSAGE[:n_repeated]]
        session = draft.suffix.open(text, 200)
        for n_left in (1, 2, 4, 100):
            pool = draft.match(session, n_left)
            if n_left == 1:  # the last token needs no draft
                assert pool is None
                continue
            depth = min(6, n_left - 1)
            every = session.pool(TreeConfig(depth=depth, width=2, top_k=2, nodes=depth))
            best = sorted(every.scores, reverse=True)[:6]
            assert (pool is not None) == (1 + sum(map(math.exp, best)) >= match_tau)
            if pool is not None:
                assert sorted(pool.scores, reverse=True) == pytest.approx(best)
                assert max(pool.tree().depths) <= depth


def test_the_head_proposes_what_it_would_have_proposed_alone() -> None:
    """Rounds that it was spared leave no trace: its trees are those of a head that drafted all
    along, whose state comes from the target's features of accepted tokens."""
    prompt, answer = [1, *PASSAGE, 2, *PASSAGE[:5]], [*PASSAGE[5:], *range(60, 80)]
    head = Eagle3Draft(tiny_head(target().model))  # never right, so it proposes at every token
    trees: list[dict[int, list[int]]] = []
    for draft in (hybrid(head, match_tau=2.5), head):
        request, found = forced(draft, prompt, answer), {}
        drafted = request.drafted

        def kept(
            asked: TreeConfig, tree: DraftTree, request=request, found=found, drafted=drafted
        ) -> Drafted:
            if not tree.model_free:
                found[len(request.tokens)] = tree.tokens
            return drafted(asked, tree)

        request.drafted = kept  # type: ignore[method-assign]
        while request.stop_reason is None:
            request.step(TREE)
        trees.append(found)
    mixed, alone = trees
    assert 10 < len(mixed) < len(alone) - 10
    assert mixed == {n: alone[n] for n in mixed}


def test_replay_tells_the_kinds_of_rounds_and_what_the_head_caught_up_with() -> None:
    """Model-free rounds extend nothing; the others extend over what was emitted since the last of
    them, and in all every token but the last round's is extended over once."""
    prompt = [1, *PASSAGE, 2, *PASSAGE[:5]]
    answer = [*PASSAGE[5:], 70, 71, 72, *PASSAGE[3:15], 80, 81, 82]
    replay = Replay(target(), hybrid(Spy()), [Trace("a", prompt, answer)], TREE.depth)
    (rounds,) = replay.rounds(TREE)
    assert rounds.model_free is not None
    assert rounds.model_free.any() and rounds.extends.any()
    assert not (rounds.model_free & rounds.extends).any()
    assert (rounds.n_extend[~rounds.extends] == 0).all()
    assert (rounds.n_extend[rounds.extends] > 0).all()
    last = rounds.extends.nonzero()[0][-1]
    assert rounds.n_extend.sum() == rounds.n_emitted[:last].sum()
    assert rounds.n_emitted.max() == 7


def test_replay_gives_every_text_the_answers_before_it_as_history() -> None:
    """What is replayed is what a decoder does that remembers the answers in turn: the second
    question, whose answer is that of the first, is answered from memory. The draft given is left
    as it was."""
    answer = list(range(50, 70))
    traces = [Trace(str(i), [i, i + 1], answer) for i in range(2)]
    draft = suffix(history=100)
    tree = TreeConfig.chain(5)
    for replay in (Replay(target(), draft, traces, 5), Replay(target(), draft, traces, 5)):
        first, second = replay.rounds(tree)
        assert first.tau == 1.0
        assert second.tau > 3
    serving, served = fresh(draft), []
    for trace in traces:
        request = forced(serving, trace.prompt, trace.generated)
        while request.stop_reason is None:
            request.step(tree)
        served.append(request.stats.n_rounds)
        remember(serving, trace.generated)
    assert served == [len(first.n_emitted), len(second.n_emitted)]


def test_memory_belongs_to_the_copy_that_a_decoder_makes() -> None:
    """A fresh hybrid shares the head and neither the memory nor what becomes of it."""
    spy = Spy()
    draft = HybridDraft(spy, suffix(history=50), match_nodes=4, match_tau=2.0)
    draft.remember([5, 6, 7, 8])
    copy = draft.fresh()
    assert copy.head is spy
    assert (copy.match_nodes, copy.match_tau) == (4, 2.0)
    copy.remember([9, 10, 11])

    def known(of: HybridDraft, token: int) -> list[int]:
        return of.suffix.open([token], 10).pool(TreeConfig.chain(1)).tokens

    assert (known(draft, 6), known(copy, 6)) == ([7], [])
    assert (known(draft, 9), known(copy, 9)) == ([], [10])
    assert fresh(spy) is spy


def test_rounds_are_timed_with_the_head_and_the_look_for_a_match_in_each() -> None:
    """What a model-free round saves must be known even where the timed texts repeat a lot."""
    trace = Trace("a", [1, *PASSAGE], PASSAGE * 2)
    draft = hybrid(Spy())
    times = measure_rounds(
        target(), draft.never_matching(), [trace], [TREE], n_rounds=2, sampling=GREEDY
    )
    speculative = [timed for timed in times if not timed.tree.is_plain]
    assert len(speculative) >= 2
    assert all(timed.match_s > 0 and timed.extend_s > 0 for timed in speculative)
    assert draft.match_tau == 3.0
