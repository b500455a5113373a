"""Several requests at a time: each says what it says alone, in any row, beside any neighbours."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.batch import BatchRound, decode_many
from engine.batch_cache import BatchCache, visible_rows
from engine.cache import KVCache
from engine.decode import Request
from engine.decoder import SpeculativeDecoder
from engine.draft import Draft
from engine.eagle3_draft import Eagle3Draft
from engine.hybrid import HybridDraft
from engine.lookup import LookupDraft
from engine.model_draft import ModelDraft
from engine.pair import LoadedTarget
from engine.suffix import SuffixDraft
from engine.target import Target
from engine.tree import DraftTree
from lossless_cases import CountingProcessor, Verdict, judge_crowd
from profiles import GREEDY, PLAIN, Sampling, TargetRef, TreeConfig
from profiles.errors import UsageError
from tiny import VOCAB, tiny_head, tiny_model, tiny_tokenizer, twin_with_noise

N_CROWDS = 40
MODEL = tiny_model("llama", 0, num_hidden_layers=2)
TREE = TreeConfig(depth=3, width=2, top_k=2, nodes=6)
SAMPLED = Sampling(temperature=0.8)
PROMPTS: list[list[int]] = [
    [5, 9, 77],
    list(range(3, 43)),
    [8],
    [20, 21, 22, 23] * 3,
    [9, 9, 30, 31, 9, 9],
    list(range(60, 3, -3)),
    [100, 4],
]


def decoder(
    draft: Draft | None = None,
    tree: TreeConfig = PLAIN,
    sampling: Sampling = GREEDY,
    eos_ids: tuple[int, ...] = (),
    **options: Any,
) -> SpeculativeDecoder:
    ref = TargetRef(id="tiny", sha256="a" * 64, dtype="float64")
    loaded = LoadedTarget(Target(MODEL), tiny_tokenizer(), ref, eos_ids)
    return SpeculativeDecoder(loaded, draft, tree, sampling, **options)


def twin() -> Draft:
    return ModelDraft(twin_with_noise(MODEL, 0.1), VOCAB)


def head() -> Draft:
    texts = [decoder().generate(p, max_new_tokens=40).token_ids for p in PROMPTS[:3]]
    return Eagle3Draft(
        tiny_head(MODEL, texts=[p + t for p, t in zip(PROMPTS, texts, strict=False)])
    )


DRAFTERS = {
    "plain": lambda: None,
    "lookup": LookupDraft,
    "suffix": lambda: SuffixDraft(1, 8, 0.02, history=60),
    "model": twin,
    "eagle3": head,
    "hybrid": lambda: HybridDraft(twin(), SuffixDraft(), match_nodes=6, match_tau=1.5),
}


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    """Decode random crowds of requests, once for all tests here."""
    rng, verdict = random.Random(1), Verdict()
    for _ in range(N_CROWDS):
        judge_crowd(rng, verdict)
    return verdict


def test_no_neighbour_changes_the_text(verdict: Verdict) -> None:
    """Every architecture, draft, sampling, processor and stopping rule of the single runs."""
    assert not verdict.differences
    assert verdict.near_ties <= 2
    assert verdict.n_cases > 3 * N_CROWDS
    assert sum(verdict.n_accepted.values()) > 2 * N_CROWDS


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "T0.8"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_generate_many_gives_what_generate_gives(name: str, sampling: Sampling) -> None:
    """In input order, for every draft and batch size; places in the list fix the noise."""
    draft = DRAFTERS[name]()
    tree = PLAIN if draft is None else TREE
    alone = decoder(sampling=sampling)
    expected = [
        alone.generate(prompt, max_new_tokens=30, seed=3, index=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    for size in (1, 2, 3, 8):
        many = decoder(draft, tree, sampling)
        found = many.generate_many(PROMPTS, batch_size=size, max_new_tokens=30, seed=3)
        assert [g.token_ids for g in found] == [g.token_ids for g in expected]
        assert [g.text for g in found] == [g.text for g in expected]
        assert {g.finish_reason for g in found} == {"length"}
        n_rounds = sum(g.stats.n_rounds for g in found)
        assert (n_rounds < 29 * len(PROMPTS)) == (draft is not None)


def test_order_and_row_do_not_matter() -> None:
    """Turned round, every prompt keeps the answer of its place in the first list."""
    n = len(PROMPTS)
    first = decoder(twin(), TREE, SAMPLED).generate_many(PROMPTS, batch_size=3, max_new_tokens=24)
    turned = decoder(twin(), TREE, SAMPLED).generate_many(
        PROMPTS[::-1], batch_size=2, max_new_tokens=24, each=lambda i: {"index": n - 1 - i}
    )
    assert [g.token_ids for g in turned[::-1]] == [g.token_ids for g in first]
    assert len({tuple(g.token_ids) for g in first}) == n


def test_rows_end_for_their_own_reasons() -> None:
    """Budgets, end tokens, stop strings and stateful processors are every row's own."""
    free = decoder(sampling=SAMPLED).generate_many(PROMPTS, batch_size=4, max_new_tokens=40)
    eos = free[1].token_ids[7]
    text = free[3].text
    stop = next(c for c in text[4:] if c.isascii() and c.isprintable())

    def each(i: int) -> dict[str, Any]:
        own: dict[str, Any] = {"max_new_tokens": (1, 40, 2, 40, 17, 40, 33)[i]}
        if i == 3:
            own["stop"] = stop
        if i == 5:
            own["logits_processors"] = [CountingProcessor()]
        return own

    ways = {"plain": (None, PLAIN), "twin": (twin(), TREE)}
    for draft, tree in ways.values():
        many = decoder(draft, tree, SAMPLED, (eos,)).generate_many(
            PROMPTS, batch_size=3, each=each
        )
        for i, found in enumerate(many):
            single = decoder(sampling=SAMPLED, eos_ids=(eos,))
            expected = single.generate(PROMPTS[i], **{"index": i} | each(i))
            assert found.token_ids == expected.token_ids
            assert found.finish_reason == expected.finish_reason
        assert {g.finish_reason for g in many} == {"length", "eos", "stop"}


