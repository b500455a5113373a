"""Random requests and ways to decode them, for the claim that no way changes the text.

A request is a tiny random target with a prompt, sampling, processors and stopping rules; a way
is a draft, a tree, and how it is served. Shared by `test_engine_lossless.py` and
`benchmarks/lossless.py`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from engine.adaptive import Shaper
from engine.batch import decode_many
from engine.decode import Observer, Policy, Request, decode
from engine.draft import Draft
from engine.eagle3_draft import Eagle3Draft
from engine.guard import Guard
from engine.hybrid import HybridDraft
from engine.lookup import LookupDraft
from engine.model_draft import ModelDraft
from engine.sampling import LogitsProcessor, Sampler, gumbel_noise
from engine.stopping import StopRules
from engine.suffix import SuffixDraft
from engine.target import Target
from profiles import (
    PLAIN,
    Calibration,
    CostModelSummary,
    CostTable,
    PathTable,
    Sampling,
    TreeConfig,
)
from profiles.prices import Prices
from tiny import CONFIGS, VOCAB, tiny_head, tiny_model, tiny_tokenizer, twin_with_noise

NEAR_TIE = 1e-5
"""A lead below this share of the logits' spread does not decide which token is right."""

WAYS_PER_REQUEST = 6

TEMPERATURES = (0.0, 0.0, 0.0, 0.5, 1.3)

TOKENIZER = tiny_tokenizer()

Processors = Callable[[], list[LogitsProcessor]]


class CountingProcessor:
    """A stateful processor: at every third call it forbids the likeliest token.

    Called for a node that is not part of the text, or twice for one token, it changes the text.
    """

    def __init__(self) -> None:
        self.n_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.n_calls += 1
        if self.n_calls % 3 == 0:
            scores = scores.scatter(1, scores.argmax(dim=1, keepdim=True), float("-inf"))
        return scores


@dataclass
class Tap:
    """A processor that changes nothing and keeps what passes through it."""

    scores: list[Tensor] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores.append(scores[0].double())
        return scores


@dataclass(frozen=True)
class Wanted:
    """A request before it is made, so that it can be decoded in many ways.

    Attributes:
        kind: Architecture of the target, with its sizes.
        model: The target's model.
        target: The target.
        processors: Makes the logits processors anew, since they may hold state.
    """

    kind: str
    model: PreTrainedModel
    target: Target
    prompt: list[int]
    sampling: Sampling
    seed: int
    max_new_tokens: int
    processors: Processors = list
    eos_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def request(
        self, draft: Draft | None = None, tap: Tap | None = None, shaper: Shaper | None = None
    ) -> Request:
        """Make the request."""
        processors = self.processors() + ([tap] if tap else [])
        return Request(
            self.target,
            draft,
            self.prompt,
            Sampler(self.sampling, self.seed, processors),
            StopRules(self.max_new_tokens, self.eos_ids, self.stop_strings, tokenizer=TOKENIZER),
            shaper=shaper,
        )


SERVINGS = ("fixed", "fixed", "fixed", "guarded", "erratic")


@dataclass(frozen=True)
class Way:
    """A draft and a tree to decode with, and how the tree is served.

    Attributes:
        serving: `fixed` every round, `guarded`, or left and taken up again at random.
        shaper: For adaptive drafting.
    """

    name: str
    draft: Draft
    tree: TreeConfig
    serving: str = "fixed"
    shaper: Shaper | None = None

    def policy(self, rng: random.Random) -> tuple[Policy, Observer | None]:
        """Return what chooses the trees, and what is told of the rounds."""
        if self.serving == "guarded":
            guard = Guard(self.tree, random_prices(rng)).request()
            return guard.tree, guard.settle
        if self.serving == "erratic":
            return lambda _: self.tree if rng.random() < 0.5 else PLAIN, None
        return lambda _: self.tree, None


