"""Step 5, second half: the study of measured trees, begun or gone on with."""

from collections.abc import Sequence

from .candidates import Candidate, best_chain, best_shallow
from .job import Job
from .predicting import Predictor
from .progress import Silent
from .racing import ForcedTrack, contenders
from .search import MeasuredStudy
from .study_files import StudyHome
from .tracing import Conversation


def measure_trees(
    job: Job,
    predictor: Predictor,
    predicted: Sequence[Candidate],
    texts: Sequence[Conversation],
    home: StudyHome,
    progress: Silent,
) -> list[Candidate]:
    """Measure the most promising trees on tune prompts; chain and shallow tree to the end.

    Raises:
        SpectuneError: The storage cannot be used.
    """
    settings = job.settings
    study = MeasuredStudy(
        job.spaces,
        predictor.predict,
        storage=home.storage,
        name=job.study_name,
        facts=job.identity,
        seed=settings.seed,
        resume=home.resume,
    )
    if home.resume:
        progress.say(_resumed(study, home.label))
    first = contenders(predicted, job.spaces, predictor, job.variant_of)
    stay = [c for c in (best_chain(predicted), best_shallow(predicted)) if c is not None]
    raced = texts[: settings.n_race]
    try:
        with progress.step("Measuring trees", len(raced) * (settings.n_trials + 1)) as tick:
            return study.run(first, ForcedTrack(job, raced, tick), settings.n_trials, stay)
    except KeyboardInterrupt:
        progress.say(
            f"Stopped with {len(study.candidates)} trees measured, others begun; the same command "
            "with --resume goes on from there."
        )
        raise


def _resumed(study: MeasuredStudy, label: str) -> str:
    if study.resumes:
        return (
            f"Going on with {study.name} in {label}: {len(study.candidates)} trees are measured."
        )
    others = f"; what lies there has another {', '.join(study.differences)}"
    return f"Nothing to go on with in {label}{others if study.differences else ''}."
