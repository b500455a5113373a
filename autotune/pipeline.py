"""The main job, from prompts to a proven profile. The file to read first."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from profiles import JobSummary, Profile, check_writable, measurements_path
from profiles.errors import SpectuneError, UsageError
from profiles.io import remove_leftovers

from .batches.schedule import BatchResults, tune_batches
from .batches.trying import larger_sizes
from .cost.predicting import Predictor
from .cost.timing import measure_costs
from .job import Models, look_again, prepare
from .measuring import measure_trees
from .plan import Pace, Plan, Stopwatch, agree, cuts, first_pace, plan_of
from .probing import probe_drafts
from .progress import Silent
from .proving import choose_rungs, prove
from .report.job_report import report_path, write_job_report
from .search.workers import FINISH, workers_of
from .serving import choose_serving
from .settings import Settings
from .study_files import study_home, study_path
from .texts import texts_path
from .tracing import Conversation, flatten, record_answers
from .variants import with_variants
from .writing import PROFILE, build_measurements, build_profile, save_all, write_theirs

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
    storage: str | None = None,
    resume: bool = False,
    study: str | None = None,
    budget_s: float | None = None,
    progress: Silent | None = None,
) -> Profile:
    """Find the fastest draft tree for these prompts, prove it, and write its profile.

    Args:
        models: Target and drafts; the best of the drafts is taken.
        prompts: The domain sample; see `autotune.sample.prompts` for the shapes.
        out: The YAML file to write; measurements, study and report lie beside it.
        domain: Name of the domain; the sample's file name by default.
        settings: How much to look at.
        keep_text: Keep prompts and answers, in files that only their owner can read.
        storage: Optuna URL of the study; a journal file beside the profile by default.
        resume: Go on with the study that a stopped job of the same inputs left.
        study: Name of a study in `storage` that several workers share: each measures a part of
            it, one of them finishes it, and all of them write its profile.
        budget_s: Seconds that the job's plan must fit; counts are cut to that end.
        progress: Told what is being done.

    Returns:
        The profile, as written.

    Raises:
        SpectuneError: Something asked for cannot be done; then no file has changed but the study.
    """
    out, settings, progress = Path(out), settings or Settings(), progress or Silent()
    check_writable(out, prompts)
    beside = [place(out) for place in (measurements_path, study_path, report_path, texts_path)]
    for path in beside:
        check_writable(path, prompts)
    watch = Stopwatch()
    if study is not None and budget_s is not None:
        raise UsageError(
            "the workers of a study must measure the same, but a budget cuts each one's counts by "
            "its own pace; leave it out, and give counts such as --trials instead"
        )

    with study_home(out, storage, resume=resume, study=study) as home, ExitStack() as finishing:
        for path in (out, *beside):
            remove_leftovers(path)
        workers = workers_of(home, progress)
        with watch.step("prepare"):  # 1, 2: sample, models, device
            job = prepare(models, prompts, domain, settings, progress)
            pace = first_pace(job)
        job, planned = agree(job, pace, watch.seconds, budget_s, progress)
        workers.join(job.identity)
        timing = partial(workers.alone_on, job.loaded.target.device)
        if workers.is_done(FINISH):
            return write_theirs(workers, out, progress)

        with watch.step("trace"):  # 3: the target's own text
            texts = record_answers(job, job.sample.tune, progress, "Tracing")
            unseen = record_answers(job, job.sample.holdout, progress, "Tracing the holdout")
            _check_texts(texts)
        pace = Pace.of(watch.seconds["trace"], [*texts, *unseen])
        progress.say(plan_of(job, pace, watch.seconds).text("With the text recorded"))
        job = look_again(job, progress)

        with watch.step("probe"):  # which layers and rotary base each head was trained with
            job, probes = probe_drafts(job, flatten(texts), progress)
            job = with_variants(job)

        known = flatten(texts[: job.settings.n_replay])
        with watch.step("cost"), timing():  # 4: what a round costs here
            costs = measure_costs(job, known, progress)

        with watch.step("search"):  # 5: every tree predicted, the best ones measured
            predictor = Predictor(job, known, costs)
            predicted = predictor.predict_all(progress)
            measured = measure_trees(job, predictor, predicted, texts, home, workers, progress)

        if not finishing.enter_context(workers.once(FINISH)):  # one of them does the rest
            return write_theirs(workers, out, progress)

        with watch.step("serving"), timing():  # fixed or adaptive, and the guard's limits
            rungs = choose_rungs(measured)
            rest = (texts[job.settings.n_replay :] or texts)[: job.settings.n_race]
            servings = choose_serving(job, rungs, costs, known, rest, progress)

        with watch.step("holdout"), timing():  # 6: the proof, on prompts the search never saw
            proof = prove(job, rungs, servings, unseen, progress) if rungs and unseen else None

        batches = BatchResults()
        if larger_sizes(job.settings):
            with watch.step("batches"), timing():  # several prompts at a time: chosen, then proved
                batches = tune_batches(job, measured, proof, texts, unseen, progress)

        took = JobSummary(
            planned_s=planned.total_s, seconds=watch.seconds, cut=cuts(settings, job.settings)
        )
        profile = build_profile(  # 7
            job,
            probes,
            costs,
            predicted,
            measured,
            rungs,
            servings,
            proof,
            batches,
            out,
            home,
            took,
        )
        measurements = build_measurements(
            job, costs, predictor, predicted, measured, proof, batches
        )
        profile = save_all(profile, measurements, home.storage, out)
        workers.keep(FINISH, PROFILE, profile.model_dump(mode="json"))
    kept = {"tune": texts, "holdout": unseen} if keep_text else {}
    write_job_report(job.loaded.tokenizer, profile, measurements, kept, out, progress)
    progress.say(watch.text())
    return profile


def plan(
    models: Models,
    prompts: str | Path,
    *,
    settings: Settings | None = None,
    budget_s: float | None = None,
    progress: Silent | None = None,
) -> Plan:
    """Return what a job would take, without running it; arguments as for `tune`."""
    settings, progress = settings or Settings(), progress or Silent()
    watch = Stopwatch()
    with watch.step("prepare"):
        job = prepare(models, prompts, None, settings, progress)
        pace = first_pace(job)
    return agree(job, pace, watch.seconds, budget_s, Silent())[1]


def _check_texts(conversations: Sequence[Conversation]) -> None:
    """Refuse to tune on answers that leave nothing to speed up."""
    if not any(len(trace.generated) >= MIN_ANSWER for trace in flatten(conversations)):
        raise SpectuneError(
            f"tuning needs answers of at least {MIN_ANSWER} tokens, but the target gives none on "
            "the tune prompts; raise max_new_tokens, or check the prompts and the chat template"
        )
