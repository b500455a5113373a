"""What a tuning job starts from: models, sample, device, and what each may cost."""

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.fingerprint import describe_device
from engine.loaded_draft import LoadedDraft, hybrid_of
from engine.memory import Room, free_bytes, gib, need_of, room_for
from engine.pair import LoadedTarget, load_draft, load_target
from engine.reference import reference_times
from profiles import ENGINES, Device, Noise, TreeConfig
from profiles.engine_spaces import ENGINE_SPACES
from profiles.errors import SpectuneError, UsageError

from .progress import Silent
from .sample import Sample, build_sample, read_prompts
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
            "ranges": {name: space.ranges for name, space in self.spaces.items()},
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
    if settings.engine_space is not None:
        check_drafts(drafts, settings.engine_space)
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
        max_prompt_tokens=min(
            settings.max_prompt_tokens, longest, memory_for_prompts(loaded, settings)
        ),
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
        spaces=spaces_of(loaded, drafts, sample, settings),
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


def check_drafts(drafts: Mapping[str, LoadedDraft], engine: str) -> None:
    """Refuse drafts that another engine does not run: a profile of theirs could not be exported.

    Args:
        drafts: By name.
        engine: A key of `ENGINES`.

    Raises:
        UsageError: There is one.
    """
    runs = ENGINES[engine].drafts
    for name, draft in drafts.items():
        if draft.ref.kind not in runs:
            raise UsageError(
                f"{ENGINE_SPACES[engine].title} runs drafts of kind {', '.join(sorted(runs))}, "
                f"but {name} is of kind {draft.ref.kind}; leave it out, or leave out "
                "--engine-space"
            )


def memory_for_prompts(loaded: LoadedTarget, settings: Settings) -> int:
    """Return the tokens that a prompt may have for plain decoding to fit the device's memory.

    Raises:
        SpectuneError: Not even the answer fits.
    """
    target = loaded.target
    free, n_new = free_bytes(target.device), settings.max_new_tokens
    longest = need_of(target).longest(free) - n_new
    if longest < 1:
        raise SpectuneError(
            f"plain decoding must fit the memory of {target.device}, but {gib(free)} are free "
            f"beside the weights, too little for {n_new} tokens; lower max_new_tokens, free "
            "memory or use a smaller dtype"
        )
    return longest


def longest_text(sample: Sample, settings: Settings) -> int:
    """Return the tokens of the longest prompt and its answer."""
    prompts = [len(prompt.token_ids) for prompt in (*sample.tune, *sample.holdout)]
    return max(prompts, default=0) + settings.max_new_tokens


def spaces_of(
    loaded: LoadedTarget, drafts: dict[str, LoadedDraft], sample: Sample, settings: Settings
) -> dict[str, SearchSpace]:
    """Return the search space of every draft: trees that do not fit the memory are outside.

    Raises:
        SpectuneError: A draft has no tree that fits.
    """
    n_tokens, spaces = longest_text(sample, settings), {}
    for name, draft in drafts.items():
        room = room_for(loaded.target, draft.draft, n_tokens)
        spaces[name] = space_of(draft, settings, room)
        if not spaces[name].contains(TreeConfig.chain(1)):
            raise SpectuneError(
                f"a draft must leave memory for a tree of one node, but {name} needs "
                f"{room.shortage(TreeConfig.chain(1))}; leave it out, or free memory"
            )
    return spaces


def space_of(loaded: LoadedDraft, settings: Settings, room: Room | None = None) -> SearchSpace:
    """Return the search space of a draft."""
    kind, engine = loaded.ref.kind, settings.engine_space
    if kind in ("lookup", "suffix"):
        depth = settings.max_lookup_depth
        return SearchSpace(depth, 4, 4, settings.max_nodes, kind, engine, room)
    top_k = min(10, loaded.draft.max_top_k)
    depth, nodes = settings.max_depth, settings.max_nodes
    return SearchSpace(depth, top_k, top_k, nodes, kind, engine, room)


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
