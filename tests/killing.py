"""Kill tuning jobs at random moments and look at what they leave; run by `test_kill.py`.

    python killing.py FOLDER N_KILLS SEED [--pictures]

Every job runs in a fork of this process, so that a kill costs no import. Prints one JSON document.
Without pictures, whose drawing takes most of such a job, reports are made of words.
"""

import json
import os
import random
import signal
import stat
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import optuna  # noqa: E402

import autotune.report.page  # noqa: E402
from autotune import Models, Settings, tune  # noqa: E402
from autotune.report.job_report import report_path  # noqa: E402
from autotune.study_files import study_path, unfinished_path  # noqa: E402
from autotune.texts import load_texts, texts_path  # noqa: E402
from pairs import save_target, write_prompts  # noqa: E402
from profiles import load, load_measurements, load_measurements_of, measurements_path  # noqa: E402
from profiles.errors import SpectuneError  # noqa: E402

TINY = Settings(
    **{"n_tune": 3, "n_holdout": 4, "n_race": 3, "max_new_tokens": 8, "n_trials": 5},
    **{"n_probe_rounds": 1, "max_nodes": 6, "max_depth": 3, "max_lookup_depth": 4},
)
MOST_KILLS_IN_A_ROW = 3


def run(folder: Path, out: Path, *, resume: bool, kill_after: float | None = None) -> int:
    """Run a job in a child and return its exit status; kill it after so many seconds."""
    child = os.fork()
    if child == 0:
        try:
            models = Models(str(folder / "target"), ["lookup"], "float32", "cpu")
            tune(
                models,
                folder / "prompts.jsonl",
                out,
                settings=TINY,
                resume=resume,
                keep_text=True,
            )
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def look(out: Path) -> list[str]:
    """Return what is wrong with the files of a job that was killed."""
    faults = []
    profile = None
    if out.exists():
        profile = load(out)
        try:
            load_measurements_of(profile, out)
        except SpectuneError as error:
            if "must be its own" not in str(error):  # said of an older profile, and right
                raise
    if measurements_path(out).exists():
        load_measurements(measurements_path(out))
    report = report_path(out)
    if report.exists():
        text = report.read_text("utf-8")
        if not text.rstrip().endswith("</html>"):
            faults.append("the report is cut off")
        if profile is None or f"{profile.created:%Y-%m-%d %H:%M:%S}" not in text:
            faults.append("the report is of another job")
    if texts_path(out).exists():
        load_texts(texts_path(out))
        if stat.S_IMODE(texts_path(out).stat().st_mode) != 0o600:
            faults.append("kept texts are not private")
    return faults


def look_at_the_end(out: Path) -> list[str]:
    """Return what is wrong with the files of a job that ended well after others were killed."""
    faults = look(out)
    profile = load(out)
    measured = [(m.draft, m.tree) for m in load_measurements(measurements_path(out)).measured]
    if profile.search is None or profile.search.measured != TINY.n_trials:
        faults.append(f"{profile.search} instead of {TINY.n_trials} trees measured")
    if len(set(measured)) != len(measured):
        faults.append("a tree was measured twice")
    study = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(study_path(out)))
    )
    last = max(study.get_all_studies(), key=lambda s: s._study_id)
    states = {trial.state.name for trial in study.get_all_trials(last._study_id)}
    if "RUNNING" in states:  # what was queued and not needed may wait
        faults.append(f"trials are left {states}")
    expected = {out, measurements_path(out), study_path(out), report_path(out), texts_path(out)}
    if strange := set(out.parent.iterdir()) - expected:
        faults.append(f"left behind: {sorted(path.name for path in strange)}")
    return faults


def main(folder: Path, n_kills: int, seed: int) -> dict[str, Any]:
    """Kill `n_kills` jobs, each time up to three in a row before one may end."""
    rng = random.Random(seed)
    save_target(folder / "target")
    write_prompts(folder / "prompts.jsonl")
    out = folder / "out" / "x.yaml"
    out.parent.mkdir()
    started = time.monotonic()
    faults = [] if run(folder, out, resume=False) == 0 else ["the first job failed"]
    job_s = time.monotonic() - started
    n_killed, n_too_late, kept_studies = 0, 0, 0
    while n_killed < n_kills and n_too_late < n_kills:
        resume = False  # a new study over the finished job, gone on with until it ends
        for _ in range(rng.randint(1, MOST_KILLS_IN_A_ROW)):
            moment = rng.uniform(0, job_s)
            status = run(folder, out, resume=resume, kill_after=moment)
            killed = os.WIFSIGNALED(status)
            n_killed, n_too_late = n_killed + killed, n_too_late + (not killed)
            kept_studies += unfinished_path(out).exists()
            faults += [f"killed after {moment:.3f} s: {fault}" for fault in look(out)]
            resume = True
        if run(folder, out, resume=True) != 0:
            faults.append("the job that was let run has failed")
        faults += look_at_the_end(out)
    return {
        "faults": faults,
        "killed": n_killed,
        "too_late": n_too_late,
        "studies_left": kept_studies,
        "job_s": job_s,
    }


if __name__ == "__main__":
    if "--pictures" not in sys.argv:
        autotune.report.page.sections = lambda *_: []
    json.dump(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), sys.stdout)
