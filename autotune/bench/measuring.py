"""Our decoding, transformers' `generate` and the machine's floor, timed in one run."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.decoder import SpeculativeDecoder
from engine.floor import MachineLimits, measure_limits, work_of
from engine.pair import LoadedDraft, LoadedTarget, load_draft
from engine.trace import Trace, record
from profiles import GREEDY, Profile
from profiles.errors import UsageError

from ..progress import Silent
from ..sample import build_sample, read_prompts
from .contenders import PLAIN_NAME, ours, untuned_tree, warm_up_text
from .contest import Contender, Standing, compete, standings, warm_up

FLOOR = "floor of this machine"


@dataclass(frozen=True)
class Bench:
    """What a run gave.

    Attributes:
        standings: What every contender reached, the floor last.
        limits: What the machine can do, measured before and after the runs.
        skipped: Why a contender is missing, by name.
    """

    standings: list[Standing]
    limits: MachineLimits
    skipped: dict[str, str]


def speculating(
    loaded: LoadedTarget,
    drafts: Sequence[str],
    profile: Profile | None,
    progress: Silent,
    *,
    trust: bool = False,
) -> tuple[list[Contender], dict[str, LoadedDraft]]:
    """Return our speculative decoders, and the drafts given by name.

    Args:
        loaded: The target.
        drafts: Drafts to run with an untuned tree.
        profile: A profile to run as it would serve.
        progress: Told what is loaded, and why a profile is not trusted.
        trust: Use the profile's tree though it does not fit this deployment.
    """
    found = {name: load_draft(name, loaded, progress.say) for name in dict.fromkeys(drafts)}
    contenders = []
    for name, draft in found.items():
        tree = untuned_tree(draft)
        decoder = SpeculativeDecoder(loaded, draft.draft, tree)
        contenders.append(ours(f"spectune {name}, untuned {tree.label()}", decoder))
    if profile is not None:
        decoder = served(profile, loaded, progress, trust=trust)
        contenders.append(ours(f"spectune {profile.name}, {decoder.tree.label()}", decoder))
    return contenders, found


def served(
    profile: Profile, loaded: LoadedTarget, progress: Silent, *, trust: bool = False
) -> SpeculativeDecoder:
    """Return the decoder of a profile, as `run` would serve it; what is not trusted is told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decoder = SpeculativeDecoder.from_profile(
            profile, loaded=loaded, sampling=GREEDY, trust=trust
        )
    for warning in caught:
        progress.say(f"Warning: {warning.message}")
    return decoder


def choose_prompts(
    loaded: LoadedTarget,
    file: str | Path,
    *,
    n_prompts: int,
    max_new_tokens: int,
    seed: int,
    raw: bool,
    progress: Silent,
) -> list[list[int]]:
    """Return the token ids of prompts of a file, chosen by seed.

    Raises:
        UsageError: The target's context has no room for a prompt and the answer.
        SpectuneError: The file cannot be used.
    """
    longest = (loaded.target.max_positions or 2**31) - max_new_tokens
    if longest < 1:
        raise UsageError(
            f"max_new_tokens must leave room for a prompt in the target's "
            f"{loaded.target.max_positions} positions, but is {max_new_tokens}; lower it"
        )
    sample = build_sample(
        read_prompts(file),
        loaded.tokenizer,
        seed=seed,
        n_tune=n_prompts,
        n_holdout=0,
        max_prompt_tokens=longest,
        raw=raw,
    )
    n = len(sample.tune)
    progress.say(
        f"{n} prompt{'s' * (n > 1)} of {Path(file).name}, {sample.mean_prompt_tokens:.0f} tokens "
        "on average."
    )
    return [list(prompt.token_ids) for prompt in sample.tune]


def record_texts(
    loaded: LoadedTarget, prompts: Sequence[list[int]], max_new_tokens: int, progress: Silent
) -> list[Trace]:
    """Decode prompts plainly: the texts that every contender is then timed on."""
    traces = []
    with progress.step("Recording answers", len(prompts)) as tick:
        for index, prompt in enumerate(prompts):
            trace = record(
                loaded.target,
                str(index),
                prompt,
                max_new_tokens=max_new_tokens,
                eos_ids=loaded.eos_ids,
                sampling=GREEDY,
                seed=0,
                index=index,
            )
            traces.append(trace)
            tick()
    return traces


def bench(
    loaded: LoadedTarget,
    contenders: Sequence[Contender],
    traces: Sequence[Trace],
    progress: Silent,
    skipped: dict[str, str] | None = None,
) -> Bench:
    """Time plain decoding and the contenders on the texts, in turns, beside the floor."""
    target, skipped = loaded.target, dict(skipped or {})
    everybody = [ours(PLAIN_NAME, SpeculativeDecoder(loaded)), *contenders]
    limits, work = measure_limits(target.device, target.dtype), work_of(target)
    with progress.step("Warming up", len(everybody)) as tick:
        warm_up(everybody, warm_up_text(traces, target.vocab_size), skipped, tick)
    n_runs = len(traces) * sum(contender.name not in skipped for contender in everybody)
    with progress.step("Decoding", n_runs) as tick:
        runs = compete(everybody, traces, skipped=skipped, tick=tick)
    limits = limits.or_better(measure_limits(target.device, target.dtype))
    if work is None:
        skipped[FLOOR] = "how much of a mixture of experts a pass reads depends on the text"
    else:
        runs[FLOOR] = [work.plain_text(limits, trace) for trace in traces]
    return Bench(standings(runs, traces, PLAIN_NAME), limits, skipped)
