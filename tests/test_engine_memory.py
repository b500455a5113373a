"""Memory: what is free, what decoding needs, and what is refused or left out for want of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from optuna.trial import TrialState

import engine.memory
from autotune.cost import Prediction
from autotune.job import Models, prepare
from autotune.progress import Silent
from autotune.search import MeasuredStudy
from autotune.settings import Settings
from autotune.space import SearchSpace
from engine.batch import BatchRound
from engine.batch_cache import BatchCache
from engine.decode import Round
from engine.decoder import SpeculativeDecoder
from engine.draft import Draft
from engine.eagle3_draft import Eagle3Draft
from engine.hybrid import HybridDraft
from engine.loading import load_model
from engine.lookup import LookupDraft
from engine.memory import RESERVE, Need, Room, check_weights_fit, free_bytes, need_of
from engine.model_draft import ModelDraft
from engine.pair import LoadedTarget
from engine.suffix import SuffixDraft
from engine.target import Target
from pairs import save_target, write_prompts
from profiles import PLAIN, TargetRef, TreeConfig
from profiles.errors import SpectuneError
from tiny import VOCAB, tiny_head, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
MODEL = tiny_model(num_hidden_layers=2)
TARGET = Target(MODEL)
TREE = TreeConfig(depth=3, width=2, top_k=3, nodes=9)
DEEP = TreeConfig(depth=8, width=4, top_k=4, nodes=64)
GIB = 2**30


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets how many bytes are free beside the reserve."""
    monkeypatch.setattr(engine.memory, "cgroup_limits", list)

    def set_free(n_bytes: int) -> None:
        available = SimpleNamespace(available=n_bytes + RESERVE)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: available)

    return set_free


