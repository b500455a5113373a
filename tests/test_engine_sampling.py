"""Sampling: the noise, the draw, and the distribution of what speculation samples."""

import math
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from engine.decode import Request, decode
from engine.draft import Draft
from engine.lookup import LookupDraft
from engine.model_draft import ModelDraft
from engine.sampling import Sampler, gumbel_noise, request_seed
from engine.stopping import StopRules
from engine.target import Target
from profiles import PLAIN, Sampling, TreeConfig
from tiny import tiny_model, twin_with_noise
from toy_drafts import TableDraft, TableTarget

WORD = 2**64
PROMPT = (1, 2, 3, 1, 2)


def reference_noise(seed: int, index: int, token: int) -> float:
    """Compute the noise of one token in whole numbers of Python."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
        x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    key = mix(mix((seed + golden) % WORD) ^ (2 * index + 1))
    bits = mix((key + token * golden) % WORD)
    return -math.log(-math.log(((bits >> 11) + 0.5) / 2**53))


@pytest.mark.parametrize(
    ("seed", "index", "noise"),
    [
        (0, 0, [-0.2619285855830144, 0.43228118666708304, 1.6876300392783732]),
        (1, 0, [4.868856252050631, -0.7076788443759754, 1.0614915312945166]),
        (-(2**63), 7, [-0.113382372056168, 0.5367601511249689, 1.1313104819351838]),
    ],
)
def test_the_noise_never_changes(seed: int, index: int, noise: list[float]) -> None:
    """Texts sampled with a seed stay the same over releases, so the values are written down."""
    found = gumbel_noise(seed, index, torch.tensor([0, 1, 49_151]))
    assert found.tolist() == pytest.approx(noise, rel=1e-12)
    expected = [reference_noise(seed, index, token) for token in (0, 1, 49_151)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_noise_of_a_token_does_not_depend_on_its_company() -> None:
    """Alone, in another order or in another shape a token gets the same noise."""
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    together = gumbel_noise(5, 3, ids)
    gumbel_noise(9, 9, ids)
    assert torch.equal(gumbel_noise(5, 3, ids.view(10, 100)).flatten(), together)
    for i in (0, 499, 999):
        assert gumbel_noise(5, 3, ids[i : i + 1]) == together[i]


@pytest.mark.parametrize("along", ["token", "index", "seed"])
def test_the_noise_is_gumbel_and_independent_along(along: str) -> None:
    """Over tokens, over generated tokens and over seeds the noise has the standard Gumbel
    distribution, and neighbours are not correlated."""
    n = 4_000
    if along == "token":
        noise = gumbel_noise(11, 4, torch.arange(n))
    elif along == "index":
        noise = torch.cat([gumbel_noise(11, i, torch.tensor([7])) for i in range(n)])
    else:
        noise = torch.cat([gumbel_noise(s, 4, torch.tensor([7])) for s in range(n)])
    values = noise.numpy()
    assert np.isfinite(values).all()
    assert stats.kstest(values, "gumbel_r").pvalue > 1e-4
    uniform = np.exp(-np.exp(-values))
    assert stats.chisquare(np.histogram(uniform, bins=64, range=(0, 1))[0]).pvalue > 1e-4
    for lag in (1, 2, 3):
        assert abs(np.corrcoef(uniform[lag:], uniform[:-lag])[0, 1]) < 5 / math.sqrt(n)


def test_b11_seeds_of_requests_differ_by_seed_and_by_index() -> None:
    """Requests of one list never share a stream, and the seed of a request is for ever."""
    seeds = {request_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert request_seed(0, 0) == -4532756096439913812
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def sample(
    target: Any,
    draft: Draft | None,
    tree: TreeConfig,
    sampling: Sampling,
    seed: int,
    n_new: int,
) -> tuple[list[int], int]:
    """Return the sampled ids and the number of draft nodes verified."""
    request = Request(target, draft, list(PROMPT), Sampler(sampling, seed), StopRules(n_new))
    for _ in decode(request, lambda _: tree):
        pass
    return request.generated, request.stats.n_drafted


TREES = {
    "chain": TreeConfig(depth=2, width=1, top_k=1, nodes=2),
    "tree": TreeConfig(depth=2, width=3, top_k=3, nodes=9),
}
SAMPLINGS = {
    "T0.3": Sampling(temperature=0.3),
    "T1": Sampling(temperature=1.0),
    "T2": Sampling(temperature=2.0),
    "T1 top-k 3": Sampling(temperature=1.0, top_k=3),
    "T1 top-p 0.7": Sampling(temperature=1.0, top_p=0.7),
}
CASES = list(product(("neural", "perfect", "lookup"), TREES, SAMPLINGS))
QUICK = [case for case in CASES if case[2] in ("T1", "T1 top-p 0.7")]
VOCAB = 8
N_SEEDS = 1000


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the exact probabilities [.., V] after temperature, top-k and top-p."""
    p = torch.softmax(logits / sampling.temperature, -1)
    ordered, ids = p.sort(-1, descending=True)
    kept = torch.ones_like(p, dtype=torch.bool)
    if sampling.top_k:
        kept[..., sampling.top_k :] = False
    before = ordered.cumsum(-1) - ordered
    kept &= before < sampling.top_p  # the smallest set whose mass reaches top_p
    ordered = ordered * kept
    return torch.zeros_like(p).scatter(-1, ids, ordered / ordered.sum(-1, keepdim=True))


