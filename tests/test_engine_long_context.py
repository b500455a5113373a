"""Long texts: prompts in several passes, memory that grows with their length, a draft's reach."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.beam import BeamDraft
from engine.decode import Request, Round, decode
from engine.eagle3_draft import Eagle3Draft
from engine.guard import Guard
from engine.lean import LeanForward
from engine.model_draft import ModelDraft
from engine.sampling import Sampler
from engine.stopping import StopRules
from engine.target import Target
from engine.trace import Trace, text_features
from profiles import PLAIN, CostModelSummary, GuardSettings, Sampling, TreeConfig
from profiles.prices import Prices
from tiny import CONFIGS, VOCAB, tiny_head, tiny_model, twin_with_noise

POSITIONS = 1024
TREE = TreeConfig(depth=3, width=2, top_k=3, nodes=8)
N_NEW = 24


def model_of(kind: str, **changes: Any) -> Any:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
    return tiny_model(kind, 0, **sizes | changes)


def text(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(n)]


def chunked(target: Target, size: int) -> Target:
    target.chunk = size
    return target


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("size", [1, 7, 64, 299])
def test_a_prompt_in_several_passes_gives_the_same(kind: str, size: int) -> None:
    """Logits, features and the cache of a prompt of 300 tokens, past the sliding window too."""
    ids, model = text(300), model_of(kind)
    results = []
    for each in (300, size):
        target = chunked(Target(model), each)
        cache = target.new_cache(8)
        results.append((*target.forward(ids, cache, last_only=True, feature_layers=(1, 0)), cache))
    (logits, features, cache), (few, few_features, few_cache) = results
    assert features is not None and few_features is not None
    assert_close(few, logits)
    assert_close(few_features, features)
    assert few_cache.length == cache.length == 300
    for layer, expected in zip(few_cache.layers, cache.layers, strict=True):
        assert_close(layer.keys[:, :, :300], expected.keys[:, :, :300])


def decoded(
    target: Target, draft: Any, prompt: list[int], sampling: Sampling
) -> tuple[list[int], list[Round]]:
    request = Request(target, draft, prompt, Sampler(sampling, 3), StopRules(N_NEW))
    rounds: list[Round] = []
    for _ in decode(request, lambda _: TREE, lambda done, _: rounds.append(done)):
        pass
    return request.generated, rounds


def drafts_of(model: Any, kind: str) -> Iterator[Eagle3Draft | ModelDraft]:
    known = [text(320, seed) for seed in range(3)]
    for changes in ({}, {"sliding_window": 20}):
        draft = Eagle3Draft(tiny_head(model, texts=known, draft_vocab=64, **changes))
        draft.chunk = 50
        yield draft
    small = ModelDraft(twin_with_noise(model, 0.1), VOCAB)
    small._decoder.chunk = 50
    yield small


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.8)])
@pytest.mark.parametrize("kind", ["llama", "mistral", "neox"])
def test_speculation_behind_long_prompts_is_lossless(kind: str, sampling: Sampling) -> None:
    """Text after prompts of some hundred tokens, read in passes of 64, is plain decoding's."""
    model = model_of(kind)
    target, whole = chunked(Target(model), 64), Target(model)
    prompt = text(150) * 2
    expected, _ = decoded(whole, None, prompt, sampling)
    for draft in drafts_of(model, kind):
        found, rounds = decoded(target, draft, prompt, sampling)
        assert found == expected
        assert any(not done.tree.is_plain for done in rounds)


def test_a_draft_in_several_passes_proposes_the_same_trees() -> None:
    """Head, windowed head and small model, by replay: pools at every root of a long text."""
    model = model_of("llama")
    tokens, roots = text(260), list(range(250, 259))
    features = text_features(Target(model), tokens, (0, 1, 1))
    for few, draft in zip(drafts_of(model, "llama"), drafts_of(model, "llama"), strict=True):
        for part in (draft, getattr(draft, "_decoder", draft)):
            part.chunk = 10_000
        given = features if draft.feature_layers else None
        expected = draft.pools(tokens, given, roots, TREE)
        for found, pool in zip(few.pools(tokens, given, roots, TREE), expected, strict=True):
            assert (found.tokens, found.parents) == (pool.tokens, pool.parents)
            assert found.scores == pytest.approx(pool.scores, abs=1e-5)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements any tensor had that was made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made._base is None:
                self.largest = max(self.largest, made.numel())
        return result