def test_a_process_may_use_what_is_available_within_its_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = psutil.Process().memory_info().rss
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    monkeypatch.setattr(engine.memory, "cgroup_limits", lambda: [used + 9 * GIB, 99 * GIB])
    assert free_bytes(CPU) == pytest.approx(9 * GIB - RESERVE, rel=0.01)
    monkeypatch.setattr(engine.memory, "cgroup_limits", lambda: [1])
    assert free_bytes(CPU) == 0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that lets there be GPUs with so many free bytes beside the reserve."""

    def set_free(*n_bytes: int, held: int = 0) -> None:
        def free_and_all(device: torch.device) -> tuple[int, int]:
            assert device.index is not None
            return n_bytes[device.index] + RESERVE, 80 * GIB

        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(n_bytes))
        monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_all)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    return set_free


def test_what_torch_holds_unused_on_a_gpu_is_free(gpus: Any) -> None:
    gpus(3 * GIB, 5 * GIB, held=GIB)
    assert free_bytes(torch.device("cuda:1")) == 6 * GIB


# --- the estimate -------------------------------------------------------------------------------


def test_bytes_by_hand() -> None:
    """A prefill of 10 tokens against a round of 9 nodes over 2 x 3 expanded ones."""
    need = Need(token=100, row=10, score=1000, draft_row=50)
    caches = (10 + 64) * 100
    assert need.bytes(10) == caches + max(10 * (10 + 5 * 10), 1010)
    assert need.bytes(10, TREE) == caches + 10 * 1010 + 6 * 50


def test_rows_by_hand() -> None:
    """Thrice the caches, a round of 9 nodes over 2 x 3 expanded ones; one prompt beside them."""
    need = Need(token=100, row=10, score=1000, draft_row=50)
    row = 3 * (10 + 64) * 100 + 10 * (1010 + 5 * 10) + 6 * 50
    one = need.bytes(10, TREE)
    assert need.most_rows(10, TREE, one + 4 * row) == 4
    assert need.most_rows(10, TREE, one + 4 * row - 1) == 3
    assert need.most_rows(10, TREE, 0) == 0
    assert Room(need, 10, free=0).rows(TREE) == 1


@torch.inference_mode()
def test_a_batch_allocates_no_more_than_was_estimated() -> None:
    need, n_rows, n_tokens = need_of(TARGET), 6, 200
    batch = BatchCache(MODEL.config.num_hidden_layers, n_rows, CPU)
    for _ in range(n_rows):
        cache = TARGET.new_cache(n_tokens)
        TARGET.forward([5] * 90, cache, last_only=True)
        batch.join(cache)
    for _ in range(n_tokens - 90):  # row by row longer, so that room is made again and again
        tokens = torch.full((n_rows,), 5)
        masks = [torch.ones(1, 1, dtype=torch.bool)] * n_rows
        positions = torch.tensor(batch.lengths)
        TARGET.forward_rows(tokens, positions, masks, batch)
        batch.keep_paths([[0]] * n_rows)
    held = sum(t.numel() * t.element_size() for x in batch.layers for t in (x.keys, x.values))
    row = need.most_rows(n_tokens, PLAIN, need.bytes(n_tokens) + 2**40)
    assert held < n_rows * 2**40 / row


@pytest.mark.parametrize("free", [0, 10**6, 10**9, 10**12])
def test_the_longest_text_is_the_longest_that_fits(free: int) -> None:
    need = need_of(TARGET)
    longest = need.longest(free)
    assert need.bytes(longest) <= max(free, need.bytes(0)) or longest == 0
    assert need.bytes(longest + 1) > free


def drafts() -> dict[str, Draft]:
    head = Eagle3Draft(tiny_head(MODEL))
    suffix = SuffixDraft()
    return {
        "lookup": LookupDraft(),
        "head": head,
        "hybrid": HybridDraft(head, suffix, match_nodes=4, match_tau=2.0),
        "model": ModelDraft(tiny_model("qwen3", 1, num_hidden_layers=1), VOCAB),
    }


@torch.inference_mode()
def test_a_token_costs_what_the_caches_allocate_for_it() -> None:
    """Compared with the bytes of real caches, and of the features of a real pass."""
    for draft in (None, *drafts().values()):
        layers = () if draft is None else draft.feature_layers
        cache, tokens = TARGET.new_cache(32), list(range(3, 35))
        _, features = TARGET.forward(tokens, cache, last_only=True, feature_layers=layers)
        caches = [cache]
        head = draft.head if isinstance(draft, HybridDraft) else draft
        if isinstance(head, Eagle3Draft | ModelDraft):
            caches.append(head.new_cache(32))
            head.extend(tokens, features, caches[-1], last_only=True)
        held = [t for each in caches for layer in each.layers for t in (layer.keys, layer.values)]
        held += [] if features is None else [features]
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
        assert need_of(TARGET, draft).token == n_bytes / 32


def test_more_nodes_width_or_text_never_need_less() -> None:
    for draft in drafts().values():
        need = need_of(TARGET, draft)
        sizes = [need.bytes(50, tree) for tree in (PLAIN, TreeConfig.chain(1), TREE, DEEP)]
        assert sizes == sorted(sizes)
        assert need.bytes(5000, TREE) > need.bytes(500, TREE)


# --- serving ------------------------------------------------------------------------------------


def decoder(draft: Draft, tree: TreeConfig) -> SpeculativeDecoder:
    ref = TargetRef(id="tiny", dtype="float64")
    return SpeculativeDecoder(LoadedTarget(TARGET, tiny_tokenizer(), ref, ()), draft, tree)


PROMPT, N_NEW = [5, 6, 7, 5, 6], 12


def answer(draft: Draft, tree: TreeConfig) -> tuple[list[int], list[Round]]:
    made = decoder(draft, tree)
    request = made.request(PROMPT, max_new_tokens=N_NEW)
    rounds = []
    for _ in made.run(request):
        rounds += [] if request.last_round is None else [request.last_round]
    return request.generated, rounds


def test_a_tree_that_does_not_fit_is_decoded_plainly(memory: Any) -> None:
    """The text is the same; with a byte less than plain decoding needs there is a sentence."""
    head = drafts()["head"]
    plain, wanted = (need_of(TARGET, head).bytes(len(PROMPT) + N_NEW, t) for t in (PLAIN, DEEP))
    memory(wanted)
    expected, rounds = answer(head, DEEP)
    assert any(not done.tree.is_plain for done in rounds)
    memory(wanted - 1)
    found, rounds = answer(head, DEEP)
    assert found == expected
    assert all(done.tree.is_plain for done in rounds)
    memory(need_of(TARGET).bytes(len(PROMPT) + N_NEW) - 1)
    assert need_of(TARGET).bytes(len(PROMPT) + N_NEW) <= plain
    with pytest.raises(SpectuneError, match=r"but 17 tokens need .* of .* that are free"):
        answer(head, DEEP)


def test_no_more_prompts_are_in_flight_than_fit(memory: Any) -> None:
    head = drafts()["head"]
    need, n_tokens = need_of(TARGET, head), len(PROMPT) + N_NEW
    memory(2**40)
    prompts, options = [[*PROMPT, i] for i in range(5)], {"max_new_tokens": N_NEW - 1}
    expected = decoder(head, DEEP).generate_many(prompts, batch_size=4, **options)
    per_gb = need.most_rows(n_tokens, DEEP, need.bytes(n_tokens, DEEP) + 10**9)
    memory(need.bytes(n_tokens, DEEP) + 5 * 10**9 // (2 * per_gb))
    made = decoder(head, DEEP)
    rounds: list[BatchRound] = []
    requests = [made.request(prompt, index=i, **options) for i, prompt in enumerate(prompts)]
    made.run_many(requests, 4, lambda done, seconds: rounds.append(done))
    found = [made.result(request) for request in requests]
    assert max(done.n_rows for done in rounds) == 2
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    assert made.generate_many([], batch_size=4) == []


# --- tuning -------------------------------------------------------------------------------------


def space(max_nodes: int) -> SearchSpace:
    """Return a space in which only trees of at most so many nodes fit."""
    need = Need(token=0, row=0, score=1)
    return SearchSpace(6, 4, 4, 64, room=Room(need, 0, free=max_nodes + 1))


class Track:
    """Runs everything in no time, and notes the trees."""

    n_prompts = 3

    def __init__(self) -> None:
        self.trees: set[TreeConfig] = set()

    def seconds(self, prompt: int, draft: str, tree: TreeConfig) -> float:
        self.trees.add(tree)
        return 1.0 if tree.is_plain else 1 / (1 + 0.01 * tree.nodes)


def test_trees_that_do_not_fit_are_outside_the_space() -> None:
    small, whole = space(16), SearchSpace(6, 4, 4, 64)
    trees = set(small.enumerate())
    assert trees == {tree for tree in whole.enumerate() if small.contains(tree)}
    assert 0 < max(tree.nodes for tree in trees) < 64
    assert small == whole  # a bound of the moment: a study goes on whatever is free
    assert small.ranges == whole.ranges


def test_the_search_marks_what_does_not_fit_and_goes_on() -> None:
    """Better trees lie beyond the memory: Optuna's proposals of them are pruned, not measured."""
    spaces, track = {"head": space(16)}, Track()
    study = MeasuredStudy(
        spaces, lambda draft, tree: Prediction(2.0, 1.0), storage=None, name="x", seed=0
    )
    measured = study.run([], track, 8)
    assert len(measured) == 8
    assert all(spaces["head"].contains(tree) for tree in track.trees)
    marked = [t for t in study._study.get_trials() if "infeasible" in t.user_attrs]
    assert marked
    assert {trial.state for trial in marked} == {TrialState.PRUNED}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("pair") / "target")


