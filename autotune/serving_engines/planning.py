"""What a job for a serving engine will take: mostly the starts of its servers."""

from collections.abc import Mapping

from ..holdout import MAX_RUNGS
from ..plan import SPECULATIVE, Plan
from .job import ServerJob
from .proving import BLOCK


def plan_of(job: ServerJob, start_s: float, answer_s: float, done: Mapping[str, float]) -> Plan:
    """Estimate a job.

    Args:
        job: The job.
        start_s: Seconds that a server takes to start.
        answer_s: Seconds of a plain answer.
        done: Seconds by step that the job has taken so far.
    """
    concurrency = job.deployment.concurrency
    n_tune, n_holdout = len(job.sample.tune), len(job.sample.holdout)
    n_units = n_holdout // concurrency
    search = job.n_candidates * (start_s + n_tune * answer_s * (1 + SPECULATIVE))
    holdout = MAX_RUNGS * start_s + 2 * n_holdout * answer_s * (1 + MAX_RUNGS * SPECULATIVE)
    if not job.pauses:  # a server is started for each of its turns
        search += job.n_candidates * 2 * start_s
        holdout += 2 * (1 + MAX_RUNGS) * -(-n_units // BLOCK) * start_s
    estimates = {
        "prepare": 0.0,
        "trace": answer_s * (n_tune + n_holdout),
        "search": search + n_tune * answer_s,
        "holdout": holdout,
    }
    return Plan(estimates | dict(done))
