"""The kernels of our own: torch's numbers, and a row's result the same to the bit among others."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import engine.kernels
import engine.lean
from engine.batch_cache import BatchCache, visible_rows
from engine.cache import KVCache
from engine.eagle3_draft import Eagle3Draft
from engine.kernels import Kernels, LayerWeights, kernels_for
from engine.lean import LeanForward
from engine.lean_head import LeanHead
from engine.packed import PackedLinear
from tiny import tiny_head, tiny_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5

compiled = pytest.mark.skipif(
    not engine.kernels.has_kernels(), reason="there is no C++ compiler with OpenMP"
)


def kernels(dtype: torch.dtype) -> Kernels:
    made = kernels_for(CPU, dtype)
    assert made is not None
    return made


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Compare with float64, to the rounding of the result's dtype."""
    tolerance = 0.02 if got.dtype == torch.bfloat16 else 1e-5
    assert (got.double() - expected).norm() <= tolerance * expected.norm()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 16, 17, 33, 80])
@pytest.mark.parametrize(("n_out", "n_in"), [(64, 32), (96, 160), (70, 40), (33, 17)])
def test_linear_is_torchs(n: int, n_out: int, n_in: int, dtype: torch.dtype) -> None:
    """With all that is done on the way, for sizes with and without tiles."""
    torch.manual_seed(0)
    x, weight = torch.randn(n, n_in).to(dtype), (torch.randn(n_out, n_in) / n_in**0.5).to(dtype)
    bias, scale = torch.randn(n_out).to(dtype), (torch.rand(n_in) + 0.5).to(dtype)
    residual = torch.randn(n, n_out).to(dtype)
    normed = F.rms_norm(x.double(), (n_in,), scale.double(), EPS)
    expected = normed @ weight.double().T + bias.double()
    own = kernels(dtype)
    y = own.linear(x, weight, bias, norm=(scale, EPS))
    assert_near(y, expected)
    added = own.linear(x, weight, residual=residual)
    assert_near(added, x.double() @ weight.double().T + residual.double())
    assert_near(own.normalised(x, (scale, EPS)), normed)
    if n_out % 2 == 0:
        gate, up = expected.chunk(2, dim=-1)
        gated = own.linear(x, weight, bias, norm=(scale, EPS), gated=True)
        assert_near(gated, F.silu(gate) * up)
    alone = [own.linear(row[None], weight, bias, norm=(scale, EPS)) for row in x]
    assert torch.equal(torch.cat(alone), y)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_gates_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    """silu is x far above zero and 0 far below, where e^-x is no number any more."""
    x = torch.tensor([[200.0, -200.0]]).to(dtype)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]).to(dtype)
    y = kernels(dtype).linear(x, weight, gated=True)
    assert y[0].tolist() == pytest.approx([40000.0, 0.0], rel=0.01, abs=1e-30)


@pytest.fixture(params=DTYPES)
def both(request: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[LeanForward, LeanForward]:
    """Return the lean forward of one model with our kernels, and with torch's alone."""
    if not engine.kernels.has_kernels():
        pytest.skip("there is no C++ compiler with OpenMP")
    model = tiny_model("qwen3", dtype=request.param, hidden_size=64, head_dim=32)
    own = LeanForward.build(model)
    for module in (engine.lean, engine.packed):
        monkeypatch.setattr(module, "kernels_for", lambda device, dtype: None)
    torchs = LeanForward.build(model)
    assert own is not None and torchs is not None
    return own, torchs


def run(lean: LeanForward, ids: Tensor, cache: KVCache, mask: Tensor | None = None) -> Tensor:
    """Return logits; positions count who is seen."""
    start, n = cache.length, len(ids)
    seen = torch.ones(n, start + n).tril(start) if mask is None else mask
    positions = seen.sum(dim=1).long() - 1
    logits, _ = lean(ids, positions, cache, mask, last_only=False, feature_layers=())
    return logits


def test_passes_are_those_of_torch(both: tuple[LeanForward, LeanForward]) -> None:
    """A prompt, one token and a tree, with a norm on queries and keys."""
    own, torchs = both
    ids = torch.arange(3, 40)
    tree = torch.ones(5, 25, dtype=torch.bool)
    tree[:, 20:] = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    ).bool()
    caches = KVCache(4, 64), KVCache(4, 64)
    for new, mask in ((ids[:19], None), (ids[19:20], None), (ids[20:25], tree)):
        got, expected = (
            run(lean, new, cache, mask) for lean, cache in zip(both, caches, strict=True)
        )
        distance = (got.double() - expected.double()).norm() / expected.double().norm()
        assert distance < (0.03 if got.dtype == torch.bfloat16 else 1e-5)
    assert own._n_own > 0 and torchs._n_own == 0


