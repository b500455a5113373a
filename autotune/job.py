"""What a tuning job starts from: models, sample, device, and what each may cost."""

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.fingerprint import describe_device
from engine.loaded_draft import LoadedDraft, hybrid_of
from engine.pair import LoadedTarget, load_draft, load_target
from engine.reference import reference_times
from profiles import Device, Noise
from profiles.errors import UsageError

from .progress import Silent
from .prompts import read_prompts
from .sample import Sample, build_sample
from .settings import Settings
from .space import SearchSpace
from .steady import noise_of, noise_warning, pace_of

N_REFERENCE_PASSES = 60


@dataclass(frozen=True)
class Models:
    """Where target and drafts come from.

    Attributes:
        target: `demo`, a folder, a hub id or a GGUF file.
        drafts: `lookup`, `suffix`, `demo`, folders or hub ids of heads and small models, and
            `hybrid` for the hybrid of each of the latter, or `hybrid:` and one name.
        dtype: Of the target; `auto` is the fastest the device computes in.
        device: `auto`, `cpu`, `cuda`, ...
        trust_remote_code: Let the target's checkpoint run its own Python code.
        history: Tokens of earlier answers that suffix and hybrid drafts look in.
    """

    target: str
    drafts: Sequence[str] = ("lookup",)
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    history: int = 0


@dataclass(frozen=True)
class Job:
    """A job ready to start.

    Attributes:
        loaded: The target.
        drafts: The drafts by name.
        spaces: Their search spaces.
        sample: Prompts to tune on and to judge on.
        domain: Name of the domain.
        device: The device as a profile describes it.
        noise: Spread and drift of a fixed pass.
        plain_token_s: Seconds of that pass: one token with the target alone.
        settings: How much to look at.
        variant_of: Of those drafts that are others with other knobs, the others.
    """

    loaded: LoadedTarget
    drafts: dict[str, LoadedDraft]
    spaces: dict[str, SearchSpace]
    sample: Sample
    domain: str
    device: Device
    noise: Noise
    plain_token_s: float
    settings: Settings
    variant_of: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return a short name for the profile."""
        parts = (Path(self.loaded.ref.id).stem, self.domain, self.device.kind or "")
        return "-".join("".join(c if c.isalnum() else "-" for c in part) for part in parts).lower()

    @property
    def identity(self) -> dict[str, Any]:
        """What is measured, in parts: studies that differ in one of them are never mixed."""
        settings = self.settings
        prompts = [p.token_ids for p in self.sample.tune[: settings.n_race]]
        return {
            "target": self.loaded.ref.model_dump(mode="json"),
            "drafts": {n: d.ref.model_dump(mode="json") for n, d in self.drafts.items()},
            "device": self.device.model_dump(mode="json"),
            "domain": self.domain,
            "sample": hashlib.sha256(repr(prompts).encode()).hexdigest(),
            "ranges": {name: asdict(space) for name, space in self.spaces.items()},
            "decoding": settings.sampling.model_dump(mode="json")
            | {"max_new_tokens": settings.max_new_tokens, "seed": settings.seed},
            "spectune": version("spectune"),
        }

    @property
    def study_name(self) -> str:
        """Return a name that differs whenever what is measured differs."""
        inputs = json.dumps(self.identity, sort_keys=True)
        return f"{self.name}-{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"


def prepare(
    models: Models,
    prompts: str | Path,
    domain: str | None,
    settings: Settings,
    progress: Silent,
) -> Job:
    """Read the prompts, load the models, draw the sample and look at the device.

    Raises:
        SpectuneError: A file, a model or the device cannot be used.
    """
    if not models.drafts:
        raise UsageError("tuning needs at least one draft, but none was given; try lookup")
    records = read_prompts(prompts)
    loaded = load_target(
        models.target,
        dtype=models.dtype,
        device=models.device,
        trust_remote_code=models.trust_remote_code,
        progress=progress.say,
    )
    drafts = load_drafts(models, loaded, progress)
    longest = (loaded.target.max_positions or 2**31) - settings.max_new_tokens
    if longest < 1:
        raise UsageError(
            f"max_new_tokens must leave room for a prompt in the target's "
            f"{loaded.target.max_positions} positions, but is {settings.max_new_tokens}; lower it"
        )
    sample = build_sample(
        records,
        loaded.tokenizer,
        seed=settings.seed,
        n_tune=settings.n_tune,
        n_holdout=settings.n_holdout,
        max_prompt_tokens=min(settings.max_prompt_tokens, longest),
        raw=settings.raw,
    )
    progress.say(sample.summary())
    times = reference_times(loaded.target, N_REFERENCE_PASSES)
    noise = noise_of(times)
    if warning := noise_warning(noise):
        progress.say(warning)
    return Job(
        loaded=loaded,
        drafts=drafts,
        spaces={name: space_of(draft, settings) for name, draft in drafts.items()},
        sample=sample,
        domain=domain or Path(prompts).stem,
        device=Device(**describe_device(loaded.target.device)),
        noise=noise,
        plain_token_s=statistics.fmean(times),
        settings=settings,
    )


def load_drafts(models: Models, loaded: LoadedTarget, progress: Silent) -> dict[str, LoadedDraft]:
    """Load the drafts of a job by name; weights that a hybrid shares are loaded once.

    Raises:
        UsageError: A hybrid is asked for and there is nothing to make it of.
        SpectuneError: A draft cannot be loaded, or it does not fit the target.
    """
    names = dict.fromkeys(models.drafts)
    drafts = {name: load_draft(name, loaded, progress.say) for name in names if name != "hybrid"}
    if "hybrid" in names:
        heads = {name: draft for name, draft in drafts.items() if draft.is_head}
        if not heads:
            raise UsageError(
                "a hybrid must be made of a head or a small model, but none was given; add "
                "--draft demo or another, or write hybrid: and its name"
            )
        drafts |= {f"hybrid:{name}": hybrid_of(head) for name, head in heads.items()}
    if not models.history:
        return drafts
    return {
        name: draft.variant(history=models.history) if "history" in draft.knobs else draft
        for name, draft in drafts.items()
    }


def space_of(loaded: LoadedDraft, settings: Settings) -> SearchSpace:
    """Return the search space of a draft."""
    kind, engine = loaded.ref.kind, settings.engine_space
    if kind in ("lookup", "suffix"):
        return SearchSpace(settings.max_lookup_depth, 4, 4, settings.max_nodes, kind, engine)
    top_k = min(10, loaded.draft.max_top_k)
    return SearchSpace(settings.max_depth, top_k, top_k, settings.max_nodes, kind, engine)


def look_again(job: Job, progress: Silent) -> Job:
    """Read the machine's pace once it is warm: what is measured later is compared with this."""
    times = reference_times(job.loaded.target, N_REFERENCE_PASSES)
    pass_s = pace_of(job.loaded.target, job.plain_token_s)
    noise = Noise(
        spread=max(job.noise.spread, noise_of(times).spread),
        drift=pass_s / job.plain_token_s - 1,
    )
    if warning := noise_warning(noise):
        progress.say(warning)
    return replace(job, noise=noise, plain_token_s=pass_s)