def p_value(counts: Counter[tuple[int, ...]], exact: Tensor) -> float:
    """Return the chi-square p-value of joint counts; cells expected below 5 are put together."""
    observed = np.zeros(tuple(exact.shape))
    for ids, n in counts.items():
        observed[ids] = n
    expected = exact.numpy() * observed.sum()
    assert observed[expected == 0].sum() == 0  # what the filters removed is never sampled
    rare = expected < 5
    cells = np.append(observed[~rare], observed[rare].sum())
    means = np.append(expected[~rare], expected[rare].sum())
    if means[-1] == 0:
        cells, means = cells[:-1], means[:-1]
    return float(stats.chisquare(cells, means * cells.sum() / means.sum()).pvalue)


def p_values(
    draft: Draft | None, tree: TreeConfig, used: Sampling, claimed: Sampling, first_seed: int
) -> tuple[list[float], int]:
    """Sample four tokens with many seeds and test the joint counts of the 2nd and 3rd and of the
    3rd and 4th, all from one round of depth 2; return the nodes drafted as well."""
    target = TableTarget(VOCAB, seed=0)
    counts: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    n_drafted = 0
    for seed in range(first_seed, first_seed + N_SEEDS):
        ids, n = sample(target, draft, tree, used, seed, n_new=4)
        counts[0][tuple(ids[1:3])] += 1
        counts[1][tuple(ids[2:])] += 1
        n_drafted += n
    step = filtered(target.table, claimed)
    second = step[PROMPT[-1]] @ step
    third = second @ step
    exact = [second[:, None] * step, third[:, None] * step]
    return [p_value(c, e) for c, e in zip(counts, exact, strict=True)], n_drafted


@pytest.mark.parametrize(
    ("kind", "shape", "name"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_b09_sampled_tokens_follow_the_targets_distribution(
    kind: str, shape: str, name: str
) -> None:
    """Joint counts fit their exact probabilities, whatever drafts the tokens."""
    draft: Draft = LookupDraft(1, 2)
    if kind != "lookup":
        draft = TableDraft(TableTarget(VOCAB, seed=0 if kind == "perfect" else 1).table)
    # Other seeds for every case, or all would see the same texts.
    first_seed = N_SEEDS * CASES.index((kind, shape, name))
    sampling = SAMPLINGS[name]
    found, n_drafted = p_values(draft, TREES[shape], sampling, sampling, first_seed)
    assert n_drafted > N_SEEDS / 3
    assert min(found) > 0.01 / (2 * len(CASES))


def test_b09_the_test_sees_a_small_bias() -> None:
    """The check above would notice a sampler that is a little too greedy."""
    used, claimed = Sampling(temperature=0.8), Sampling(temperature=1.0)
    found, _ = p_values(None, PLAIN, used, claimed, 0)
    assert max(found) < 0.01 / (2 * len(CASES))


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_b09_no_temperature_is_greedy(temperature: float) -> None:
    """T = 0 and a T so small that noise cannot matter both give the likeliest tokens."""
    model = tiny_model()
    target, draft = Target(model), ModelDraft(twin_with_noise(model, 0.1), model.vocab_size)
    ids = torch.tensor([PROMPT])
    greedy = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    for seed in (0, 1):
        sampling = Sampling(temperature=temperature)
        assert sample(target, None, PLAIN, sampling, seed, n_new=20)[0] == greedy
        assert sample(target, draft, TREES["tree"], sampling, seed, n_new=20)[0] == greedy


def test_b11_a_seed_fixes_the_text_whatever_ran_before() -> None:
    """Same seed, same ids, also with another request in between; other seeds, other ids; the
    global random state is left alone."""
    model = tiny_model(num_hidden_layers=2)
    target, draft = Target(model), ModelDraft(model, model.vocab_size)
    sampling = Sampling(temperature=1.0)
    before = torch.get_rng_state()
    first, _ = sample(target, draft, TREES["tree"], sampling, 1, n_new=20)
    other, _ = sample(target, draft, TREES["tree"], sampling, 2, n_new=20)
    torch.rand(7)
    torch.set_rng_state(before)
    again, _ = sample(target, draft, TREES["chain"], sampling, 1, n_new=20)
    assert first == again
    assert first != other
    assert torch.equal(torch.get_rng_state(), before)


def test_processors_see_the_prefix_of_the_token_they_judge() -> None:
    """Once per generated token, with exactly the tokens before it, however it was drafted."""
    model = tiny_model(num_hidden_layers=2)
    seen: list[list[int]] = []

    def look(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids[0].tolist())
        assert scores.shape == (1, model.vocab_size)
        return scores

    request = Request(
        Target(model),
        ModelDraft(twin_with_noise(model, 0.1), model.vocab_size),
        list(PROMPT),
        Sampler(Sampling(temperature=1.0), 3, [look]),
        StopRules(20),
    )
    for _ in decode(request, lambda _: TREES["tree"]):
        pass
    assert request.stats.n_rounds < 19  # some drafts were accepted
    n_prompt = len(PROMPT)
    assert seen == [request.tokens[: n_prompt + i] for i in range(20)]