def test_a_tree_pass_is_plain_decoding_to_the_bit(both: tuple[LeanForward, LeanForward]) -> None:
    """Also in bfloat16, and for paths with gaps between their nodes."""
    own, _ = both
    ids = torch.arange(3, 40)
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    mask = torch.zeros(len(paths), 19 + len(paths), dtype=torch.bool)
    mask[:, :19] = True
    for node, path in enumerate(paths):
        mask[node, [19 + i for i in path]] = True
    cache = KVCache(4, 64)
    run(own, ids[:19], cache)
    nodes = ids[19 : 19 + len(paths)]
    tree = run(own, nodes, cache, mask)
    for node, path in enumerate(paths):
        cache.truncate(19)
        plain = torch.cat([run(own, nodes[i][None], cache) for i in path])
        assert torch.equal(plain[-1], tree[node])


CHAIN = torch.ones(3, 3).tril().bool()
FORK = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
ROUNDS = ([CHAIN, CHAIN[:1, :1], FORK], [CHAIN[:1, :1]] * 3, [FORK, FORK, CHAIN])
LENGTHS = (19, 5, 34)


@torch.inference_mode()
def test_texts_of_a_batch_get_what_they_get_alone(both: tuple[LeanForward, LeanForward]) -> None:
    """To the bit, whatever their lengths, their trees and who is beside them."""
    caches = [KVCache(4, 64) for _ in LENGTHS]
    own, _ = both
    batches = BatchCache(4, 3, CPU), BatchCache(4, 3, CPU)
    for length, cache in zip(LENGTHS, caches, strict=True):
        run(own, torch.arange(length) + 1, cache)
        for batch in batches:
            batch.join(cache)
    for masks in ROUNDS:
        ids = torch.arange(sum(map(len, masks))) + 7
        counts = [len(mask) for mask in masks]
        starts = [cache.length for cache in caches]
        depths = [mask.sum(dim=1) - 1 for mask in masks]
        positions = torch.cat([a + b for a, b in zip(starts, depths, strict=True)])
        got, torchs = (
            lean(
                ids,
                positions,
                batch,
                visible_rows(starts, masks, max(starts) + max(counts)),
                last_only=False,
                feature_layers=(),
                layout=batch.begin(counts, positions),
            )[0]
            for lean, batch in zip(both, batches, strict=True)
        )
        alone = [
            run(own, nodes, cache, torch.cat((torch.ones(len(mask), start).bool(), mask), dim=1))
            for nodes, cache, mask, start in zip(
                ids.split(counts), caches, masks, starts, strict=True
            )
        ]
        assert torch.equal(torch.cat(alone), got)
        assert (got.double() - torchs.double()).norm() < 0.03 * torchs.double().norm()
        paths = [[0, 2] if mask is FORK else [0] for mask in masks]
        for batch in batches:
            batch.keep_paths(paths)
        for cache, start, path in zip(caches, starts, paths, strict=True):
            cache.keep_path(start, path)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 6])
def test_a_head_gives_texts_of_a_batch_what_it_gives_them_alone(
    window: int | None, dtype: torch.dtype
) -> None:
    """States and logits, to the bit."""
    draft = Eagle3Draft(tiny_head(tiny_model(dtype=dtype), sliding_window=window))
    config = draft.head.config
    batch = BatchCache(config.n_layers, len(LENGTHS), CPU)
    hidden = torch.randn(64, config.hidden_size).to(dtype)
    caches = [draft.new_cache(64) for _ in LENGTHS]
    features = torch.randn(64, config.n_features * config.target_hidden_size).to(dtype)
    with torch.inference_mode():
        for length, cache in zip(LENGTHS, caches, strict=True):
            draft.extend(list(range(length)), features[:length], cache, last_only=True)
            batch.join(cache)
        counts = [len(mask) for mask in ROUNDS[0]]
        ids = torch.arange(sum(counts)) + 7
        positions = [n + mask.sum(1) - 1 for n, mask in zip(LENGTHS, ROUNDS[0], strict=True)]
        got = draft.pass_rows(ids, hidden[: len(ids)], torch.cat(positions), ROUNDS[0], batch)
        nodes = zip(ids.split(counts), hidden[: len(ids)].split(counts), positions, strict=True)
        alone = [
            draft.expand(*of_text, cache, mask)
            for of_text, cache, mask in zip(nodes, caches, ROUNDS[0], strict=True)
        ]
    for part, single in zip(got, zip(*alone, strict=True), strict=True):
        assert torch.equal(torch.cat(single), part)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"qk_norm": True, "attention_bias": True},
        {"norm_before_residual": True, "norm_output": True, "n_layers": 2},
        {"sliding_window": 6, "intermediate_size": 64},
    ],
)
def test_a_heads_passes_are_its_own(variant: dict[str, Any], dtype: torch.dtype) -> None:
    """Over known tokens and over a tree, states and logits."""
    head = tiny_head(tiny_model(dtype=dtype), **variant)
    config = head.config
    lean = LeanHead.build(head)
    assert lean is not None
    caches = KVCache(config.n_layers, 32), KVCache(config.n_layers, 32)
    tree = torch.zeros(3, 14, dtype=torch.bool)
    tree[:, 8:11], tree[:, 11:] = True, torch.eye(3).bool()
    with torch.inference_mode():
        for n, mask in ((11, None), (3, tree)):
            tokens, hidden = torch.arange(n), torch.randn(n, config.hidden_size).to(dtype)
            start = caches[0].length
            positions = torch.arange(start, start + n)
            got = lean(tokens, hidden, positions, caches[0], mask)
            wide = None if mask is None else mask[None, None]
            expected = head(tokens[None], hidden[None], positions[None], caches[1], wide)[0]
            assert_near(got, expected.double())
            assert_near(lean.logits(expected), head.logits(expected).double())


