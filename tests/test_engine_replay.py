"""Replay: what is computed from recorded text is what decoding really does."""

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch

from engine.decode import Request
from engine.draft import Draft
from engine.eagle3_draft import Eagle3Draft
from engine.hybrid import HybridDraft
from engine.lookup import LookupDraft
from engine.model_draft import ModelDraft
from engine.replay import Replay
from engine.sampling import Sampler, request_seed
from engine.stopping import StopRules
from engine.suffix import SuffixDraft
from engine.target import Target
from engine.trace import Trace, record
from engine.tree import DraftTree
from profiles import PLAIN, Sampling, TreeConfig
from tiny import VOCAB, tiny_head, tiny_model, twin_with_noise
from toy_drafts import ScriptedDraft

MAX_DEPTH = 6
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.6, top_k=20)
SEED = 3


@dataclass(frozen=True)
class Setting:
    """A target with recorded texts and the drafts to replay."""

    target: Target
    traces: list[Trace]
    drafts: dict[str, Draft]


def hybrid(head: Draft) -> HybridDraft:
    return HybridDraft(head, SuffixDraft(1, 8, 0.05), match_nodes=9, match_tau=1.5)


@lru_cache
def setting(dtype: torch.dtype, sampling: Sampling) -> Setting:
    model = tiny_model("llama", 4, dtype, num_hidden_layers=2)
    target, rng = Target(model), random.Random(0)
    traces = []
    for i in range(3):
        prompt = [rng.randrange(VOCAB) for _ in range((1, 7, 12)[i])] * 2
        n_new = (40, 33, 2)[i]
        traces.append(
            record(
                target,
                str(i),
                prompt,
                max_new_tokens=n_new,
                sampling=sampling,
                seed=SEED,
                index=i,
            )
        )
    head = tiny_head(model, texts=[trace.tokens for trace in traces], draft_vocab=64)
    drafts: dict[str, Draft] = {
        "lookup": LookupDraft(1, 3),
        "model": ModelDraft(twin_with_noise(model, 0.1), VOCAB),
        "suffix": SuffixDraft(1, 8, 0.05),
        "eagle3": Eagle3Draft(head),
        "hybrid eagle3": hybrid(Eagle3Draft(head)),
        "hybrid model": hybrid(ModelDraft(twin_with_noise(model, 0.1), VOCAB)),
    }
    return Setting(target, traces, drafts)


def random_trees(seed: int, n: int) -> list[TreeConfig]:
    rng, trees = random.Random(seed), []
    for _ in range(n):
        depth, width, top_k = rng.randint(1, MAX_DEPTH), rng.randint(1, 3), rng.randint(1, 4)
        pool = TreeConfig(depth=depth, width=width, top_k=top_k, nodes=depth).pool
        nodes = rng.randint(depth, min(pool, 24))
        trees.append(TreeConfig(depth=depth, width=width, top_k=top_k, nodes=nodes))
    return trees


def decoded_rounds(
    setting: Setting, draft: Draft, trace: Trace, index: int, tree: TreeConfig, sampling: Sampling
) -> list[tuple[int, int]]:
    """Decode for real and return (nodes verified, tokens emitted) of every round."""
    request = Request(
        setting.target,
        draft,
        trace.prompt,
        Sampler(sampling, request_seed(SEED, index)),
        StopRules(len(trace.generated)),
    )
    request.prefill()
    rounds = []
    while request.stop_reason is None:
        before = request.stats.n_drafted
        emitted = request.step(tree)
        rounds.append((request.stats.n_drafted - before, len(emitted)))
    assert request.generated == trace.generated
    return rounds


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(
    "name", ["lookup", "suffix", "model", "eagle3", "hybrid eagle3", "hybrid model"]
)
def test_replayed_rounds_are_the_rounds_really_decoded(
    name: str, dtype: torch.dtype, sampling: Sampling
) -> None:
    """Every round's verified nodes and emitted tokens agree, for random trees: in all 24 for
    each kind of draft. A text of two tokens is among them."""
    where = setting(dtype, sampling)
    draft = where.drafts[name]
    replay = Replay(where.target, draft, where.traces, MAX_DEPTH)
    n_accepted = 0
    for tree in random_trees(len(name) + dtype.itemsize + sampling.top_k, 6):
        for index, (trace, found) in enumerate(
            zip(where.traces, replay.rounds(tree), strict=True)
        ):
            expected = decoded_rounds(where, draft, trace, index, tree, sampling)
            pairs = list(zip(found.n_nodes.tolist(), found.n_emitted.tolist(), strict=True))
            assert pairs == expected, tree.label()
            assert found.tau == pytest.approx(np.mean([n for _, n in expected]))
            n_accepted += int((found.n_emitted - 1).sum())
    assert n_accepted > 20