def test_a_free_row_is_filled_and_the_cache_grows() -> None:
    """Two rows stay in flight until the queue is empty; texts outgrow what was allocated."""
    seen: list[BatchRound] = []
    budgets = [150, 9, 4, 100, 30]
    single = decoder()
    requests = [
        single.request(p, max_new_tokens=n) for p, n in zip(PROMPTS, budgets, strict=False)
    ]
    single.run_many(requests, 2, lambda done, seconds: seen.append(done))
    assert [len(r.generated) for r in requests] == budgets
    for request, prompt in zip(requests, PROMPTS, strict=False):
        alone = single.generate(prompt, max_new_tokens=request.n_new)
        assert request.generated == alone.token_ids
    rows = [done.n_rows for done in seen]
    n_tail = rows.index(1)
    assert set(rows[:n_tail]) == {2}
    assert set(rows[n_tail:]) == {1}
    assert sum(done.n_emitted for done in seen) == sum(budgets) - len(budgets)
    assert all(not hasattr(request, "cache") for request in requests)


def test_the_tree_follows_the_rows_in_flight() -> None:
    """A schedule is asked before every round."""
    seen: list[BatchRound] = []
    scheduled = decoder(twin(), TREE, tree_of_batch=lambda n: PLAIN if n > 2 else TREE)
    requests = [scheduled.request(p, max_new_tokens=8 + 6 * i) for i, p in enumerate(PROMPTS[:3])]
    scheduled.run_many(requests, 3, lambda done, seconds: seen.append(done))
    assert {done.n_rows for done in seen} == {1, 2, 3}
    for done in seen:
        assert (done.tree == TREE) == (done.n_rows <= 2)
        assert (done.n_nodes == 0) or done.n_rows <= 2


def test_answers_are_remembered_when_all_are_there() -> None:
    """No answer changes what the drafts of its neighbours look back at."""
    many = decoder(SuffixDraft(2, 8, 0.02, history=200), TREE)
    before = many.generate_many(PROMPTS[:2], batch_size=2, max_new_tokens=30)
    again = many.generate_many(PROMPTS[:2], batch_size=2, max_new_tokens=30)
    assert [g.token_ids for g in before] == [g.token_ids for g in again]
    assert sum(g.stats.n_rounds for g in again) < sum(g.stats.n_rounds for g in before) / 2


def test_what_cannot_be_decoded_is_refused_before_anything_is() -> None:
    with pytest.raises(UsageError, match="batch_size must be at least 1, but is 0"):
        decoder().generate_many(PROMPTS, batch_size=0)
    with pytest.raises(UsageError, match="empty"):
        decoder().generate_many([[5], []], batch_size=2, max_new_tokens=4)
    assert decoder().generate_many([]) == []


@pytest.mark.parametrize("kind", ["llama", "gemma2", "neox"])
def test_features_of_a_row_are_those_it_has_alone(kind: str) -> None:
    """In the lean forward and in transformers' own, beside a row of another length."""
    target = Target(tiny_model(kind, 2, attn_implementation="eager"))
    layers, prompts = (0, 2), [[5, 9, 77, 3], [20] * 11]
    tree = DraftTree([7, 8, 9], [0, 0, 1])
    cache = target.new_batch_cache(2)
    expected = []
    for prompt in prompts:
        single = target.new_cache(32)
        target.forward(prompt, single)
        cache.join(single)
        expected.append(
            target.forward(
                [6, *tree.tokens],
                single,
                positions=len(prompt) + torch.tensor(tree.depths),
                mask=tree.mask(),
                feature_layers=layers,
            )
        )
    trees = [tree, DraftTree([7, 8], [0, 0])]
    logits, features = target.forward_rows(
        torch.tensor([token for t in trees for token in (6, *t.tokens)]),
        torch.tensor([n + d for n, t in zip((4, 11), trees, strict=True) for d in t.depths]),
        [t.mask() for t in trees],
        cache,
        feature_layers=layers,
    )
    assert features is not None
    for found, index in ((logits, 0), (features, 1)):
        wanted = torch.cat([expected[0][index], expected[1][index][:3]])  # type: ignore[list-item]
        torch.testing.assert_close(found, wanted)


