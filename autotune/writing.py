"""Step 7: the profile and the measurements behind it."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from profiles import (
    PLAIN,
    Alternative,
    Domain,
    HoldoutTree,
    JobSummary,
    LatencyPoint,
    MeasuredTree,
    Measurements,
    PricedDraft,
    ProbedValue,
    Profile,
    RunnerUp,
    Score,
    SearchSummary,
    Serving,
    draft_name,
    load,
    measurements_path,
    save,
    save_measurements,
    sealed,
    validated,
)
from profiles.errors import SpectuneError
from profiles.times import now

from .batches.costs import with_batches
from .batches.schedule import BatchResults
from .candidates import Candidate
from .cost import CostModel
from .holdout import MIN_PROMPTS
from .progress import Silent
from .report.job_report import report_path
from .search.workers import FINISH
from .study_files import StudyHome, study_path
from .texts import texts_path

if TYPE_CHECKING:
    from engine.rounds import RoundTime

    from .cost.predicting import Predictor
    from .job import Job
    from .proving import Proof
    from .search.workers import Alone

Named = Callable[[str], str]
"""Gives a draft of a job its name in a file."""

N_RUNNERS_UP = 5

PROFILE = "profile"
"""What the worker that finishes a shared study keeps with that step."""


def build_profile(
    job: "Job",
    probes: Mapping[str, Sequence[ProbedValue]],
    costs: CostModel,
    predicted: Sequence[Candidate],
    measured: Sequence[Candidate],
    rungs: Sequence[Candidate],
    servings: Sequence[Serving],
    proof: "Proof | None",
    batches: BatchResults,
    out: Path,
    home: StudyHome,
    took: JobSummary,
) -> Profile:
    """Return the profile of a finished job: the proved tree, or plain with the reason."""
    sample, settings = job.sample, job.settings
    winner = proof.winner if proof else None
    served = None if winner is None else servings[winner]
    leader = rungs[winner or 0] if rungs else max(measured, key=_standing)
    judged = list(zip(rungs, proof.evidence, strict=True)) if proof and proof.evidence else []
    runners_up = sorted((c for c in measured if c.speedup and c not in rungs), key=_standing)
    profile = Profile(
        schema_version=1,
        name=job.name,
        created=now(),
        spectune=version("spectune"),
        target=job.loaded.ref,
        draft=job.drafts[leader.draft].ref,
        device=job.device,
        domain=Domain(
            name=job.domain,
            sample_sha256=sample.fingerprint,
            n_tune=len(sample.tune),
            n_holdout=len(sample.holdout),
            mean_prompt_tokens=sample.mean_prompt_tokens,
            max_new_tokens=settings.max_new_tokens,
            template=sample.template,
        ),
        sampling=settings.sampling,
        decision="plain" if winner is None else "speculate",
        reason=reason(rungs, proof),
        tree=PLAIN if winner is None else rungs[winner].tree,
        adaptive=served is not None and served.calibration is not None,
        evidence=None if winner is None or proof is None else proof.evidence[winner],
        alternatives=[
            Alternative(
                draft=draft_name(job.drafts[rung.draft].ref), tree=rung.tree, evidence=evidence
            )
            for i, (rung, evidence) in enumerate(judged)
            if i != winner
        ],
        probe=probes.get(job.variant_of.get(leader.draft, leader.draft), ()),
        guard=served.guard if served else None,
        calibration=served.calibration if served else None,
        noise=proof.noise(job.noise) if proof else job.noise,
        batch_schedule=batches.schedule,
        cost_model=with_batches(
            costs.summary(leader.draft), batches.sizes, sample.mean_prompt_tokens
        ),
        search=SearchSummary(
            predicted=len(predicted),
            measured=len(measured),
            sampler="TPE",
            seed=settings.seed,
            storage=home.label,
            runners_up=[
                RunnerUp(draft=c.draft, tree=c.tree, speedup=c.speedup)
                for c in reversed(runners_up[-N_RUNNERS_UP:])
                if c.speedup
            ],
        ),
        measurements=measurements_path(out).name,
        job=took,
    )
    return sealed(profile)


def reason(rungs: Sequence[Candidate], proof: "Proof | None") -> str:
    """Say in one sentence why the decision is what it is."""
    if not rungs:
        return "No tree was faster than plain decoding on the tune prompts."
    if proof is None:
        return f"Insufficient evidence, {MIN_PROMPTS} more prompts are needed: none was held out."
    machine = f" {note}" if (note := proof.steadily.summary()) else ""
    verdict = proof.closest
    if not verdict.n_prompts:
        return f"Insufficient evidence: no held-out prompt could be measured undisturbed.{machine}"
    figures = (
        f"{verdict.ratio:.3f}x in total, at least {verdict.low:.3f}x at "
        f"{100 * verdict.confidence:.1f} % confidence on {verdict.n_prompts} held-out prompts"
    )
    if proof.winner is not None:
        return f"Faster than plain decoding: {figures}.{machine}"
    if verdict.n_prompts_needed is None:
        return f"Not faster than plain decoding: {figures}.{machine}"
    n_more = max(1, verdict.n_prompts_needed - verdict.n_prompts)
    return f"Insufficient evidence, about {n_more} more prompts are needed: {figures}.{machine}"


def save_all(
    profile: Profile, measurements: Measurements, study: str | Path | None, out: Path
) -> Profile:
    """Write measurements, study and then the profile, each whole or not at all.

    Wherever a job is killed, a profile never stands beside the report or the texts of another
    one, and it knows its measurements by their hash.

    Args:
        profile: What to write.
        measurements: The figures behind it.
        study: The journal of a study to lie beside it, the URL of one that lies elsewhere, or None
            for a job without one: then that of an earlier job goes.
        out: The profile's file.

    Returns:
        The profile as written.
    """
    digest = save_measurements(measurements, measurements_path(out))
    profile = sealed(profile.model_copy(update={"measurements_sha256": digest}))
    if isinstance(study, Path):
        study.replace(study_path(out))
    elif study is None:
        study_path(out).unlink(missing_ok=True)
    for earlier in (report_path(out), texts_path(out)):
        earlier.unlink(missing_ok=True)
    save(profile, out)
    return profile


def write_theirs(workers: "Alone", out: Path, progress: Silent) -> Profile:
    """Write the profile that another worker has finished, unless it did so at this very place.

    What lies beside it lies with that worker alone.
    """
    profile = validated(Profile, workers.kept(FINISH, PROFILE), "the shared study")
    try:
        is_here = load(out).content_sha256 == profile.content_sha256
    except SpectuneError:
        is_here = False
    if not is_here:
        save(profile.model_copy(update={"measurements": None}), out)
    progress.say("Another worker finished the study; its measurements and report lie there.")
    return profile


def scores_of(predicted: Sequence[Candidate], named: Named) -> list[Score]:
    """Return what every tree was predicted to give."""
    return [
        Score(
            draft=named(c.draft),
            tree=c.tree,
            tau=c.prediction.tau,
            predicted_speedup=c.prediction.decode_speedup,
        )
        for c in predicted
    ]


def trees_of(measured: Sequence[Candidate], named: Named) -> list[MeasuredTree]:
    """Return the speedups of the measured trees, by prompt."""
    return [
        MeasuredTree(draft=named(c.draft), tree=c.tree, prompt_ratios=c.ratios)
        for c in measured
        if c.ratios
    ]


def holdout_of(proof: "Proof | None", named: Named) -> list[HoldoutTree]:
    """Return the times of the judged trees, by prompt."""
    if proof is None:
        return []
    return [
        HoldoutTree(
            draft=named(rung.draft),
            tree=rung.tree,
            plain_ms=[1e3 * seconds for seconds in times.plain_s],
            speculative_ms=[1e3 * seconds for seconds in times.speculative_s],
            run_noise=proof.run_noise(i),
        )
        for i, (rung, times) in enumerate(zip(proof.rungs, proof.times, strict=True))
    ]


def build_measurements(
    job: "Job",
    costs: CostModel,
    predictor: "Predictor",
    predicted: Sequence[Candidate],
    measured: Sequence[Candidate],
    proof: "Proof | None",
    batches: BatchResults,
) -> Measurements:
    """Return the figures behind a profile: times and counts, no text."""
    looked_at = sorted({c.draft for c in (*predicted, *measured) if not c.tree.is_plain})
    return Measurements(
        latency=[point for name, group in costs.times.items() for point in _points(name, group)],
        rounds=costs.rounds,
        scores=scores_of(predicted, str),
        measured=trees_of(measured, str),
        holdout=holdout_of(proof, str),
        batches=batches.runs,
        acceptance=predictor.acceptance(looked_at),
        drafts=[
            PricedDraft(draft=name, ref=loaded.ref, costs=costs.summary(name))
            for name, loaded in job.drafts.items()
            if name in looked_at
        ],
    )


def _points(draft: str, times: "Sequence[RoundTime]") -> list[LatencyPoint]:
    """Return medians by part and size. The probes, named "", give the target's share."""
    seconds: dict[tuple[str, int], list[tuple[float, float, int]]] = defaultdict(list)
    for time in times:
        sizes = {"verify": (time.n_nodes, time.verify_s)}
        if draft and not time.tree.is_plain:
            sizes = {
                "extend": (time.n_extend, time.extend_s),
                "level": (time.tree.width, time.levels_s / max(1, time.tree.depth - 1)),
                "commit": (time.n_nodes, time.commit_s),
            }
        elif draft:
            continue
        for part, (x, value) in sizes.items():
            if value > 0:
                seconds[part, x].append((value, time.reference_s, time.context))
    points = []
    for (part, x), values in sorted(seconds.items()):
        value, reference, context = (
            float(np.median(column)) for column in zip(*values, strict=True)
        )
        points.append(
            LatencyPoint(
                part="reference" if (part, x) == ("verify", 0) else part,  # type: ignore[arg-type]
                draft=draft or None,
                x=x,
                context=round(context),
                relative=float(np.median([v / r for v, r, _ in values])),
                ms=1e3 * value,
                n=len(values),
            )
        )
    return points


def _standing(candidate: Candidate) -> float:
    return candidate.speedup or 0.0
