"""Step 7 for a serving engine: the profile and the measurements behind it."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from profiles import (
    PLAIN,
    Acceptance,
    Alternative,
    Domain,
    DraftRef,
    JobSummary,
    Measurements,
    Noise,
    Profile,
    RunnerUp,
    SearchSummary,
    ServerRun,
    draft_name,
    measurements_path,
    sealed,
)
from profiles.times import now

from ..candidates import Candidate
from ..proving import Proof
from ..writing import N_RUNNERS_UP, holdout_of, reason, scores_of, trees_of
from .job import ServerJob
from .lengths import Family


def build_server_profile(
    job: ServerJob,
    measured: Sequence[Candidate],
    predicted: Sequence[Candidate],
    rungs: Sequence[Candidate],
    proof: Proof | None,
    noise: Noise,
    out: Path,
    took: JobSummary,
) -> Profile:
    """Return the profile of a finished job: the proved chain, or plain with the reason."""
    refs = {family.draft: family.ref for family in job.families}
    drafted = [c for c in measured if not c.tree.is_plain]
    winner = proof.winner if proof else None
    leader = rungs[winner or 0] if rungs else max(drafted, key=_standing)
    judged = list(zip(rungs, proof.evidence, strict=True)) if proof and proof.evidence else []
    runners_up = sorted((c for c in drafted if c not in rungs), key=_standing, reverse=True)
    sample = job.sample
    return sealed(
        Profile(
            schema_version=1,
            name=job.name,
            created=now(),
            spectune=version("spectune"),
            engine=job.engine.name,  # type: ignore[arg-type]  # checked where it is built
            server=_server(job),
            target=job.target.ref,
            draft=refs[leader.draft],
            device=job.device,
            domain=Domain(
                name=job.domain,
                sample_sha256=sample.fingerprint,
                n_tune=len(sample.tune),
                n_holdout=len(sample.holdout),
                mean_prompt_tokens=sample.mean_prompt_tokens,
                max_new_tokens=job.settings.max_new_tokens,
                template=sample.template,
            ),
            sampling=job.settings.sampling,
            decision="plain" if winner is None else "speculate",
            reason=reason(rungs, proof),
            tree=PLAIN if winner is None else rungs[winner].tree,
            evidence=None if winner is None or proof is None else proof.evidence[winner],
            alternatives=[
                Alternative(draft=_name(rung.draft, refs), tree=rung.tree, evidence=evidence)
                for i, (rung, evidence) in enumerate(judged)
                if i != winner
            ],
            noise=proof.noise(noise) if proof else noise,
            search=SearchSummary(
                predicted=len(predicted),
                measured=len(measured),
                sampler="enumeration",
                seed=job.settings.seed,
                runners_up=[
                    RunnerUp(draft=_name(c.draft, refs), tree=c.tree, speedup=c.speedup)
                    for c in runners_up[:N_RUNNERS_UP]
                    if c.speedup
                ],
            ),
            measurements=measurements_path(out).name,
            job=took,
        )
    )


def build_server_measurements(
    job: ServerJob,
    measured: Sequence[Candidate],
    predicted: Sequence[Candidate],
    proof: Proof | None,
) -> Measurements:
    """Return the figures behind a profile: times and counts, no text."""
    refs = {family.draft: family.ref for family in job.families}

    def named(draft: str) -> str:
        return _name(draft, refs)

    return Measurements(
        scores=scores_of(predicted, named),
        measured=trees_of(measured, named),
        holdout=holdout_of(proof, named),
        acceptance=[_acceptance(family, refs) for family in job.families if family.known],
    )


def _server(job: ServerJob) -> ServerRun:
    environment = job.engine.environment(job.deployment)
    return ServerRun(
        version=job.engine.version,
        concurrency=job.deployment.concurrency,
        arguments=job.engine.arguments(job.deployment),
        environment={name: value for name, value in environment.items() if value},
    )


def _acceptance(family: Family, refs: dict[str, DraftRef]) -> Acceptance:
    """Return how often each place of the longest chain was right; a place is tried where the one
    before it was."""
    work = family.known[max(family.known)]
    accepted = work.counts.by_position
    tried = [work.n_rounds, *accepted[:-1]] if accepted else []
    return Acceptance(
        draft=_name(family.draft, refs), tried=tried, accepted=[[count] for count in accepted]
    )


def _name(draft: str, refs: dict[str, DraftRef]) -> str:
    """Return how a draft is named in a profile: lookups with other knobs keep their own names."""
    ref = refs[draft]
    return draft if not ref.has_weights else draft_name(ref)


def _standing(candidate: Candidate) -> float:
    return candidate.speedup or 0.0