def run(wanted: Wanted, way: Way | None = None, rng: random.Random | None = None) -> Request:
    """Decode a request to its end, plainly or in some way."""
    if way is None:
        request, policy, observe = wanted.request(), lambda _: PLAIN, None
    else:
        request = wanted.request(way.draft, shaper=way.shaper)
        policy, observe = way.policy(rng or random.Random(0))
    for _ in decode(request, policy, observe):
        pass
    return request


def random_prices(rng: random.Random) -> Prices:
    """Draw prices of rounds; what is true here does not matter to the text."""
    price, level = rng.uniform(1, 3), rng.uniform(0, 0.3)
    tables = [
        CostTable(name="verify", x=[0.0, 1.0, 64.0], relative=[1.0, price, price + 1]),
        CostTable(name="level", x=[1.0, 8.0], relative=[level, level]),
    ]
    reference_ms = 10 ** rng.uniform(-1, 1)
    return Prices(CostModelSummary(reference_ms=reference_ms, tables=tables))


def random_shaper(tree: TreeConfig, rng: random.Random) -> Shaper:
    """Draw a calibration: scores are worth anything, as long as better ones are worth more."""
    depths = []
    for _ in range(tree.depth):
        score = sorted(rng.uniform(-8, 0) for _ in range(4))
        probability = sorted(rng.random() for _ in range(4))
        depths.append(PathTable(score=score, probability=probability, hit=rng.random()))
    calibration = Calibration(limits=tree, tokens_per_pass=rng.uniform(0.3, 3), depths=depths)
    return Shaper(calibration, random_prices(rng), stops_early=rng.random() < 0.7)


def transformers_greedy(wanted: Wanted) -> list[int]:
    """Return what `transformers.generate` gives; stop strings are left to the caller."""
    ids = torch.tensor([wanted.prompt])
    output = wanted.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=wanted.max_new_tokens,
        eos_token_id=list(wanted.eos_ids) or None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList(wanted.processors()),
    )
    generated: list[int] = output[0, len(wanted.prompt) :].tolist()
    return generated


def cut_at_stop_string(ids: Sequence[int], stop_strings: Sequence[str]) -> list[int]:
    """Return the ids up to the one that completes a stop string, found by decoding each prefix."""
    for end in range(1, len(ids) + 1):
        if any(stop in text for stop in stop_strings for text in _texts(ids[:end])):
            return list(ids[:end])
    return list(ids)


def _texts(ids: Sequence[int]) -> list[str]:
    """Return the texts between ids that the tokenizer lacks: no stop string spans these."""
    runs = groupby(ids, key=lambda i: TOKENIZER.convert_ids_to_tokens(i) is not None)
    return [TOKENIZER.decode(list(run)) for is_known, run in runs if is_known]


def plain_lead(wanted: Wanted, index: int) -> float:
    """Return how clear plain decoding's choice of token `index` was, in logit spreads.

    The lead of the chosen token over the next one, or the distance to a filter's threshold if
    that is smaller.
    """
    tap = Tap()
    for _ in decode(wanted.request(tap=tap), lambda _: PLAIN):
        pass
    scores, sampling = tap.scores[index], wanted.sampling
    spread = float(scores[scores.isfinite()].std())
    ordered = scores.sort(descending=True).values
    if sampling.is_greedy:
        return float(ordered[0] - ordered[1]) / spread
    leads = []
    if sampling.top_k:
        leads.append(float(ordered[sampling.top_k - 1] - ordered[sampling.top_k]) / spread)
    if sampling.top_p < 1:
        mass = torch.softmax(ordered / sampling.temperature, 0).flip(0).cumsum(0)
        leads.append(float((mass - (1 - sampling.top_p)).abs().min()))
    noise = gumbel_noise(wanted.seed, index, torch.arange(len(scores)))
    first, second = (scores + sampling.temperature * noise).topk(2).values.tolist()
    return min([*leads, float(first - second) / spread])


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the first index at which two sequences differ."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


HEADS = ((4, 2, 16), (4, 1, 24), (3, 3, 10), (6, 2, 12), (5, 1, 8), (2, 2, 18))
"""Attention heads, key-value heads and head sizes; the usual one first."""


