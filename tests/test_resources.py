"""What a job takes it gives back: memory, open files, threads, processes, temporary files."""

import gc
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

import autotune.report.page
from autotune import Models, Settings, tune
from autotune.candidates import Candidate
from autotune.cost import Prediction
from autotune.job import prepare
from autotune.progress import Silent
from autotune.racing import ForcedTrack
from autotune.search import MeasuredStudy
from autotune.tracing import record_answers
from engine.decoder import SpeculativeDecoder
from engine.pair import load_target
from pairs import save_noisy_copy, save_target, write_prompts
from profiles import TreeConfig

TINY = Settings(
    **{"n_tune": 2, "n_holdout": 4, "n_race": 2, "max_new_tokens": 10, "n_trials": 3},
    **{"n_probe_rounds": 1, "max_nodes": 4, "max_depth": 2, "max_lookup_depth": 3},
)
N_TRIALS = 200


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resources")
    save_noisy_copy(save_target(folder / "target"), folder / "noisy")
    write_prompts(folder / "prompts.jsonl")
    return folder


def run_job(pair: Path, out: Path, *, storage: str | None = None) -> None:
    drafts = ["lookup", str(pair / "noisy")]
    models = Models(str(pair / "target"), drafts, "float32", "cpu")
    tune(models, pair / "prompts.jsonl", out, settings=TINY, storage=storage)


def held() -> dict[str, object]:
    """Return what this process holds of the system."""
    gc.collect()
    process = psutil.Process()
    return {
        "files": {file.path for file in process.open_files()},
        "descriptors": process.num_fds(),
        "connections": len(process.net_connections()),
        "children": [child.pid for child in process.children(recursive=True)],
        "threads": {thread.name for thread in threading.enumerate()},
    }


@pytest.mark.parametrize("where", ["journal", "database"])
def test_jobs_leave_nothing_open_and_nothing_behind(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])
    scratch, out = tmp_path / "scratch", tmp_path / "out" / "x.yaml"
    scratch.mkdir()
    out.parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    storage = f"sqlite:///{tmp_path}/studies.db" if where == "database" else None
    run_job(pair, out, storage=storage)  # the first one imports and warms up
    before = held()
    for _ in range(2):
        run_job(pair, out, storage=storage)
    assert held() == before
    assert list(scratch.iterdir()) == []
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.soak
def test_memory_is_flat_over_200_trials(pair: Path) -> None:
    """Resident memory of the second half of a study stays within 5 % of the first half's end."""
    models = Models(str(pair / "target"), ["lookup", str(pair / "noisy")], "float32", "cpu")
    settings = Settings(n_tune=3, n_holdout=1, max_new_tokens=24, max_nodes=64)
    job = prepare(models, pair / "prompts.jsonl", "x", settings, Silent())
    texts = record_answers(job, job.sample.tune, Silent(), "")
    process, used = psutil.Process(), []

    def tick() -> None:
        used.append(process.memory_info().rss)

    study = MeasuredStudy(
        job.spaces, lambda *_: Prediction(2.0, 1.0), storage=None, name="x", seed=0
    )
    trees = list(job.spaces["lookup"].enumerate())
    step = len(trees) // N_TRIALS
    first = [
        Candidate("lookup" if i % 2 else str(pair / "noisy"), tree, Prediction(2.0, 1.0))
        for i, tree in enumerate(trees[:: max(1, step)])
    ]
    study.run(first[: N_TRIALS // 2], ForcedTrack(job, texts, tick), N_TRIALS // 2)
    half = len(used)
    measured = study.run([], ForcedTrack(job, texts, tick), N_TRIALS)
    assert len(measured) == N_TRIALS
    growth = max(used[half:]) / max(used[half // 2 : half]) - 1
    assert growth < 0.05, f"{used[-1] / 2**20:.0f} MiB, {100 * growth:.2f} % more"


@pytest.mark.soak
def test_memory_is_flat_over_2000_requests(pair: Path) -> None:
    loaded = load_target(str(pair / "target"), dtype="float32", device="cpu")
    process, used = psutil.Process(), []
    from engine.pair import load_draft

    draft = load_draft("suffix", loaded).variant(history=500).draft
    decoder = SpeculativeDecoder(loaded, draft, TreeConfig(depth=4, width=2, top_k=2, nodes=8))
    for i in range(2000):
        decoder.generate([70 + i % 20, 71, 72, 70, 71], max_new_tokens=16, seed=i)
        if i % 20 == 0:
            used.append(process.memory_info().rss)
    growth = max(used[50:]) / max(used[25:50]) - 1
    assert growth < 0.05, f"{used[-1] / 2**20:.0f} MiB, {100 * growth:.2f} % more"