def prepared(folder: Path, tmp_path: Path, **changes: Any) -> Any:
    settings = Settings(n_tune=4, n_holdout=4, max_new_tokens=8, **changes)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    models = Models(str(folder), ["lookup"], "float32", "cpu")
    return prepare(models, prompts, "x", settings, Silent())


def test_a_job_searches_what_fits(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for plain decoding and little more, found after the weights are read."""
    job = prepared(target_folder, tmp_path)
    assert job.spaces["lookup"].contains(TreeConfig(depth=16, width=4, top_k=4, nodes=64))
    need, lengths = need_of(job.loaded.target), [len(p.token_ids) for p in job.sample.tune]
    tokens = max(lengths + [len(p.token_ids) for p in job.sample.holdout]) + 8
    few = TreeConfig.chain(3)
    for name in ("engine.memory.free_bytes", "autotune.job.free_bytes"):
        monkeypatch.setattr(name, lambda device: max(need.bytes(tokens, few), 10**6))
    job = prepared(target_folder, tmp_path)
    free = job.spaces["lookup"].room.free
    for tree in SearchSpace(16, 4, 4, 64).enumerate():
        assert job.spaces["lookup"].contains(tree) == (need.bytes(tokens, tree) <= free)
    for name in ("engine.memory.free_bytes", "autotune.job.free_bytes"):
        monkeypatch.setattr(name, lambda device: 10)
    monkeypatch.setattr("engine.loading.check_weights_fit", lambda *args: None)
    with pytest.raises(SpectuneError, match=r"plain decoding must fit the memory of cpu, but 0\."):
        prepared(target_folder, tmp_path)


# --- weights ------------------------------------------------------------------------------------


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(
    target_folder: Path, memory: Any
) -> None:
    memory(1000)
    with pytest.raises(SpectuneError, match=r"target in float64 needs .* and cpu has 0\.00 GiB"):
        load_model(str(target_folder), dtype="float64", device="cpu")
    memory(GIB)
    load_model(str(target_folder), dtype="float64", device="cpu")


def outline() -> torch.nn.Module:
    """Return a model of 3 GiB in bfloat16 that has no memory."""
    with torch.device("meta"):
        return torch.nn.Linear(2**15, 3 * 2**14, bias=False)


@pytest.mark.parametrize(
    ("free", "remedy"),
    [
        ((2 * GIB,), "use a smaller model or dtype, or free memory"),
        ((2 * GIB, GIB // 2), "use a smaller model or dtype, or free memory"),
        ((2 * GIB, 4 * GIB), "use --device cuda:1, which has room"),
        ((2 * GIB, 2 * GIB), "it needs several GPUs at once"),
    ],
)
def test_a_model_too_large_for_one_gpu_is_told_where_to_go(
    gpus: Any, free: tuple[int, ...], remedy: str
) -> None:
    gpus(*free)
    device = torch.device("cuda:0")
    message = r"big in bfloat16 needs 3\.00 GiB and cuda:0 has 2\.00"
    with pytest.raises(SpectuneError, match=message) as refusal:
        check_weights_fit(outline(), "big", torch.bfloat16, device)
    assert remedy in str(refusal.value)
    gpus(3 * GIB)
    check_weights_fit(outline(), "big", torch.bfloat16, device)


def test_packed_weights_are_counted_twice(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine.memory, "held_twice", lambda shape, device, dtype: dtype.itemsize == 4
    )
    memory(7 * GIB)
    with pytest.raises(SpectuneError, match=r"12\.00 GiB"):
        check_weights_fit(outline(), "big", torch.float32, CPU)
    check_weights_fit(outline(), "big", torch.float16, CPU)
