"""Rounds: partial acceptance, branches, degenerate trees, forced text and what is counted."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from engine.decode import DecodeStats, Request, decode
from engine.draft import Draft
from engine.eagle3_draft import Eagle3Draft
from engine.lookup import LookupDraft
from engine.model_draft import ModelDraft
from engine.sampling import Sampler
from engine.stopping import StopRules
from engine.target import Target
from engine.tree import DraftTree
from profiles import PLAIN, Sampling, TreeConfig, validated
from profiles.errors import SpectuneError, UsageError
from tiny import CONFIGS, VOCAB, tiny_head, tiny_model, twin_with_noise
from toy_drafts import Script, ScriptedDraft

MODEL = tiny_model("llama", 0, num_hidden_layers=2)
TARGET = Target(MODEL)
PROMPT = [5, 17, 90, 5, 17]
TREE = TreeConfig(depth=3, width=2, top_k=3, nodes=9)


def run(
    draft: Draft | None,
    tree: TreeConfig,
    n_new: int = 40,
    *,
    target: Target = TARGET,
    sampler: Sampler | None = None,
    forced: list[int] | None = None,
    eos_ids: Sequence[int] = (),
) -> Request:
    request = Request(
        target, draft, PROMPT, sampler or Sampler(), StopRules(n_new, eos_ids), forced=forced
    )
    for _ in decode(request, lambda _: tree):
        pass
    return request


def plain_ids(target: Target, n_new: int = 40) -> list[int]:
    return run(None, PLAIN, n_new, target=target).generated


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def agreeing(text: list[int], n_right: int) -> Script:
    """Propose a chain that is right for exactly `n_right` tokens."""

    def script(tokens: list[int], tree: TreeConfig) -> DraftTree:
        ahead = text[len(tokens) :][: tree.depth]
        chain = ahead[:n_right] + [wrong(token) for token in ahead[n_right:]]
        return DraftTree(chain, list(range(len(chain))))

    return script


def second_branch(text: list[int], n_branches: int) -> Script:
    """Propose at every level wrong tokens first and the right one last, all of them expanded."""

    def script(tokens: list[int], tree: TreeConfig) -> DraftTree:
        ahead = text[len(tokens) :][: tree.depth]
        words: list[int] = []
        parents: list[int] = []
        level = [0]
        for token in ahead:
            below = []
            for parent in level[-2:]:  # a wrong node and the right one
                for branch in range(n_branches):
                    is_last = branch == n_branches - 1
                    words.append(token if is_last else (token + 1 + branch) % VOCAB)
                    parents.append(parent)
                    below.append(len(words))
            level = below
        return DraftTree(words, parents)

    return script


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("n_right", range(6))
def test_b04_partial_acceptance_keeps_the_text_and_the_count(kind: str, n_right: int) -> None:
    """A chain of five that is right for exactly j tokens: plain's ids, and j + 1 a round."""
    target = Target(tiny_model(kind, 1, num_hidden_layers=2))
    n_new = 200 if kind == "llama" else 37
    text = PROMPT + plain_ids(target, n_new)
    request = run(
        ScriptedDraft(agreeing(text, n_right)), TreeConfig.chain(5), n_new, target=target
    )
    assert request.tokens == text
    n_rounds = -(-(n_new - 1) // (n_right + 1))
    assert request.stats.n_rounds == n_rounds
    assert request.cache.length == len(text) - 1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("depth", "n_branches"), list(product(range(1, 6), (2, 3, 4))))