def filled(length: int, start: int) -> KVCache:
    """Return a cache of two layers whose keys and values number the tokens from `start`."""
    cache = KVCache(2, 4)
    cache.note_positions(torch.arange(length))
    states = torch.arange(start, start + length).double()[None, None, :, None]
    for layer in range(2):
        cache.update(states, -states, layer)
    return cache


def rows_of(cache: BatchCache) -> Iterator[list[float]]:
    for row, length in enumerate(cache.lengths):
        keys = cache.layers[1].keys[row, 0, :length, 0]
        assert torch.equal(cache.layers[0].values[row, 0, :length, 0], -keys)
        yield keys.tolist()


def test_rows_keep_their_paths_and_take_over_the_place_of_one_that_leaves() -> None:
    cache = BatchCache(2, 3, torch.device("cpu"))
    for length, start in ((2, 10), (4, 20), (1, 30)):
        cache.join(filled(length, start))
    cache.begin([3, 1, 2], torch.zeros(6, dtype=torch.int64))
    new = torch.tensor([[1.0, 2, 3], [4, 0, 0], [5, 6, 0]]).double()[:, None, :, None]
    for layer in cache.layers:
        layer.update(new, -new)
    cache.keep_paths([[0, 2], [0], [0, 1]])
    assert list(rows_of(cache)) == [[10, 11, 1, 3], [20, 21, 22, 23, 4], [30, 5, 6]]
    cache.drop(0)
    assert list(rows_of(cache)) == [[30, 5, 6], [20, 21, 22, 23, 4]]
    cache.join(filled(100, 200))  # longer than what was allocated
    assert list(rows_of(cache))[:2] == [[30, 5, 6], [20, 21, 22, 23, 4]]
    assert cache.lengths == [3, 5, 100]


def test_masks_are_a_row_of_their_own() -> None:
    """What is behind a row's end and what pads it is seen by none of its tokens."""
    chain = torch.ones(2, 2, dtype=torch.bool).tril()
    visible = visible_rows([3, 1], [chain, torch.ones(1, 1, dtype=torch.bool)], 5)
    assert visible.int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    ]


def test_requests_are_read_when_a_row_is_free() -> None:
    """A long queue is not begun, nor its prompts run, before there is room."""
    single = decoder()
    begun: list[int] = []

    def queue() -> Iterator[Request]:
        for i, prompt in enumerate(PROMPTS):
            begun.append(i)
            yield single.request(prompt, max_new_tokens=6)

    done = decode_many(single.loaded.target, queue(), 2, lambda n: PLAIN)
    next(done)
    assert begun == [0, 1]
    assert len(list(done)) == len(PROMPTS) - 1


class CountingDraft(ModelDraft):
    """A small model that counts its passes over one text and over all rows."""

    n_single = n_shared = 0

    def extend(self, *arguments: Any, **options: Any) -> Any:
        self.n_single += 1
        return super().extend(*arguments, **options)

    def pass_rows(self, *arguments: Any) -> Any:
        self.n_shared += 1
        return super().pass_rows(*arguments)


def test_rows_share_the_passes_of_a_neural_draft() -> None:
    """A text by itself pays its first pass alone; then each level is one pass for all rows."""
    draft = CountingDraft(twin_with_noise(MODEL, 0.1), VOCAB)
    seen: list[BatchRound] = []
    many = decoder(draft, TREE)
    requests = [many.request(prompt, max_new_tokens=30) for prompt in PROMPTS[:4]]
    many.run_many(requests, 4, lambda done, seconds: seen.append(done))
    assert draft.n_single == 4
    assert len(seen) < draft.n_shared <= TREE.depth * len(seen)


def test_a_draft_that_is_behind_is_left_behind_where_too_little_is_left_to_say() -> None:
    """Two rows are plain by the schedule; when one is left, catching up must still pay."""
    for min_left, drafts in ((0, True), (1, True), (40, False)):
        draft = CountingDraft(twin_with_noise(MODEL, 0.1), VOCAB)
        single = decoder(draft, TREE)
        requests = [
            single.request(p, max_new_tokens=n) for p, n in zip(PROMPTS, (20, 40), strict=False)
        ]
        done = decode_many(
            single.loaded.target,
            requests,
            2,
            lambda n_rows: TREE if n_rows == 1 else PLAIN,
            min_left=min_left,
        )
        assert len(list(done)) == 2
        assert draft.n_single == int(drafts)
        assert (draft.n_shared > 0) == drafts