def largest_of_prefill(n: int) -> int:
    """Return the elements of the largest tensor that target and head make for n tokens."""
    model = model_of("mistral", hidden_size=8, intermediate_size=8, head_dim=2, vocab_size=32)
    target = chunked(Target(model), 16)
    assert isinstance(target._lean, LeanForward)
    head = Eagle3Draft(tiny_head(model, draft_vocab=8, head_dim=2, intermediate_size=8))
    head.chunk = 16
    ids = [token % 32 for token in text(n)]
    with LargestTensor() as seen, torch.inference_mode():
        cache = target.new_cache(n)
        _, features = target.forward(ids, cache, last_only=True, feature_layers=(0, 1, 1))
        head.extend(ids, features, head.new_cache(n), last_only=True)
    return seen.largest


def test_memory_grows_with_the_prompt_and_not_its_square() -> None:
    """Twice the prompt makes the largest tensor twice as large: no mask of all tokens by all."""
    short, long = largest_of_prefill(256), largest_of_prefill(512)
    assert short < long <= 2.1 * short
    assert long < 512 * 512


def head_for(model: Any, **changes: Any) -> Eagle3Draft:
    return Eagle3Draft(tiny_head(model, texts=[text(60)], draft_vocab=64, **changes))


@pytest.mark.parametrize("n_prompt", [30, 39, 40, 41, 60])
def test_beyond_the_length_a_head_was_trained_for_rounds_are_plain(n_prompt: int) -> None:
    """With 40 positions no round drafts past them, the text is the same, and what the head would
    have read is not kept."""
    model = model_of("llama")
    target, prompt = Target(model), text(n_prompt)
    expected, _ = decoded(target, None, prompt, Sampling(temperature=0.0))
    draft = head_for(model, max_positions=40)
    request = Request(target, draft, prompt, Sampler(), StopRules(N_NEW))
    rounds: list[Round] = []
    for _ in decode(request, lambda _: TREE, lambda done, _: rounds.append(done)):
        pass
    assert request.generated == expected
    # A round behind c cached tokens reads c + 1 and proposes up to `depth` more.
    drafted = [done for done in rounds if not done.tree.is_plain]
    assert all(done.context + 1 + done.tree.depth <= 40 for done in drafted)
    assert any(drafted) == (n_prompt < 36)
    assert rounds[-1].tree == PLAIN
    assert request._features == [] and request.feature_layers == ()


def test_a_sliding_window_has_no_such_limit() -> None:
    """A windowed head and a windowed small model draft on: no distance in there is new to them."""
    model = model_of("llama")
    draft = head_for(model, max_positions=40, sliding_window=8)
    assert draft.max_positions is None
    small = tiny_model("mistral", 3, num_hidden_layers=1, max_position_embeddings=40)
    assert ModelDraft(small, VOCAB).max_positions is None
    full = tiny_model("llama", 3, num_hidden_layers=1, max_position_embeddings=40)
    assert ModelDraft(full, VOCAB).max_positions == 40
    _, rounds = decoded(Target(model), draft, text(60), Sampling(temperature=0.0))
    assert all(not done.tree.is_plain for done in rounds[: -TREE.depth])


def test_replay_and_serving_agree_on_the_heads_reach() -> None:
    """`pools` is asked only for roots within the reach."""
    from engine.replay import grow_pools

    model = model_of("llama")
    draft: BeamDraft = head_for(model, max_positions=40)
    ids = text(50)
    (pools,) = grow_pools(Target(model), draft, [Trace("a", ids[:30], ids[30:])], TREE)
    grown = [bool(pool.tokens) for pool in pools]
    assert grown == [30 + i + 1 + TREE.depth <= 40 for i in range(len(pools))]


def test_the_guard_is_plain_beyond_the_context_where_rounds_lose() -> None:
    """However well speculation did before."""
    prices = Prices(CostModelSummary(reference_ms=1.0, tables=[]))
    guard = Guard(TREE, prices, GuardSettings(max_context=100))
    own = guard.request()._own
    for context in range(5):
        guard.settle(own, Round(PLAIN, 0, 0, context, 1), 0.001)
    ask = {"n_behind": 2, "budget_left": 50, "is_new": False}
    assert guard.speculates(own, context=100, **ask)
    assert not guard.speculates(own, context=101, **ask)
    assert guard.speculates(own, context=99, **ask)
