"""Step 5, second half: the study of measured trees, begun or gone on with."""

from collections.abc import Sequence
from typing import Any

from .candidates import Candidate, best_chain, best_shallow
from .cost.predicting import Predictor
from .job import Job
from .progress import Silent
from .racing import ForcedTrack, contenders
from .search import MeasuredStudy
from .search.shared import SharedStudy
from .search.workers import Alone, Workers
from .study_files import StudyHome
from .tracing import Conversation


def measure_trees(
    job: Job,
    predictor: Predictor,
    predicted: Sequence[Candidate],
    texts: Sequence[Conversation],
    home: StudyHome,
    workers: Alone,
    progress: Silent,
) -> list[Candidate]:
    """Measure the most promising trees on tune prompts; chain and shallow tree to the end.

    Raises:
        SpectuneError: The storage cannot be used.
    """
    settings = job.settings
    study = _study(job, predictor, home, workers)
    if home.resume:
        progress.say(_resumed(study, home.label))
    first = contenders(predicted, job.spaces, predictor, job.variant_of)
    stay = [c for c in (best_chain(predicted), best_shallow(predicted)) if c is not None]
    raced = texts[: settings.n_race]
    try:
        with progress.step("Measuring trees", len(raced) * (settings.n_trials + 1)) as tick:
            return study.run(first, ForcedTrack(job, raced, tick), settings.n_trials, stay)
    except KeyboardInterrupt:
        how = "" if home.study else " with --resume"
        progress.say(
            f"Stopped with {len(study.candidates)} trees measured, others begun; the same command"
            f"{how} goes on from there."
        )
        raise


def _study(job: Job, predictor: Predictor, home: StudyHome, workers: Alone) -> MeasuredStudy:
    """Return the job's own study, or its part in one with other workers."""
    common: dict[str, Any] = {
        "spaces": job.spaces,
        "predict": predictor.predict,
        "storage": home.storage,
        "facts": job.identity,
        "seed": job.settings.seed,
    }
    if isinstance(workers, Workers):
        return SharedStudy(workers, job.loaded.target.device, name=home.study, **common)
    return MeasuredStudy(**common, name=job.study_name, resume=home.resume)


def _resumed(study: MeasuredStudy, label: str) -> str:
    if study.resumes:
        return (
            f"Going on with {study.name} in {label}: {len(study.candidates)} trees are measured."
        )
    others = f"; what lies there has another {', '.join(study.differences)}"
    return f"Nothing to go on with in {label}{others if study.differences else ''}."
