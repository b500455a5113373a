"""Step 5 for a serving engine: a server for each setting, timed between two turns of plain."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from profiles import PLAIN
from profiles.errors import SpectuneError

from ..candidates import PLAIN_PREDICTION, Candidate
from ..progress import Silent, Tick
from .interface import Decoding, Speculation
from .job import ServerJob, start
from .lengths import next_setting
from .turns import Turn, Unit, Work, take_turn


@dataclass(frozen=True)
class Searched:
    """What the search measured.

    Attributes:
        ratios: Speedups by unit, for every setting that ran.
        failed: Why a setting could not be run.
        plain: What plain decoding did, all its turns together.
    """

    ratios: dict[Speculation, tuple[float, ...]]
    failed: dict[Speculation, str]
    plain: Work

    def candidates(self, job: ServerJob) -> list[Candidate]:
        """Return plain and all settings, measured or failed, as candidates."""
        plain = Candidate("", PLAIN, PLAIN_PREDICTION, 1.0)
        families = {family.draft: family for family in job.families}
        ran = [
            Candidate(
                setting.draft,
                setting.tree,
                families[setting.draft].predict(setting.depth, self.plain),
                sum(ratios) / len(ratios),
                ratios,
            )
            for setting, ratios in self.ratios.items()
        ]
        return [plain, *ran]

    def predicted(self, job: ServerJob) -> list[Candidate]:
        """Return every length of every draft that ran, with what is expected of it."""
        return [
            Candidate(family.draft, family.speculation(depth).tree, prediction)
            for family in job.families
            if family.known
            for depth in family.lengths
            for prediction in (family.predict(depth, self.plain),)
        ]


def measure_settings(
    job: ServerJob, plain: Decoding, units: Sequence[Unit], progress: Silent
) -> Searched:
    """Measure the longest chain of every draft, then the lengths that promise most.

    A setting that cannot be run is left out, and the reason is said.

    Raises:
        SpectuneError: The plain server failed, or no setting could be run.
    """
    with progress.step("Measuring settings", job.n_candidates) as tick:
        searched = _measure(job, plain, units, progress, tick)
    if not searched.ratios:
        reasons = "; ".join(f"{s.label}: {why}" for s, why in searched.failed.items())
        raise SpectuneError(
            f"{job.engine.title} must be able to run one of the drafts, but it runs none here "
            f"({reasons}); give another --draft"
        )
    return searched


def _measure(
    job: ServerJob, plain: Decoding, units: Sequence[Unit], progress: Silent, tick: Tick
) -> Searched:
    ratios: dict[Speculation, tuple[float, ...]] = {}
    failed: dict[Speculation, str] = {}
    families = {family.draft: family for family in job.families}
    before = take_turn(plain, units, job.fixed)
    plain_work = before.work
    for _ in range(job.n_candidates):
        setting = next_setting(job.families, plain_work)
        if setting is None:
            break
        progress.say(f"Starting {job.engine.title} with {setting.label}.")
        try:
            turn = _turn_of(job, setting, units)
        except SpectuneError as error:
            failed[setting] = str(error)
            families[setting.draft].failed.add(setting.depth)
            progress.say(f"Left out: {setting.label}: {error}.")
            tick()
            continue
        after = take_turn(plain, units, job.fixed)
        ratios[setting] = ratios_of(before, turn, after)
        families[setting.draft].known[setting.depth] = turn.work
        plain_work, before = plain_work + after.work, after
        tick()
    return Searched(ratios, failed, plain_work)


def _turn_of(job: ServerJob, setting: Speculation, units: Sequence[Unit]) -> Turn:
    """Start a server, let it take one turn, and end it."""
    with ExitStack() as servers:
        server = start(job.engine.server(job.deployment, setting), servers)
        return take_turn(server, units, job.fixed)


def ratios_of(before: Turn, turn: Turn, after: Turn) -> tuple[float, ...]:
    """Return the speedups of a turn over plain decoding before and after it, by unit."""
    pairs = zip(before.seconds, turn.seconds, after.seconds, strict=True)
    return tuple((first + last) / 2 / seconds for first, seconds, last in pairs)
