"""What a job leaves that is killed, meets a full disk, or is not alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotune.pipeline
import autotune.report.page
from autotune import Models, tune
from autotune.commands.cli import main
from autotune.report.job_report import report_path
from autotune.study_files import study_home
from killing import TINY
from pairs import save_target, write_prompts
from profiles import load, load_measurements_of, measurements_path
from profiles.errors import SpectuneError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "n_kills", [pytest.param(5, id="few"), pytest.param(100, id="many", marks=pytest.mark.soak)]
)
@pytest.mark.timeout(1500)
def test_b31_killed_at_any_moment_a_job_leaves_whole_files_and_is_gone_on_with(
    n_kills: int, tmp_path: Path
) -> None:
    pictures = ["--pictures"] if n_kills > 10 else []
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "killing.py", tmp_path, str(n_kills), "0", *pictures],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["faults"], (found["faults"], done.stderr[-3000:])
    assert found["killed"] >= n_kills, found
    assert found["job_s"] < 15


HOLDER = """
import time
from pathlib import Path
from autotune.study_files import study_home
with study_home(Path({out!r}), None, resume=False):
    print("held", flush=True)
    time.sleep(600)
"""


def test_b35_a_second_job_is_refused_and_a_killed_ones_lock_holds_nobody_up(
    tmp_path: Path,
) -> None:
    out = tmp_path / "x.yaml"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(out=str(out))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    started = time.monotonic()
    with pytest.raises(SpectuneError, match="another is at"), study_home(out, None, resume=False):
        pass
    assert time.monotonic() - started < 2
    other.send_signal(signal.SIGKILL)
    other.wait()
    other.stdout.close()
    with study_home(out, None, resume=False):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill")
    save_target(folder / "target")
    write_prompts(folder / "prompts.jsonl")
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 300 kB of its own; skipped where it cannot be had."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can only be mounted by root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, but: int = 0) -> None:
    """Leave so many bytes on a disk."""
    n_free = shutil.disk_usage(disk).free - but
    if n_free > 0:
        (disk / "filler").write_bytes(bytes(n_free))


def run_job(pair: Path, out: Path, *, resume: bool = False) -> None:
    models = Models(str(pair / "target"), ["lookup"], "float32", "cpu")
    tune(models, pair / "prompts.jsonl", out, settings=TINY, resume=resume)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])


def test_b31_a_full_disk_ends_a_job_in_a_sentence_and_the_job_goes_on_when_there_is_room(
    pair: Path, small_disk: Path
) -> None:
    out = small_disk / "x.yaml"
    fill(small_disk, but=8192)
    with pytest.raises(SpectuneError, match="No space left") as caught:
        run_job(pair, out)
    assert "\n" not in str(caught.value)
    (small_disk / "filler").unlink()
    run_job(pair, out, resume=True)
    search = load(out).search
    assert search is not None and search.measured == TINY.n_trials
    assert not list(small_disk.glob(".*"))


def test_b31_a_disk_that_is_full_at_the_end_leaves_the_profile_that_was_there(
    pair: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = small_disk / "x.yaml"
    run_job(pair, out)
    before = out.read_bytes(), report_path(out).read_bytes()
    save_all = autotune.pipeline.save_all

    def with_a_full_disk(*arguments: object) -> object:
        fill(small_disk)
        return save_all(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(autotune.pipeline, "save_all", with_a_full_disk)
        with pytest.raises(SpectuneError, match=r"cannot be written \(No space left"):
            run_job(pair, out)
    assert (out.read_bytes(), report_path(out).read_bytes()) == before
    assert load_measurements_of(load(out), out) is not None
    (small_disk / "filler").unlink()
    run_job(pair, out, resume=True)
    assert not list(small_disk.glob(".*"))


def test_b31_what_cannot_be_written_is_refused_before_any_work(
    pair: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    options = ["--target", str(pair / "target"), "--prompts", str(pair / "prompts.jsonl")]
    started = time.monotonic()
    assert main(["tune", *options, "--out", str(small_disk / "x.yaml")]) == 1
    assert time.monotonic() - started < 2
    message = capsys.readouterr().err
    assert "cannot be written (Read-only file system)" in message
    assert message.count("\n") == 1


def test_measurements_of_another_job_are_not_taken_for_a_profiles_own(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "x.yaml", tmp_path / "y.yaml"
    run_job(pair, out)
    run_job(pair, other)
    shutil.copyfile(measurements_path(other), measurements_path(out))
    assert main(["check", str(out)]) == 1
    assert "must be its own" in capsys.readouterr().err
    assert main(["show", str(out)]) == 0
    assert "showing the profile alone" in capsys.readouterr().err
    assert main(["what-if", str(out)]) == 1
