"""Recorded passes: static shapes give what dynamic ones do, and the host waits once a round.

Here they are played back by calling them again; on a CUDA device they are graphs.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import engine.forced
import engine.timing
from engine.beam import BeamDraft
from engine.decode import Request, Round, decode
from engine.decoder import SpeculativeDecoder
from engine.draft import Draft
from engine.eagle3_draft import Eagle3Draft
from engine.forced import run_forced
from engine.graphs import CallAgain, CudaGraphs, Recorder, recorder_for
from engine.hybrid import HybridDraft
from engine.model_draft import ModelDraft
from engine.pair import LoadedTarget
from engine.pending_tree import PendingTree, choose
from engine.reference import reference_times
from engine.sampling import Sampler
from engine.static import (
    BUCKETS,
    LEAST_CAPACITY,
    N_COPIES,
    SPARE,
    StaticCache,
    bucket_of,
    capacity_of,
    in_window,
    visible_rows,
)
from engine.stopping import StopRules
from engine.suffix import SuffixDraft
from engine.target import Target
from engine.timing import PhaseClock
from engine.trace import Trace
from engine.tree import DraftTree, Pool
from lossless_cases import random_shaper
from profiles import PLAIN, Sampling, TargetRef, TreeConfig
from tiny import VOCAB, tiny_head, tiny_model, tiny_tokenizer, twin_with_noise

KINDS = ("llama", "qwen3", "mistral")
GREEDY = Sampling(temperature=0.0)
N_NEW = 24


def recorded(target: Target) -> Target:
    target.record(CallAgain())
    assert target.static is not None
    return target


def ids(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(n)]


def random_tree(rng: random.Random, n_nodes: int) -> DraftTree:
    parents = [rng.randint(max(0, i - 3), i) for i in range(n_nodes)]
    return DraftTree(ids(n_nodes, rng.randrange(99)), parents)


# --- who sees what ------------------------------------------------------------------------------


def test_rows_before_are_seen_and_those_behind_are_not() -> None:
    rng = random.Random(0)
    for _ in range(50):
        capacity, n, m = 20, rng.randint(1, 4), rng.randint(1, 6)
        first = rng.randint(0, capacity - m)
        block = torch.rand(n, m) < 0.5
        expected = torch.zeros(n, capacity, dtype=torch.bool)
        expected[:, :first] = True
        expected[:, first : first + m] = block
        found = visible_rows(torch.arange(capacity), torch.tensor([first]), block)
        assert torch.equal(found, expected)


def test_the_window_goes_by_positions_and_not_by_rows() -> None:
    """Rows 0 to 4 stand at their positions, the next three at 5, 6 and 6."""
    positions = torch.tensor([5, 6, 6])
    found = in_window(torch.arange(10), torch.tensor([5]), positions, positions, 3)
    keys = [0, 1, 2, 3, 4, 5, 6, 6]
    expected = [[query - key < 3 for key in keys] for query in (5, 6, 6)]
    assert found[:, :8].tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 3, 9, 65, 80])
def test_the_least_bucket_that_holds_them(n: int) -> None:
    bucket = bucket_of(n)
    assert bucket is not None
    assert n <= bucket
    assert all(other < n or other >= bucket for other in BUCKETS)


def test_no_bucket_and_no_small_capacity() -> None:
    assert bucket_of(BUCKETS[-1] + 1) is None
    assert capacity_of(1) == LEAST_CAPACITY
    assert capacity_of(LEAST_CAPACITY - SPARE) == LEAST_CAPACITY
    assert capacity_of(LEAST_CAPACITY - SPARE + 1) == 2 * LEAST_CAPACITY


# --- the target's passes ------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_static_passes_equal_dynamic_ones(kind: str) -> None:
    """Rounds of random trees and accepted paths, every bucket with and without padding, past the
    sliding window, with whatever was in the memory before."""
    rng = random.Random(kind)
    model = tiny_model(kind, num_hidden_layers=2, max_position_embeddings=1024)
    static, dynamic = recorded(Target(model)), Target(model)
    cache, expected_cache = static.lend_cache(600), dynamic.new_cache(8)
    assert isinstance(cache, StaticCache)
    cache.lent.normal_(std=100.0)
    prompt = ids(30, 1)
    for target, each in ((static, cache), (dynamic, expected_cache)):
        target.forward(prompt, each, last_only=True)
    for n_nodes in (0, 1, 2, 3, 5, 7, 0, 12, 15, 16, 23, 30, 31, 47, 60, 63, 64, 79):
        tree, start = random_tree(rng, n_nodes), cache.length
        assert start == expected_cache.length
        tokens, positions, mask = tree.as_input(5, start)
        n_recorded = len(static.static._passes) if static.static else 0
        results = [
            target.forward(tokens, each, positions=positions, mask=mask, feature_layers=(1, 0))
            for target, each in ((static, cache), (dynamic, expected_cache))
        ]
        for found, expected in zip(*results, strict=True):
            assert found is not None and expected is not None
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert static.static and len(static.static._passes) - n_recorded in (0, 1)
        path, node = [0], 0
        while children := [n for n in range(1, n_nodes + 1) if tree.parents[n - 1] == node]:
            node = rng.choice(children)
            path.append(node)
        for each in (cache, expected_cache):
            each.keep_path(start, path)
    assert static.static and {key[0] for key in static.static._passes} == set(BUCKETS)
    assert cache._states is cache.lent


@torch.inference_mode()
def test_what_has_no_static_pass_takes_the_dynamic_one() -> None:
    """More tokens than the largest bucket, a text that outgrew the memory, an ordinary cache."""
    model = tiny_model("llama", num_hidden_layers=2, max_position_embeddings=4096)
    static, dynamic = recorded(Target(model)), Target(model)
    cache, expected_cache = static.lend_cache(1), dynamic.new_cache(8)
    for n in (100, 3, LEAST_CAPACITY - 103, 2, 1):
        tokens = ids(n, n)
        found, _ = static.forward(tokens, cache)
        expected, _ = dynamic.forward(tokens, expected_cache)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert isinstance(cache, StaticCache) and not cache.has_room(1)
    assert static.static and {key[0] for key in static.static._passes} == {4}
    found, _ = static.forward([7], static.new_cache(4))
    torch.testing.assert_close(found, dynamic.forward([7], dynamic.new_cache(4))[0])


def test_memory_is_lent_again_when_its_cache_is_gone() -> None:
    target = recorded(Target(tiny_model("llama", num_hidden_layers=1)))
    lent = [target.lend_cache(9) for _ in range(N_COPIES)]
    first = lent[0]
    assert isinstance(first, StaticCache)
    assert not isinstance(target.lend_cache(9), StaticCache)
    larger = target.lend_cache(LEAST_CAPACITY)
    assert isinstance(larger, StaticCache) and larger.lent.shape[4] == 2 * LEAST_CAPACITY
    assert target.static and target.static.shelf.idle_bytes == 0
    address = first.lent.data_ptr()
    del first, lent[0]
    assert target.static.shelf.idle_bytes == lent[0].lent.numel() * 8  # type: ignore[attr-defined]
    again = target.lend_cache(9)
    assert isinstance(again, StaticCache) and again.lent.data_ptr() == address
    assert again.length == 0


@pytest.mark.parametrize("kind", ["neox", "gemma2"])
def test_what_is_not_lean_is_not_recorded(kind: str) -> None:
    target = Target(tiny_model(kind, num_hidden_layers=1))
    target.record(CallAgain())
    assert target.static is None
    assert not isinstance(target.lend_cache(5), StaticCache)


def test_a_static_pass_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.static.visible_rows", lambda c, f, b: b.new_ones(len(b), len(c)))
    target = Target(tiny_model("llama", num_hidden_layers=1))
    target.record(CallAgain())
    assert target.static is None


# --- the draft's --------------------------------------------------------------------------------


def test_the_device_chooses_the_nodes_that_the_host_would() -> None:
    """Random pools with many ties: same nodes in the same order, same parents, same mask."""
    rng = random.Random(0)
    for _ in range(100):
        n, n_levels = rng.randint(1, 40), rng.randint(1, 6)
        parents, scores = [], []
        for i in range(n):
            above = [j for j in range(i) if depth_of(parents, j) < n_levels]
            parent = rng.choice([-1, *above])
            parents.append(parent)
            scores.append((0.0 if parent < 0 else scores[parent]) - rng.choice((0.0, 0.5, 1.0)))
        pool = Pool(ids(n, n), parents, scores, [n] * n_levels)
        n_nodes = rng.randint(1, n)
        expected = pool.select(n_nodes)
        columns = torch.tensor(pool.tokens), torch.tensor(parents), torch.tensor(scores)
        pending = PendingTree(*choose(*columns, n_nodes, n_levels), n_levels=n_levels)
        assert pending.n_nodes == expected.n_nodes
        tokens, positions, mask = pending.as_input(9, 100)
        assert tokens.tolist() == [9, *expected.tokens]
        assert positions.tolist() == [100 + depth for depth in expected.depths]
        assert torch.equal(mask, expected.mask())
        assert (pending.tokens, pending.parents) == (expected.tokens, expected.parents)
        assert pending.children == expected.children
        assert pending.depths == expected.depths and torch.equal(pending.mask(), mask)


def depth_of(parents: list[int], node: int) -> int:
    return 1 if parents[node] < 0 else 1 + depth_of(parents, parents[node])


MODEL = tiny_model("llama", num_hidden_layers=3)
PROMPT = ids(12, 3) * 2
TREES = [
    TreeConfig(depth=4, width=3, top_k=3, nodes=10),
    TreeConfig(depth=1, width=1, top_k=5, nodes=5),
    TreeConfig(depth=5, width=1, top_k=1, nodes=5),
    TreeConfig(depth=3, width=8, top_k=8, nodes=64),
]


def text(sampling: Sampling) -> list[int]:
    return decoded(Target(MODEL), None, PLAIN, sampling)[0]


def decoded(
    target: Target, draft: Draft | None, tree: TreeConfig, sampling: Sampling, shaper: Any = None
) -> tuple[list[int], list[Round]]:
    sampler, rules = Sampler(sampling, 5), StopRules(N_NEW)
    request = Request(target, draft, PROMPT, sampler, rules, shaper=shaper)
    rounds: list[Round] = []
    for _ in decode(request, lambda _: tree, lambda done, _: rounds.append(done)):
        pass
    return request.generated, rounds


def head(**changes: Any) -> Eagle3Draft:
    known = [PROMPT + text(GREEDY)]
    return Eagle3Draft(tiny_head(MODEL, texts=known, draft_vocab=48, **changes))


def hybrid() -> HybridDraft:
    return HybridDraft(head(), SuffixDraft(), match_nodes=6, match_tau=1.6)


def small(kind: str = "llama", **changes: Any) -> ModelDraft:
    model: PreTrainedModel = tiny_model(kind, 4, num_hidden_layers=1, **changes)
    return ModelDraft(twin_with_noise(MODEL, 0.1) if kind == "llama" else model, VOCAB)


DRAFTS: dict[str, Callable[[], Draft]] = {
    "head": head,
    "windowed head": lambda: head(sliding_window=6),
    "head of two layers": lambda: head(n_layers=2, norm_output=True),
    "hybrid": hybrid,
    "model": small,
    "windowed model": lambda: small("mistral"),
    "model of fewer words": lambda: small("qwen3", vocab_size=VOCAB - 40),
}


def record_draft(draft: Draft) -> BeamDraft:
    """Record the passes of a draft, of a hybrid those of its head."""
    neural = draft.head if isinstance(draft, HybridDraft) else draft
    assert isinstance(neural, BeamDraft)
    neural.record(CallAgain())
    assert neural.steps is not None
    return neural


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7)], ids=["greedy", "T"])
@pytest.mark.parametrize("name", DRAFTS)
def test_recorded_rounds_are_the_rounds(name: str, sampling: Sampling) -> None:
    """The text is plain decoding's, and every round drafts and accepts what the dynamic one does:
    the same trees, of which a difference in any score would show."""
    draft, expected_draft = DRAFTS[name](), DRAFTS[name]()
    neural = record_draft(draft)
    target, plain = recorded(Target(MODEL)), text(sampling)
    assert decoded(target, None, PLAIN, sampling)[0] == plain
    for tree in TREES:
        found, rounds = decoded(target, draft, tree, sampling)
        expected, expected_rounds = decoded(Target(MODEL), expected_draft, tree, sampling)
        assert found == expected == plain
        assert rounds == expected_rounds
    assert neural.steps and neural.steps._growths and neural.steps._extends


@pytest.mark.parametrize("stops_early", [True, False])
def test_adaptive_rounds_are_the_same_rounds(stops_early: bool) -> None:
    """A shaper that chooses nodes sees the recorded pool; one that stops early grows as before."""
    draft, tree = head(), TREES[0]
    record_draft(draft)
    shaper = random_shaper(tree, random.Random(1))
    shaper.stops_early = stops_early
    found = decoded(recorded(Target(MODEL)), draft, tree, GREEDY, shaper)
    assert found == decoded(Target(MODEL), head(), tree, GREEDY, shaper)


def test_passes_are_recorded_once() -> None:
    """A second request of the same length and tree records nothing."""
    draft, target = head(), recorded(Target(MODEL))
    record_draft(draft)
    decoded(target, draft, TREES[0], GREEDY)
    n_recorded = Recorder.n_recorded
    decoded(target, draft, TREES[0], GREEDY)
    assert Recorder.n_recorded == n_recorded
    decoded(target, draft, TREES[1], GREEDY)
    assert Recorder.n_recorded > n_recorded


class HostReads:
    """Counts what would make the host wait for a device, and notes when the target ran."""

    NAMES = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        for name in self.NAMES:
            monkeypatch.setattr(Tensor, name, self._noting(name, getattr(Tensor, name)))
        for name in ("nonzero", "masked_select"):
            monkeypatch.setattr(torch, name, self._noting(name, getattr(torch, name)))
        forward = Target.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            self.events.append("target")
            return result

        monkeypatch.setattr(Target, "forward", noted)

    def _noting(self, name: str, original: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.events.append(name)
            return original(*args, **kwargs)

        return noted


@pytest.mark.parametrize("name", ["head", "model"])
def test_the_host_waits_once_a_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start of a round to the end of the target's pass nothing is read from the device;
    then the target's choices are, and with them the tree, when there is nothing left to wait for.
    """
    draft, target = DRAFTS[name](), recorded(Target(MODEL))
    record_draft(draft)
    decoded(target, draft, TREES[0], GREEDY)  # everything is recorded
    request = Request(target, draft, PROMPT, Sampler(GREEDY), StopRules(N_NEW))
    request.prefill()
    request.step(TREES[0])
    reads = HostReads(monkeypatch)
    for _ in range(3):
        reads.events.clear()
        request.step(TREES[0])
        assert reads.events == ["target", "tolist", "tolist"]
    reads.events.clear()
    request.step(PLAIN)
    assert reads.events == ["target", "tolist"]