@compiled
@pytest.mark.parametrize("variant", [{"output_bias": True}, {"head_dim": 8}])
def test_a_head_the_kernels_do_not_know_runs_as_it_is(variant: dict[str, Any]) -> None:
    """No pass is lent for it."""
    head = tiny_head(tiny_model(dtype=torch.float32), **variant)
    assert LeanHead.build(head) is None


@compiled
def test_weights_keep_what_they_point_to(both: tuple[LeanForward, LeanForward]) -> None:
    """The fields the kernels read hold addresses of tensors that stay alive."""
    weight = torch.randn(64, 64)
    norm = torch.ones(64), EPS
    made = LayerWeights(
        norm=norm,
        qkv=torch.randn(96, 64),
        qkv_bias=None,
        head_norm=None,
        out=torch.randn(64, 32),
        mlp_norm=norm,
        gate_up=torch.randn(128, 64),
        down=weight,
        heads=(2, 2, 16),
    )
    held = [tensor.data_ptr() for tensor in made._held if tensor is not None]
    fields = [getattr(made._fields, f"pointer_{i}") for i in range(8)]
    assert [pointer for pointer in fields if pointer] == held


SCRIPT = """
import torch
from engine.kernels import has_kernels, kernels_for
from engine.packed import PackedLinear
y = PackedLinear(torch.nn.Linear(32, 32).bfloat16())(torch.ones(2, 32).bfloat16())
print(has_kernels(), y.shape[1])
"""


def in_process(tmp_path: Path, **environment: str) -> tuple[str, str]:
    """Return what a fresh process prints that has its own cache."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PATH": "/usr/bin:/bin", "SPECTUNE_CACHE": str(tmp_path / "cache"), **environment},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize("environment", [{"PATH": ""}, {"SPECTUNE_KERNELS": "0"}])
def test_everything_runs_without_a_compiler(tmp_path: Path, environment: dict[str, str]) -> None:
    """Silently: it is what most machines without one would say at every start."""
    assert in_process(tmp_path, **environment) == ("False 32", "")


def test_a_compiler_that_fails_is_told_once(tmp_path: Path) -> None:
    """Passes then take torch's way."""
    out, said = in_process(tmp_path, CXX="false")
    assert out == "False 32"
    assert said.count("cannot be compiled") == 1
    assert not list((tmp_path / "cache").glob("*"))


@compiled
def test_they_are_compiled_once_and_kept(tmp_path: Path) -> None:
    """A second process finds them; one that may not write to the cache makes its own."""
    assert in_process(tmp_path)[0] == "True 32"
    (made,) = (tmp_path / "cache").glob("kernels-*.so")
    changed = made.stat().st_mtime_ns
    assert in_process(tmp_path)[0] == "True 32"
    assert made.stat().st_mtime_ns == changed
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert in_process(tmp_path, SPECTUNE_CACHE=str(blocked / "cache")) == ("True 32", "")


@compiled
def test_a_packed_layer_takes_our_kernels_up_to_their_rows() -> None:
    """And torch's way beyond, with the same numbers."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 40)
    fused = PackedLinear(linear)
    assert 0 < fused.n_own < 100
    for n in (fused.n_own, fused.n_own + 1):
        x = torch.randn(n, 48)
        with torch.no_grad():
            assert_near(fused(x), linear(x).double())
