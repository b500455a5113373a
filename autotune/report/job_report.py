"""The last step of a job: its report, and its texts where they are to be kept.

Whatever goes wrong here, the profile is already written.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from profiles import Measurements, Profile

from ..progress import Silent
from ..texts import KeptText, save_texts, texts_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..job import Job
    from ..tracing import Conversation

    Kept = Mapping[str, Sequence[Conversation]]


def report_path(out: Path) -> Path:
    """Return where the report of a profile lies: `NAME.report.html` beside it."""
    return out.with_name(f"{out.stem}.report.html")


def write_job_report(
    job: "Job",
    profile: Profile,
    measurements: Measurements,
    kept: "Kept",
    out: Path,
    progress: Silent,
) -> None:
    """Write the report beside the profile, or say why there is none.

    Args:
        job: The job.
        profile: Its profile, as written.
        measurements: Its measurements, as written.
        kept: Conversations whose text is kept, by part of the sample.
        out: Where the profile lies.
        progress: Told the outcome.
    """
    path = report_path(out)
    try:
        from .page import write_report

        texts = list(_texts(kept, job.loaded.tokenizer))
        if texts:
            save_texts(texts, texts_path(out))
        write_report(profile, measurements, out, path, texts)
    except (Exception, KeyboardInterrupt) as error:  # the job's result is already written
        progress.say(
            f"Warning: the report could not be made ({type(error).__name__}: {error}); the "
            f"profile is whole. To try again: spectune show {out} --html {path}"
        )
    else:
        progress.say(f"Report: {path}")


def _texts(kept: "Kept", tokenizer: "PreTrainedTokenizerBase") -> Iterator[KeptText]:
    for split, group in kept.items():
        for trace in (trace for conversation in group for trace in conversation):
            yield KeptText(
                split=split,
                id=trace.id,
                prompt=str(tokenizer.decode(trace.prompt)),
                answer=str(tokenizer.decode(trace.generated, skip_special_tokens=True)),
                prompt_ids=trace.prompt,
                answer_ids=trace.generated,
            )
