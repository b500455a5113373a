"""Steps 1 and 2 for a serving engine: sample, models on disk, device, and the plain server."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.devices import resolve_dtype
from engine.fingerprint import describe_device
from engine.model_files import TargetFiles, find_draft, find_target
from engine.trace import Trace
from profiles import Device, DraftRef
from profiles.errors import UsageError

from ..sample import Sample, build_sample, read_prompts
from .interface import Deployment, Served, ServingEngine
from .lengths import Family

if TYPE_CHECKING:
    from ..job import Models
    from ..progress import Silent
    from ..settings import Settings

WINDOWS = {"": (1, 5), " min_match=3 max_match=8": (3, 8)}
"""Shortest and longest match of the lookups that are tried, by what is added to their names:
eager, and careful."""

SUFFIX = DraftRef(kind="suffix", min_match=1, max_match=24)
"""vLLM's suffix drafts as they are: trees 24 deep, of the request alone."""

MAX_CANDIDATES = 8
"""Settings measured at most: each takes the start of a server."""

SPARE_TOKENS = 32
"""Room beyond the longest answer, for drafts that reach over its end."""

FIXED_PROMPT, FIXED_TOKENS = 32, 16
"""Tokens of the prompt and the answer of the text whose time tells the machine's pace."""


@dataclass(frozen=True)
class ServerJob:
    """A job for a serving engine, ready to start.

    Attributes:
        engine: The engine.
        deployment: What all its servers have in common.
        target: The target's files.
        families: The drafts, each with its knobs.
        sample: Prompts to tune on and to judge on; a unit of timing takes as many of them as
            requests are served at once.
        domain: Name of the domain.
        device: The device as a profile describes it.
        settings: How much to look at.
    """

    engine: ServingEngine
    deployment: Deployment
    target: TargetFiles
    families: list[Family]
    sample: Sample
    domain: str
    device: Device
    settings: "Settings"

    @property
    def name(self) -> str:
        """Return a short name for the profile."""
        parts = (Path(self.target.ref.id).stem, self.domain, self.engine.name)
        return "-".join("".join(c if c.isalnum() else "-" for c in part) for part in parts).lower()

    @property
    def n_candidates(self) -> int:
        """Settings to measure at most; plain is one of the settings' trials."""
        return max(1, min(MAX_CANDIDATES, self.settings.n_trials - 1))

    @property
    def baseline(self) -> str:
        """What plain decoding is here, in words."""
        threads = "threads" if self.device.kind == "cpu" else "device"
        return (
            f"{self.engine.title} {self.engine.version} without a draft, same dtype, same "
            f"{threads}, {self.deployment.concurrency} at once"
        )

    @property
    def pauses(self) -> bool:
        """Whether idle servers are put to sleep; on accelerators they are ended instead."""
        return self.engine.device_kind == "cpu"

    @property
    def fixed(self) -> Trace:
        """A short text whose time tells the machine's pace."""
        prompt = list(self.sample.tune[0].token_ids[-FIXED_PROMPT:])
        return Trace("fixed", prompt, [0] * FIXED_TOKENS)


def start(server: Served, servers: ExitStack) -> Served:
    """Start a server that the stack ends, whatever happens.

    Raises:
        SpectuneError: It did not start; what it left is ended.
    """
    servers.callback(server.stop)
    server.start()
    return server


