"""The raw figures behind a profile, kept beside it: counts and times, never any text.

With them the cost model can be fitted again, and what-if questions answered, without the device.
"""

import gzip
import hashlib
import io
import json
import os
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .deployment import DraftRef
from .errors import SpectuneError
from .io import PathLike, atomic_write, read_bytes, refuse_newer
from .schema import SCHEMA_VERSION, Profile
from .strict import (
    AtLeastOne,
    Count,
    Items,
    Number,
    Positive,
    StrictModel,
    Text,
    broken_rule,
    validated,
)
from .summaries import CostModelSummary
from .tree import TreeConfig

MAX_PACKED_BYTES = 64 * 1024 * 1024
MAX_UNPACKED_BYTES = 100 * 1024 * 1024

Part = Literal["extend", "level", "verify", "commit", "reference"]


class LatencyPoint(StrictModel):
    """One timed size of one part of the round."""

    part: Part = Field(description="part of the round, or the reference 1-token pass")
    draft: Text | None = Field(default=None, description="draft that ran, if the part is its own")
    x: Count = Field(
        description="tokens (extend), nodes verified (verify, commit), nodes expanded (level)"
    )
    context: Count = Field(description="tokens already in the cache")
    relative: Positive = Field(description="median time over that of the reference pass")
    ms: Positive = Field(description="median time, ms")
    n: AtLeastOne = Field(description="timings behind the median")


class Score(StrictModel):
    """What replay and the cost model said of one setting."""

    draft: Text = Field(description="the draft: an id, `lookup`, `suffix` or `hybrid:` and an id")
    tree: TreeConfig = Field(description="the setting")
    tau: Positive = Field(description="replayed tokens per round")
    predicted_speedup: Positive = Field(description="predicted speedup over plain")


class MeasuredTree(StrictModel):
    """The paired ratios of one setting that ran on the device."""

    draft: Text = Field(description="the draft: an id, `lookup`, `suffix` or `hybrid:` and an id")
    tree: TreeConfig = Field(description="the setting")
    prompt_ratios: Items[Positive] = Field(
        description="plain time over speculative time per prompt, in the order of the sample"
    )


class Acceptance(StrictModel):
    """How often a draft's children were right, by depth and by their rank among siblings."""

    draft: Text = Field(description="the draft: an id, `lookup`, `suffix` or `hybrid:` and an id")
    tried: Items[Count] = Field(description="nodes expanded on the true path, per depth from 1")
    accepted: Items[Items[Count]] = Field(
        description="[depth - 1][rank - 1]: how often that child was the target's token"
    )

    @model_validator(mode="after")
    def _counts_add_up(self) -> Self:
        if len(self.tried) != len(self.accepted):
            rule = f"it has {len(self.accepted)} rows but tried has {len(self.tried)}"
            raise broken_rule(f"{rule}; give one row for each depth", at=("accepted",))
        for i, (n_tried, row) in enumerate(zip(self.tried, self.accepted, strict=True)):
            if sum(row) > n_tried:
                rule = f"row {i} of accepted adds up to {sum(row)}, more than the {n_tried} tried"
                raise broken_rule(f"{rule}; correct the counts", at=("tried",), value=n_tried)
        return self


class RoundPoint(StrictModel):
    """The whole round of one timed tree, by the clock and by the cost model."""

    draft: Text = Field(description="the draft: an id, `lookup`, `suffix` or `hybrid:` and an id")
    tree: TreeConfig = Field(description="the tree asked for")
    nodes: Annotated[Number, Field(ge=0)] = Field(description="mean number of nodes verified")
    relative: Positive = Field(description="median round time over that of a plain round")
    predicted: Positive = Field(description="the same by the cost model")
    left_out: bool = Field(description="whether the model that predicted it never saw this tree")


class HoldoutTree(StrictModel):
    """The paired times of one tree that was judged on the holdout."""

    draft: Text = Field(description="the draft: an id, `lookup`, `suffix` or `hybrid:` and an id")
    tree: TreeConfig = Field(description="the tree that ran")
    plain_ms: Items[Positive] = Field(
        description="plain time per prompt, ms, all its runs together, in the order of the sample"
    )
    speculative_ms: Items[Positive] = Field(description="time with the tree, likewise")
    run_noise: Annotated[Number, Field(ge=0)] | None = Field(
        default=None, description="deviation of the log time of one run, repeats compared"
    )

    @model_validator(mode="after")
    def _is_paired(self) -> Self:
        if len(self.plain_ms) != len(self.speculative_ms):
            rule = f"it has {len(self.speculative_ms)} entries but plain_ms has"
            rule += f" {len(self.plain_ms)}; give one for each prompt"
            raise broken_rule(rule, at=("speculative_ms",))
        return self

    @property
    def prompt_ratios(self) -> list[float]:
        """Plain time over speculative time per prompt."""
        pairs = zip(self.plain_ms, self.speculative_ms, strict=True)
        return [plain / speculative for plain, speculative in pairs]