@lru_cache(maxsize=64)
def _model(kind: str, seed: int, **changes: Any) -> PreTrainedModel:
    if kind == "gemma2":
        changes |= {"attn_implementation": "eager"}
    return tiny_model(kind, seed, **changes)


def random_sizes(kind: str, rng: random.Random) -> dict[str, Any]:
    """Draw what a config may say: layers, heads of any size, tied or untied, windows."""
    n_heads, n_kv_heads, head_dim = rng.choice(HEADS)
    sizes: dict[str, Any] = {
        "num_hidden_layers": rng.choice((1, 2, 2, 3)),
        "num_attention_heads": n_heads,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if kind == "neox":  # has as many key-value heads as heads, which make up its width
        return sizes | {"hidden_size": n_heads * head_dim, "rotary_pct": rng.choice((0.5, 1.0))}
    sizes |= {"num_key_value_heads": n_kv_heads, "head_dim": head_dim}
    sizes["hidden_size"] = n_heads * rng.choice((10, 16))  # not always that of all heads
    if kind in ("mistral", "gemma2"):
        sizes["sliding_window"] = rng.choice((4, 8, 13))
    return sizes


def random_wanted(rng: random.Random, beside: Wanted | None = None) -> Wanted:
    """Draw a request; its stopping rules are taken from what it says without them.

    Args:
        rng: Draws.
        beside: A request whose target it shares.
    """
    kind = rng.choice(list(CONFIGS))
    sizes = random_sizes(kind, rng)
    attention = rng.choice(("sdpa", "eager"))
    model = _model(kind, rng.randrange(3), attn_implementation=attention, **sizes)
    name, target = f"{kind} {sizes}", Target(model)
    if beside is not None:
        name, model, target = beside.kind, beside.model, beside.target
    n_prompt = rng.choice((1, 2, 5, 12, 30))
    prompt = [rng.randrange(3, VOCAB) for _ in range(n_prompt)]
    if n_prompt > 4 and rng.random() < 0.5:  # something to look up
        prompt = prompt[: n_prompt // 2] * 2
    temperature = rng.choice(TEMPERATURES)
    sampling = Sampling(
        temperature=temperature,
        top_k=rng.choice((0, 5, 40)) if temperature else 0,
        top_p=rng.choice((1.0, 0.9, 0.6)) if temperature else 1.0,
    )
    free = Wanted(
        kind=name,
        model=model,
        target=target,
        prompt=prompt,
        sampling=sampling,
        seed=rng.randrange(-(2**63), 2**63),
        max_new_tokens=rng.choice((1, 2, 3, 8, 16, 24, 24, 32)),
    )
    free = replace(free, processors=_random_processors(rng, len(prompt)))
    return _with_stopping_rules(free, rng)


def _random_processors(rng: random.Random, n_prompt: int) -> Processors:
    n_least, eos = rng.randrange(12), [rng.randrange(VOCAB)]
    choices: list[Processors] = [
        list,
        list,
        lambda: [RepetitionPenaltyLogitsProcessor(1.3)],
        lambda: [NoRepeatNGramLogitsProcessor(2)],
        lambda: [MinNewTokensLengthLogitsProcessor(n_prompt, n_least, eos)],
        lambda: [CountingProcessor()],
        lambda: [CountingProcessor(), RepetitionPenaltyLogitsProcessor(0.9)],
    ]
    return rng.choice(choices)


def _with_stopping_rules(free: Wanted, rng: random.Random) -> Wanted:
    rule = rng.choice(("budget", "eos", "two eos", "stop string"))
    if rule == "budget":
        return free
    ids = run(free).generated
    at = rng.randrange(len(ids))
    if rule == "stop string":
        text = TOKENIZER.decode(ids[at : at + rng.randint(1, 3)])
        if not text or "\ufffd" in text:  # nothing a user could ask for
            return free
        return replace(free, stop_strings=(text, "never said"))
    others = (rng.randrange(VOCAB),) if rule == "two eos" else ()
    return replace(free, eos_ids=(*others, ids[at]))


def random_tree(rng: random.Random) -> TreeConfig:
    """Draw a legal tree of depth 1 to 6, width 1 to 4 and top-k 1 to 6, or a longer chain."""
    if rng.random() < 0.1:
        return TreeConfig.chain(rng.randint(7, 16))
    depth, width, top_k = rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 6)
    widest = TreeConfig(depth=depth, width=width, top_k=top_k, nodes=depth)
    nodes = rng.choice((depth, widest.pool, rng.randint(depth, widest.pool)))
    return TreeConfig(depth=depth, width=width, top_k=top_k, nodes=nodes)


def random_ways(wanted: Wanted, plain: list[int], rng: random.Random) -> Iterator[Way]:
    """Draw drafts and trees to decode a request with, and how they are served."""
    for name in rng.sample(sorted(DRAFTS), WAYS_PER_REQUEST):
        draft, tree = DRAFTS[name](wanted, plain, rng), random_tree(rng)
        shaper = random_shaper(tree, rng) if rng.random() < 0.3 else None
        yield Way(name, draft, tree, rng.choice(SERVINGS), shaper)


Maker = Callable[[Wanted, list[int], random.Random], Draft]


def _twin(amount: float) -> Maker:
    def make(wanted: Wanted, plain: list[int], rng: random.Random) -> Draft:
        model = twin_with_noise(wanted.model, amount) if amount else wanted.model
        return ModelDraft(model, VOCAB)

    return make


def _hostile(wanted: Wanted, plain: list[int], rng: random.Random) -> Draft:
    return ModelDraft(_model("neox", 7, num_hidden_layers=1), VOCAB)


def _padded(n_rows: int) -> Maker:
    def make(wanted: Wanted, plain: list[int], rng: random.Random) -> Draft:
        return ModelDraft(tiny_model("llama", 5, num_hidden_layers=1, vocab_size=n_rows), VOCAB)

    return make


def _lookup(wanted: Wanted, plain: list[int], rng: random.Random) -> Draft:
    min_match = rng.randint(1, 3)
    return LookupDraft(min_match, rng.randint(min_match, 5))


def _suffix(wanted: Wanted, plain: list[int], rng: random.Random) -> Draft:
    min_match = rng.randint(1, 2)
    draft = SuffixDraft(min_match, rng.randint(min_match, 12), rng.choice((0.0, 0.02, 0.3)), 40)
    for _ in range(rng.choice((0, 1, 3))):  # an earlier answer that begins as this one will
        draft.remember(plain[: rng.randint(1, len(plain))] + wanted.prompt[:5])
    return draft


def _hybrid(make_head: Maker) -> Maker:
    def make(wanted: Wanted, plain: list[int], rng: random.Random) -> Draft:
        suffix = _suffix(wanted, plain, rng)
        assert isinstance(suffix, SuffixDraft)
        return HybridDraft(
            make_head(wanted, plain, rng),
            suffix,
            match_nodes=rng.randint(1, 10),
            match_tau=rng.choice((1.0, 1.2, 1.6, 3.0)),
        )

    return make


def _head(fitted: bool) -> Maker:
    def make(wanted: Wanted, plain: list[int], rng: random.Random) -> Draft:
        text = wanted.prompt + plain
        changes: dict[str, Any] = {}
        if rng.random() < 0.3:
            changes["sliding_window"] = 6
        if rng.random() < 0.2:
            changes["n_layers"] = 2
        if rng.random() < 0.5:
            n_heads, n_kv_heads, head_dim = rng.choice(HEADS)
            changes |= {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
        texts = [text] if fitted and len(text) > 3 else []
        return Eagle3Draft(tiny_head(wanted.model, rng.randrange(9), texts=texts, **changes))

    return make


DRAFTS: dict[str, Maker] = {
    "twin": _twin(0.0),
    "noisy twin": _twin(0.1),
    "noisier twin": _twin(0.3),
    "hostile": _hostile,
    "padded": _padded(VOCAB + 64),
    "cut": _padded(VOCAB - 64),
    "lookup": _lookup,
    "suffix": _suffix,
    "other suffix": _suffix,
    "hybrid twin": _hybrid(_twin(0.3)),
    "hybrid head": _hybrid(_head(fitted=True)),
    "head": _head(fitted=False),
    "fitted head": _head(fitted=True),
}


@dataclass
class Verdict:
    """What many cases showed.

    Attributes:
        n_cases: Requests times ways.
        near_ties: Differences at a token whose choice was no clearer than rounding.
        differences: All the others, in words.
        n_accepted: Accepted draft tokens by the draft's name: zero everywhere would prove little.
    """

    n_cases: int = 0
    near_ties: int = 0
    differences: list[str] = field(default_factory=list)
    n_accepted: dict[str, int] = field(default_factory=dict)


def judge(wanted: Wanted, rng: random.Random, verdict: Verdict) -> None:
    """Decode one request plainly, with transformers and in several ways; add what differs."""
    plain = run(wanted)
    if wanted.sampling.is_greedy:
        theirs = cut_at_stop_string(transformers_greedy(wanted), wanted.stop_strings)
        _compare(wanted, plain.generated, theirs, "transformers", verdict)
    for way in random_ways(wanted, plain.generated, rng):
        verdict.n_cases += 1
        found = run(wanted, way, rng)
        name = f"{way.name} {way.tree.label()} {way.serving}{' adaptive' if way.shaper else ''}"
        compare_runs(wanted, plain, found, name, verdict)
        n_accepted = sum(found.stats.accepted_by_depth)
        verdict.n_accepted[way.name] = verdict.n_accepted.get(way.name, 0) + n_accepted


def compare_runs(
    wanted: Wanted, plain: Request, found: Request, name: str, verdict: Verdict
) -> None:
    """Add what differs between two decodings of a request."""
    _compare(wanted, plain.generated, found.generated, name, verdict)
    if found.generated == plain.generated and found.stop_reason != plain.stop_reason:
        reasons = f"{found.stop_reason}, plain {plain.stop_reason}"
        verdict.differences.append(f"{name} ends for another reason: {reasons}")


def _compare(
    wanted: Wanted, plain: list[int], other: list[int], name: str, verdict: Verdict
) -> None:
    if plain == other:
        return
    index = first_difference(plain, other)
    is_tie = index < min(len(plain), len(other)) and plain_lead(wanted, index) < NEAR_TIE
    if is_tie:
        verdict.near_ties += 1
        return
    verdict.differences.append(
        f"{name} on {wanted.kind}, prompt {wanted.prompt}, {wanted.sampling}, seed {wanted.seed}, "
        f"EOS {wanted.eos_ids}, stop {wanted.stop_strings}: {other} is not plain's {plain}"
    )


def judge_crowd(rng: random.Random, verdict: Verdict) -> None:
    """Decode requests of one target in a batch whose tree changes at random; add what differs."""
    first = random_wanted(rng)
    crowd = [first, *(random_wanted(rng, first) for _ in range(rng.randint(1, 6)))]
    alone = [run(wanted) for wanted in crowd]
    name, size = rng.choice(sorted(DRAFTS)), rng.randint(2, 5)
    draft = DRAFTS[name](first, alone[0].generated, rng)
    trees = [PLAIN, *(random_tree(rng) for _ in range(3))]
    requests = [wanted.request(draft) for wanted in crowd]
    for _ in decode_many(first.target, requests, size, lambda _: rng.choice(trees)):
        pass
    for wanted, plain, found in zip(crowd, alone, requests, strict=True):
        verdict.n_cases += 1
        compare_runs(wanted, plain, found, f"{name} beside others", verdict)
        n_accepted = sum(found.stats.accepted_by_depth)
        verdict.n_accepted[name] = verdict.n_accepted.get(name, 0) + n_accepted