# --- recording, timing --------------------------------------------------------------------------


def test_a_cpu_records_nothing_of_itself() -> None:
    assert recorder_for(torch.device("cpu")) is None
    assert Target(MODEL).static is None
    assert head().steps is None
    assert isinstance(recorder_for(torch.device("cuda:1")), CudaGraphs)


def test_what_cannot_be_captured_is_called_after_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: CudaGraphs, work: Any) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(CudaGraphs, "_captured", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    with pytest.warns(UserWarning, match="without a CUDA graph: operation not permitted when"):
        play = CudaGraphs(torch.device("cuda:0"))(lambda: 7)
    assert play() == 7


def test_a_run_in_which_passes_were_recorded_is_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    target = recorded(Target(MODEL))
    loaded = LoadedTarget(target, tiny_tokenizer(), TargetRef(id="x", dtype="float64"), ())
    runs: list[int] = []
    once = engine.forced._run_once

    def noted(*args: Any) -> Any:
        runs.append(Recorder.n_recorded)
        return once(*args)

    monkeypatch.setattr(engine.forced, "_run_once", noted)
    trace = Trace("a", PROMPT, text(GREEDY))
    run_forced(SpeculativeDecoder(loaded), trace)
    run_forced(SpeculativeDecoder(loaded), trace)
    assert len(runs) == 3
    assert runs[0] < runs[1] == runs[2]
    before = Recorder.n_recorded
    assert len(reference_times(target, 3)) == 3
    assert Recorder.n_recorded == before  # the same pass of one token


class Events:
    """CUDA events on a clock of our own, in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, events: Events) -> None:
        self._events = events

    def record(self, stream: object) -> None:
        self.at = self._events.now

    def synchronize(self) -> None:
        self._events.waits += 1

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    events = Events()
    monkeypatch.setattr(torch.cuda, "Event", events.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    yield events


def test_laps_on_cuda_are_marks_in_the_queue(events: Events) -> None:
    """Nothing waits until the times are asked for, and then once."""
    clock = PhaseClock(torch.device("cuda:0"), detailed=False)
    for phase, ms in (("extend", 3.0), ("verify", 5.0), ("extend", 2.0)):
        events.now += ms
        clock.lap(phase)
    assert events.waits == 0
    assert clock.seconds == {"extend": pytest.approx(0.005), "verify": pytest.approx(0.005)}
    assert events.waits == 1
    events.now += 100.0
    clock.restart()
    events.now += 1.0
    clock.lap("verify")
    assert clock.seconds["verify"] == pytest.approx(0.006)


# --- on a device --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_graphs_decode_what_calls_do(dtype: torch.dtype) -> None:
    """On a GPU, in every dtype: the same rounds with CUDA graphs and without."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    model = tiny_model("llama", num_hidden_layers=3).to(device, dtype)
    results = []
    for record in (CallAgain(), CudaGraphs(device)):
        draft = Eagle3Draft(tiny_head(model).to(device, dtype))
        target = Target(model)
        target.record(record)
        draft.record(record)
        results.append([decoded(target, draft, tree, GREEDY) for tree in TREES])
    assert results[0] == results[1]