class BatchRuns(StrictModel):
    """The paired times of one tree with several prompts at a time."""

    rows: AtLeastOne = Field(description="prompts in flight")
    tree: TreeConfig = Field(description="the tree that ran")
    prompts: Literal["tune", "holdout"] = Field(description="which part of the sample it ran on")
    plain_ms: Items[Positive] = Field(description="plain time per batch, ms")
    speculative_ms: Items[Positive] = Field(description="time with the tree, likewise")


class PricedDraft(StrictModel):
    """One draft of a job and what rounds with it cost."""

    draft: Text = Field(description="its name in this file")
    ref: DraftRef = Field(description="what it is, as a profile writes it")
    costs: CostModelSummary = Field(description="fitted price of a round with it")


class Measurements(StrictModel):
    """Everything that was timed and counted for one profile."""

    schema_version: int = Field(
        default=SCHEMA_VERSION, ge=1, le=SCHEMA_VERSION, description="version of this layout"
    )
    latency: Items[LatencyPoint] = Field(default=(), description="timed sizes")
    rounds: Items[RoundPoint] = Field(default=(), description="timed trees and their fit")
    scores: Items[Score] = Field(default=(), description="settings scored by replay")
    measured: Items[MeasuredTree] = Field(default=(), description="settings run on tune prompts")
    holdout: Items[HoldoutTree] = Field(default=(), description="trees judged on unseen prompts")
    batches: Items[BatchRuns] = Field(default=(), description="trees run on several prompts")
    acceptance: Items[Acceptance] = Field(default=(), description="one table per draft")
    drafts: Items[PricedDraft] = Field(default=(), description="what every draft costs")


def measurements_path(profile_path: PathLike) -> Path:
    """Return where the measurements of a profile lie: `NAME.measurements.json.gz` beside it."""
    path = Path(profile_path)
    return path.with_name(f"{path.stem}.measurements.json.gz")


def save_measurements(measurements: Measurements, path: PathLike) -> str:
    """Write measurements, whole or not at all, and return the SHA-256 of the file.

    Equal measurements give equal bytes.

    Raises:
        SpectuneError: The path is a folder or cannot be written.
    """
    text = measurements.model_dump_json(exclude_none=True)
    data = gzip.compress(text.encode(), mtime=0)
    atomic_write(path, data)
    return hashlib.sha256(data).hexdigest()


def load_measurements_of(profile: Profile, path: PathLike) -> Measurements | None:
    """Read the measurements beside a profile; None where it names none.

    Args:
        profile: The profile.
        path: Where it lies.

    Raises:
        SpectuneError: As `load_measurements`, or they are those of another profile: its name was
            reused, or a job was killed between writing the two.
    """
    if profile.measurements is None:
        return None
    beside = Path(path).with_name(profile.measurements)
    packed = read_bytes(beside, MAX_PACKED_BYTES)
    measurements = _parsed(packed, os.fspath(beside))
    known = profile.measurements_sha256
    if known is not None and hashlib.sha256(packed).hexdigest() != known:
        raise SpectuneError(
            f"the measurements beside a profile must be its own, but {beside} is not the file "
            f"that was written with {os.fspath(path)}; tune again, or copy both from one place"
        )
    return measurements


def load_measurements(path: PathLike) -> Measurements:
    """Read measurements and check every rule.

    Raises:
        SpectuneError: The file cannot be read, is damaged, or breaks a rule; the message names
            the file, the key path, the value and the remedy.
    """
    return _parsed(read_bytes(path, MAX_PACKED_BYTES), os.fspath(path))


def _parsed(packed: bytes, source: str) -> Measurements:
    data = _unpack(packed, source)
    if not isinstance(data, dict):
        raise SpectuneError(f"{source}: $ must be a JSON object: write it anew by tuning again.")
    refuse_newer(data, source)
    return validated(Measurements, data, source)


def _unpack(packed: bytes, source: str) -> Any:
    try:
        with gzip.open(io.BytesIO(packed)) as file:
            text = file.read(MAX_UNPACKED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        rule = f"is not a whole gzip file ({error})"
        raise SpectuneError(f"{source} {rule}: copy it again or tune again.") from None
    if len(text) > MAX_UNPACKED_BYTES:
        limit = f"{MAX_UNPACKED_BYTES // 1024**2} MiB"
        raise SpectuneError(f"{source} unpacks to more than {limit}: tune again.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpectuneError(f"{source} is not JSON ({error}): tune again.") from None