def test_plain_rounds_need_no_draft() -> None:
    """Depth 0 gives one token per round and grows nothing."""
    where = setting(torch.float64, GREEDY)

    def refuse(tokens: list[int], tree: TreeConfig) -> DraftTree:
        raise AssertionError("plain needs no trees")

    replay = Replay(where.target, ScriptedDraft(refuse), where.traces, MAX_DEPTH)
    for trace, rounds in zip(where.traces, replay.rounds(PLAIN), strict=True):
        assert rounds.n_emitted.tolist() == [1] * (len(trace.generated) - 1)
        assert rounds.n_nodes.tolist() == rounds.depths.tolist() == [0] * len(rounds.n_emitted)
        assert rounds.tau == 1.0


def test_a_text_of_one_token_has_no_rounds() -> None:
    """The prefill's token is not a round's; tau is then that of plain, not 0 / 0."""
    where = setting(torch.float64, GREEDY)
    trace = Trace("one", [3, 4, 5], [6])
    replay = Replay(where.target, LookupDraft(), [trace], MAX_DEPTH)
    (rounds,) = replay.rounds(TreeConfig.chain(2))
    assert len(rounds.n_emitted) == 0
    assert rounds.tau == 1.0


def test_b24_a_perfect_draft_gives_the_tau_computed_by_hand() -> None:
    """A draft with the target's weights is always right: 40 tokens at depth 3 take one prefill,
    nine rounds of 4, and one of 3 that the budget cut to depth 2."""
    where = setting(torch.float64, GREEDY)
    draft = ModelDraft(where.target.model, VOCAB)
    replay = Replay(where.target, draft, where.traces[:1], MAX_DEPTH)
    (rounds,) = replay.rounds(TreeConfig.chain(3))
    assert rounds.n_emitted.tolist() == [4] * 9 + [3]
    assert rounds.depths.tolist() == [3] * 9 + [2]
    assert rounds.n_nodes.tolist() == [3] * 9 + [2]


def test_acceptance_counts_the_rank_of_the_recorded_token() -> None:
    """At depth 1 every root with a successor is tried; ranks are the children's order."""
    where = setting(torch.float64, GREEDY)
    trace, draft = where.traces[0], where.drafts["model"]
    replay = Replay(where.target, draft, [trace], 2)
    replay.rounds(TreeConfig(depth=2, width=2, top_k=3, nodes=2))
    tried, by_rank = replay.acceptance()
    first = len(trace.prompt)
    roots = list(range(first, len(trace.tokens) - 1))
    tree = TreeConfig(depth=2, width=2, top_k=3, nodes=2)
    n_first, ranks, second_tried = 0, [0, 0, 0], 0
    for root, pool in zip(roots, draft.pools(trace.tokens, None, roots, tree), strict=True):
        n_first += 1
        children = pool.tokens[:3]
        following = trace.tokens[root + 1]
        if following in children:
            ranks[children.index(following)] += 1
            expanded = children.index(following) in pool.parents[3:]
            second_tried += expanded and root + 2 < len(trace.tokens)
    assert tried == [n_first, second_tried]
    assert by_rank[0] == ranks