def prepare(
    engine: ServingEngine,
    models: "Models",
    prompts: str | Path,
    domain: str | None,
    settings: "Settings",
    *,
    concurrency: int,
    more: Sequence[str],
    logs: Path,
    progress: "Silent",
) -> ServerJob:
    """Read the prompts, find the models, draw the sample and look at the device.

    Raises:
        SpectuneError: A file, a model, a draft or the device cannot be used.
    """
    if concurrency < 1:
        raise UsageError(f"--concurrency must be at least 1, but is {concurrency}")
    device = _device(engine, models.device)
    dtype = str(resolve_dtype(models.dtype, torch.device(engine.device_kind)))
    dtype = dtype.removeprefix("torch.")
    target = find_target(
        models.target,
        dtype=dtype,
        trust_remote_code=models.trust_remote_code,
        progress=progress.say,
    )
    families, folders = families_of(engine, models.drafts, settings)
    longest = (target.max_positions or 2**31) - settings.max_new_tokens - SPARE_TOKENS
    if longest < 1:
        raise UsageError(
            f"max_new_tokens must leave room for a prompt in the target's {target.max_positions} "
            f"positions, but is {settings.max_new_tokens}; lower it"
        )
    sample = build_sample(
        read_prompts(prompts),
        target.tokenizer,
        seed=settings.seed,
        n_tune=settings.n_tune * concurrency,
        n_holdout=settings.n_holdout * concurrency,
        max_prompt_tokens=min(settings.max_prompt_tokens, longest),
        raw=settings.raw,
    )
    sample = replace(sample, tune=sample.tune[: settings.n_race * concurrency])
    if len(sample.tune) < concurrency:
        raise UsageError(
            f"serving {concurrency} requests at once needs as many prompts to tune on, but there "
            f"are {len(sample.tune)}; give more prompts, or lower --concurrency"
        )
    progress.say(sample.summary())
    deployment = Deployment(
        model=target.folder,
        dtype=dtype,
        threads=device.threads or 1,
        max_tokens=_max_tokens(sample, target, settings),
        logs=logs,
        concurrency=concurrency,
        sampling=settings.sampling,
        seed=settings.seed,
        folders=folders,
        more=tuple(more),
        trust_remote_code=models.trust_remote_code,
    )
    domain = domain or Path(prompts).stem
    return ServerJob(engine, deployment, target, families, sample, domain, device, settings)


def families_of(
    engine: ServingEngine, names: Sequence[str], settings: "Settings"
) -> tuple[list[Family], Mapping[str, Path]]:
    """Return the drafts that are tried, and the folders of those with weights by id.

    Raises:
        UsageError: The engine does not run such a draft, or there are too many.
        SpectuneError: A draft cannot be read.
    """
    families: list[Family] = []
    folders: dict[str, Path] = {}
    for name in dict.fromkeys(names):
        if name == "lookup":
            for knobs, (low, high) in WINDOWS.items():
                ref = DraftRef(kind="lookup", min_match=low, max_match=high)
                families.append(Family(name + knobs, ref, settings.max_lookup_depth))
        elif name == "suffix":
            families.append(Family(name, SUFFIX, settings.max_lookup_depth))
        elif name.startswith("hybrid"):
            raise UsageError(
                f"{engine.title} has no hybrid drafts, but {name} was given; give the head and "
                "lookup or suffix instead, the best of them is taken"
            )
        else:
            ref, folder = find_draft(name)
            assert ref.id is not None  # noqa: S101 - the schema asks for it
            folders[ref.id] = folder
            families.append(Family(name, ref, settings.max_depth))
    for family in families:
        if family.ref.kind not in engine.drafts:
            raise UsageError(
                f"{engine.title} runs drafts of kind {', '.join(sorted(engine.drafts))}, but "
                f"{family.draft} is of kind {family.ref.kind}; leave it out"
            )
    if not 1 <= len(families) <= MAX_CANDIDATES:
        raise UsageError(
            f"a job for {engine.title} measures 1 to {MAX_CANDIDATES} drafts, but "
            f"{len(families)} were given; give fewer --draft"
        )
    return families, folders


def _device(engine: ServingEngine, asked: str) -> Device:
    """Return the device as the engine sees it."""
    if asked != "auto" and asked.partition(":")[0] != engine.device_kind:
        raise UsageError(
            f"this build of {engine.title} computes on {engine.device_kind}, but --device is "
            f"{asked}; give the Python of another build"
        )
    kind = engine.device_kind if asked == "auto" else asked
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(
            f"this build of {engine.title} computes on cuda, but torch finds none here; run on a "
            "machine that has it, with a torch that can describe it"
        )
    libraries = {"torch": None, "transformers": None, **engine.libraries}
    return Device(**describe_device(kind) | libraries)


def _max_tokens(sample: Sample, target: TargetFiles, settings: "Settings") -> int:
    """Return the longest prompt and answer together; later turns grow on those before."""
    longest = max(
        len(prompt.token_ids) * prompt.n_turns for prompt in (*sample.tune, *sample.holdout)
    )
    turns = max(prompt.n_turns for prompt in (*sample.tune, *sample.holdout))
    needed = longest + turns * settings.max_new_tokens + SPARE_TOKENS
    needed = max(needed, FIXED_PROMPT + FIXED_TOKENS + SPARE_TOKENS)
    return min(needed, target.max_positions or needed)
