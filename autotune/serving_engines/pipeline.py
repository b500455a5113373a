"""The main job on a serving engine, from prompts to a proven profile; `autotune.pipeline` is that
on our own.
"""

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from profiles import (
    JobSummary,
    Noise,
    Profile,
    check_writable,
    measurements_path,
)

from ..plan import Plan, Stopwatch
from ..proving import Proof, choose_rungs
from ..report.job_report import report_path, write_job_report
from ..steady import noise_of, noise_warning
from ..study_files import study_home
from ..texts import texts_path
from ..writing import save_all
from .interface import Served, ServingEngine
from .job import ServerJob, prepare, start
from .planning import plan_of
from .proving import prove
from .recording import record_on
from .searching import measure_settings
from .turns import units_of
from .writing import build_server_measurements, build_server_profile

if TYPE_CHECKING:
    from ..candidates import Candidate
    from ..job import Models
    from ..progress import Silent
    from ..settings import Settings
    from .turns import Unit

N_FIXED = 12
"""Runs of the fixed text that tell how steady the machine is."""

N_PACE = 2
"""Prompts answered before the plan is made."""


@dataclass(frozen=True)
class ServerOptions:
    """How the servers of a job are run.

    Attributes:
        concurrency: Requests served at once.
        arguments: Further arguments of theirs.
    """

    concurrency: int = 1
    arguments: tuple[str, ...] = ()


def tune_server(
    engine: ServingEngine,
    models: "Models",
    prompts: str | Path,
    out: Path,
    *,
    options: ServerOptions,
    domain: str | None = None,
    settings: "Settings",
    keep_text: bool = False,
    progress: "Silent",
) -> Profile:
    """Find the fastest setting of a serving engine for these prompts, prove it, and write it.

    Args:
        engine: The engine.
        models: Target and drafts; the best of the drafts is taken.
        prompts: The domain sample.
        out: The YAML file to write; measurements and report lie beside it.
        options: How its servers are run.
        domain: Name of the domain; the sample's file name by default.
        settings: How much to look at.
        keep_text: Keep prompts and answers, in files that only their owner can read.
        progress: Told what is being done.

    Returns:
        The profile, as written.

    Raises:
        SpectuneError: Something asked for cannot be done; then no profile was written, and the
            servers' logs are left beside it.
    """
    check_writable(out, prompts)
    for place in (measurements_path, report_path, texts_path):
        check_writable(place(out), prompts)
    watch, logs = Stopwatch(), logs_path(out)
    with study_home(out, None, resume=False), ExitStack() as servers:
        with watch.step("prepare"):  # 1, 2: sample, models, device, a server without a draft
            job = prepare_on(engine, models, prompts, domain, settings, options, logs, progress)
            plain, planned, noise = open_plain(job, servers, watch, progress)

        with watch.step("trace"), plain.awake():  # 3: the target's own text
            texts = record_on(job, plain, job.sample.tune, progress, "Recording answers")
            unseen = record_on(job, plain, job.sample.holdout, progress, "Recording the holdout")

        concurrency = options.concurrency
        with watch.step("search"):  # 4, 5: settings measured, lengths predicted
            searched = measure_settings(job, plain, units_of(texts, concurrency), progress)
            measured, predicted = searched.candidates(job), searched.predicted(job)
            rungs = choose_rungs(measured)

        with watch.step("holdout"):  # 6: the proof, on prompts the search never saw
            proof = prove_rungs(job, plain, rungs, units_of(unseen, concurrency), progress)

        took = JobSummary(planned_s=planned.total_s, seconds=watch.seconds)
        profile = build_server_profile(  # 7
            job, measured, predicted, rungs, proof, noise, out, took
        )
        measurements = build_server_measurements(job, measured, predicted, proof)
        profile = save_all(profile, measurements, None, out)
    shutil.rmtree(logs, ignore_errors=True)
    kept = {"tune": texts, "holdout": unseen} if keep_text else {}
    write_job_report(job.target.tokenizer, profile, measurements, kept, out, progress)
    progress.say(watch.text())
    return profile


def plan_server(
    engine: ServingEngine,
    models: "Models",
    prompts: str | Path,
    out: Path,
    *,
    options: ServerOptions,
    settings: "Settings",
    progress: "Silent",
) -> Plan:
    """Return what a job would take; a server without a draft is started to tell."""
    watch, logs = Stopwatch(), logs_path(out)
    with ExitStack() as servers, watch.step("prepare"):
        job = prepare_on(engine, models, prompts, None, settings, options, logs, progress)
        planned = open_plain(job, servers, watch, progress)[1]
    shutil.rmtree(logs, ignore_errors=True)
    return planned


def prepare_on(
    engine: ServingEngine,
    models: "Models",
    prompts: str | Path,
    domain: str | None,
    settings: "Settings",
    options: ServerOptions,
    logs: Path,
    progress: "Silent",
) -> ServerJob:
    """Prepare a job and say what it runs on."""
    job = prepare(
        engine,
        models,
        prompts,
        domain,
        settings,
        concurrency=options.concurrency,
        more=options.arguments,
        logs=logs,
        progress=progress,
    )
    progress.say(
        f"{engine.title} {engine.version} on {engine.device_kind}, {options.concurrency} at once, "
        f"at most {job.n_candidates} settings."
    )
    return job


def open_plain(
    job: ServerJob, servers: ExitStack, watch: Stopwatch, progress: "Silent"
) -> tuple[Served, Plan, Noise]:
    """Start the plain server, see how steady and how fast it is, and say the plan."""
    progress.say(f"Starting {job.engine.title} without a draft.")
    begun = time.perf_counter()
    plain = start(job.engine.server(job.deployment, None), servers)
    with plain.awake():
        plain.run(job.fixed)
        noise = noise_of([plain.run(job.fixed).total_s for _ in range(N_FIXED)])
        answers = [
            plain.answer(list(prompt.token_ids), job.settings.max_new_tokens)
            for prompt in (*job.sample.tune, *job.sample.holdout)[:N_PACE]
        ]
    if warning := noise_warning(noise):
        progress.say(warning)
    answer_s = sum(answer.total_s for answer in answers) / len(answers)
    done = {"prepare": watch.seconds.get("prepare", 0.0) + time.perf_counter() - begun}
    planned = plan_of(job, plain.start_s, answer_s, done)
    progress.say(planned.text())
    return plain, planned, noise


def prove_rungs(
    job: ServerJob,
    plain: Served,
    rungs: "Sequence[Candidate]",
    units: "Sequence[Unit]",
    progress: "Silent",
) -> Proof | None:
    """Start a server for every rung and judge them; None if there is nothing to judge."""
    if not rungs or not units:
        return None
    families = {family.draft: family for family in job.families}
    with ExitStack() as servers:
        sides = []
        for rung in rungs:
            setting = families[rung.draft].speculation(rung.tree.depth)
            progress.say(f"Starting {job.engine.title} with {setting.label}.")
            sides.append(start(job.engine.server(job.deployment, setting), servers))
        return prove(plain, sides, rungs, units, job.fixed, job.baseline, progress)


def logs_path(out: Path) -> Path:
    """Return where the servers of a job write their logs; kept only where a job fails."""
    return out.with_name(f"{out.stem}.server-logs")
