"""The main job, from prompts to a proven profile. The file to read first."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from profiles import Profile, check_writable, measurements_path
from profiles.errors import SpectuneError

from .costing import measure_costs
from .job import Job, Models, look_again, prepare
from .plan import Plan, Stopwatch, plan_of
from .predicting import Predictor
from .probing import probe_drafts
from .progress import Silent
from .proving import choose_rungs, prove
from .racing import Race, contenders
from .reporting import report_path, write_job_report
from .search import Candidate, MeasuredStudy
from .serving import choose_serving
from .settings import Settings
from .texts import texts_path
from .tracing import Conversation, flatten, record_answers
from .writing import build_measurements, build_profile, save_all, study_path

MIN_ANSWER = 6
"""Tokens below which an answer leaves no round to time."""


def tune(
    models: Models,
    prompts: str | Path,
    out: str | Path,
    *,
    domain: str | None = None,
    settings: Settings | None = None,
    keep_text: bool = False,
    progress: Silent | None = None,
) -> Profile:
    """Find the fastest draft tree for these prompts, prove it, and write its profile.

    Args:
        models: Target and drafts; the best of the drafts is taken.
        prompts: The domain sample; see `autotune.prompts` for the shapes.
        out: The YAML file to write; measurements, study and report lie beside it.
        domain: Name of the domain; the sample's file name by default.
        settings: How much to look at.
        keep_text: Keep prompts and answers, in files that only their owner can read.
        progress: Told what is being done.

    Returns:
        The profile, as written.

    Raises:
        SpectuneError: Something asked for cannot be done; then no file has changed.
    """
    out, settings, progress = Path(out), settings or Settings(), progress or Silent()
    for path in (out, measurements_path(out), study_path(out), report_path(out), texts_path(out)):
        check_writable(path)
    watch = Stopwatch()

    with watch.step("prepare"):  # 1, 2: sample, models, device
        job = prepare(models, prompts, domain, settings, progress)
    progress.say(plan_of(job).text())

    with watch.step("trace"):  # 3: the target's own text
        texts = record_answers(job, job.sample.tune, progress, "Tracing")
        unseen = record_answers(job, job.sample.holdout, progress, "Tracing the holdout")
        _check_texts(texts)
        job = look_again(job, progress)

    with watch.step("probe"):  # which layers and which rotary base each head was trained with
        job, probes = probe_drafts(job, flatten(texts), progress)

    known = flatten(texts[: job.settings.n_replay])
    with watch.step("cost"):  # 4: what a round costs here
        costs = measure_costs(job, known, progress)

    with _unfinished_study(out) as study:
        with watch.step("search"):  # 5: every tree predicted, the best ones measured
            predictor = Predictor(job, known, costs)
            predicted = predictor.predict_all(progress)
            measured = _race(job, predictor, predicted, texts, study, progress)

        with watch.step("serving"):  # fixed or adaptive, and the guard's limits
            rungs = choose_rungs(measured)
            rest = texts[job.settings.n_replay :][: job.settings.n_race]
            servings = choose_serving(job, rungs, costs, known, rest or texts, progress)

        with watch.step("holdout"):  # 6: the proof, on prompts the search never saw
            proof = prove(job, rungs, servings, unseen, progress) if rungs and unseen else None

        profile = build_profile(  # 7
            job, probes, costs, predicted, measured, rungs, servings, proof, out
        )
        measurements = build_measurements(job, costs, predictor, predicted, measured, proof)
        save_all(profile, measurements, study, out)
    kept = {"tune": texts, "holdout": unseen} if keep_text else {}
    write_job_report(job, profile, measurements, kept, out, progress)
    progress.say(watch.text())
    return profile


def plan(
    models: Models,
    prompts: str | Path,
    *,
    settings: Settings | None = None,
    progress: Silent | None = None,
) -> Plan:
    """Return what a job would take, without running it; arguments as for `tune`."""
    settings, progress = settings or Settings(), progress or Silent()
    return plan_of(prepare(models, prompts, None, settings, progress))


def _race(
    job: Job,
    predictor: Predictor,
    predicted: Sequence[Candidate],
    texts: Sequence[Conversation],
    storage: Path,
    progress: Silent,
) -> list[Candidate]:
    """Measure the most promising trees on tune prompts."""
    settings = job.settings
    raced = texts[: settings.n_race]
    study = MeasuredStudy(
        job.spaces, predictor.predict, storage=storage, name=job.study_name, seed=settings.seed
    )
    first = contenders(predicted, job.spaces, predictor)
    with progress.step("Measuring trees", settings.n_trials) as tick:
        return study.run(first, Race(job, raced).measure, settings.n_trials, len(raced), tick)


def _check_texts(conversations: Sequence[Conversation]) -> None:
    """Refuse to tune on answers that leave nothing to speed up."""
    if not any(len(trace.generated) >= MIN_ANSWER for trace in flatten(conversations)):
        raise SpectuneError(
            f"tuning needs answers of at least {MIN_ANSWER} tokens, but the target gives none on "
            "the tune prompts; raise max_new_tokens, or check the prompts and the chat template"
        )


@contextmanager
def _unfinished_study(out: Path) -> Iterator[Path]:
    """Give the study a file that takes its final name with the profile, or goes without one."""
    storage = out.with_name(f".{out.stem}.{os.getpid()}.study.log")
    _remove_leftovers(out)
    try:
        yield storage
    finally:
        for left_over in out.parent.glob(f"{storage.name}*"):
            left_over.unlink()


def _remove_leftovers(out: Path) -> None:
    """Remove unfinished studies of jobs that were killed."""
    for left_over in out.parent.glob(f".{out.stem}.*.study.log*"):
        pid = left_over.name.removeprefix(f".{out.stem}.").partition(".")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            left_over.unlink()