def test_b06_the_right_branch_may_be_the_last_one(
    attention: str, depth: int, n_branches: int
) -> None:
    """The accepted path is never the first branch: ids are plain's, rounds as by hand."""
    model = tiny_model("llama", 0, num_hidden_layers=2, attn_implementation=attention)
    target = Target(model)
    text = PROMPT + plain_ids(target)
    draft = ScriptedDraft(second_branch(text, n_branches))
    request = run(draft, TreeConfig.chain(depth), target=target)
    assert request.tokens == text
    assert request.stats.n_rounds == -(-39 // (depth + 1))


def neural_drafts() -> dict[str, Draft]:
    return {
        "head": Eagle3Draft(tiny_head(MODEL, texts=[PROMPT + plain_ids(TARGET)])),
        "noisy": ModelDraft(twin_with_noise(MODEL, 0.2), VOCAB),
        "lookup": LookupDraft(1, 3),
    }


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_b07_degenerate_trees_decode_or_are_refused(depth: int) -> None:
    """Depth 1, one node, more children than the vocabulary holds: plain's ids; more nodes than
    candidates or fewer than levels: one sentence that names the setting."""
    plain = plain_ids(TARGET, 20)
    n_legal = 0
    for top_k, nodes in product((1, 2, 33, 129), (1, 2, 10, 10_000)):
        values = {"depth": depth, "width": 2, "top_k": top_k, "nodes": nodes}
        try:
            tree = TreeConfig(**values)
        except ValueError as error:
            assert "nodes" in str(error)
            continue
        n_legal += 1
        for draft in neural_drafts().values():
            request = run(draft, tree, 20)
            assert request.generated == plain
    assert n_legal


@pytest.mark.parametrize("name", ["head", "noisy", "lookup"])
def test_forced_text_emits_its_own_ids_for_any_tree(name: str) -> None:
    """Whatever is forced comes out, EOS ids in it included, and its end is the end; rounds are
    those of decoding, since the walk follows the forced text."""
    plain = plain_ids(TARGET, 24)
    other = [(7 * i) % VOCAB for i in range(24)]
    draft = neural_drafts()[name]
    for forced, tree in product((plain, other, other[:1], other[:2]), (PLAIN, TREE)):
        request = run(draft, tree, 3, forced=forced, eos_ids=forced[:2])
        assert request.generated == forced
        assert request.stop_reason == "length"
    free, forced_run = run(draft, TREE, 24), run(draft, TREE, 24, forced=plain)
    assert free.stats.n_rounds == forced_run.stats.n_rounds
    assert free.stats.accepted_by_depth == forced_run.stats.accepted_by_depth


def test_forced_text_runs_the_processors_as_decoding_does() -> None:
    """The draw is computed for every forced token, with the forced prefix."""
    seen: list[list[int]] = []

    def look(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    forced = [9, 8, 7, 6]
    sampler = Sampler(Sampling(temperature=1.0), 0, [look])
    run(ModelDraft(MODEL, VOCAB), TREE, 4, sampler=sampler, forced=forced)
    assert seen == [PROMPT + forced[:i] for i in range(4)]


def test_b24_counts_are_those_computed_by_hand() -> None:
    """A perfect chain of 3 and 22 tokens: a prefill, five rounds of 4 and a plain one of 1."""
    request = run(ModelDraft(MODEL, VOCAB), TreeConfig.chain(3), 22)
    stats = request.stats
    assert (stats.n_rounds, stats.n_round_tokens, stats.n_drafted) == (6, 21, 15)
    assert stats.accepted_by_depth == [5, 5, 5]
    assert stats.total_s >= stats.prefill_s > 0
    assert set(stats.seconds) == set() or all(s >= 0 for s in stats.seconds.values())


def test_b24_rounds_without_drafts_count_as_plain() -> None:
    """A lookup that finds nothing and depth 0 give one token a round and nothing drafted."""
    target = Target(tiny_model("neox", 0, num_hidden_layers=1))
    for draft, tree in ((LookupDraft(9, 9), TREE), (LookupDraft(), PLAIN), (None, PLAIN)):
        stats = run(draft, tree, 10, target=target).stats
        assert (stats.n_rounds, stats.n_round_tokens, stats.n_drafted) == (9, 9, 0)
        assert stats.accepted_by_depth == []


def test_accepted_by_depth_counts_rounds_that_came_so_far() -> None:
    """Rounds of 1, 3 and 2 tokens accepted 0, 2 and 1 draft tokens."""
    stats = DecodeStats()
    for n_drafted, n_emitted in ((4, 1), (4, 3), (2, 2)):
        stats.count(n_drafted, n_emitted)
    assert stats.accepted_by_depth == [2, 1]
    assert (stats.n_rounds, stats.n_round_tokens, stats.n_drafted) == (3, 6, 10)


@pytest.mark.parametrize("name", ["head", "noisy", "lookup"])
def test_the_tree_may_change_from_round_to_round(name: str) -> None:
    """Plain rounds in between, then trees again: the draft catches up and the text stays."""
    plain = plain_ids(TARGET, 40)
    request = Request(TARGET, neural_drafts()[name], PROMPT, Sampler(), StopRules(40))
    trees = [PLAIN, TREE, PLAIN, PLAIN, TreeConfig.chain(2), TREE, PLAIN]
    for _ in decode(request, lambda r: trees[r.stats.n_rounds % len(trees)]):
        pass
    assert request.generated == plain
    assert request.stats.n_drafted > 0


def test_plain_requests_make_no_draft_forward() -> None:
    """Depth 0 is truly off: the draft is never asked for a tree."""

    def refuse(tokens: list[int], tree: TreeConfig) -> DraftTree:
        raise AssertionError("asked for a tree in a plain round")

    assert run(ScriptedDraft(refuse), PLAIN, 10).generated == plain_ids(TARGET, 10)


def test_b07_text_and_fractions_are_refused_by_name() -> None:
    """From a profile or a caller alike, each setting must be a whole number of at least 0."""
    good = {"depth": 2, "width": 2, "top_k": 2, "nodes": 4}
    for name, bad in product(good, (-1, 1.5, "2", None)):
        with pytest.raises(SpectuneError, match=name):
            validated(TreeConfig, good | {name: bad}, "tree")


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 500])
def test_prompt_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    """One sentence with the range of ids, no index error of the embedding."""
    with pytest.raises(UsageError, match=f"from 0 to {VOCAB - 1}"):
        Request(TARGET, None, [5, token], Sampler(), StopRules(3))


def test_a_draft_with_a_shorter_context_falls_back_to_plain() -> None:
    """A draft with learned positions cannot look beyond them: from there on rounds are plain."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=1
    )
    config.eos_token_id = None
    draft = ModelDraft(GPT2LMHeadModel(config).double().eval(), VOCAB)
    request = run(draft, TREE, 40)
    assert request.generated == plain_ids(TARGET, 40)
    assert request.stats.n_drafted > 0
