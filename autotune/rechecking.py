"""Measuring a profile against plain decoding again, and what that does to the profile."""

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from engine.decoder import SpeculativeDecoder
from engine.forced import run_forced
from engine.pair import LoadedTarget
from engine.reference import reference_times
from engine.trust import UntrustedProfileWarning
from profiles import (
    PLAIN,
    Alternative,
    Profile,
    Recheck,
    draft_name,
    is_sealed,
    sealed,
    validated,
)
from profiles.errors import SpectuneError
from profiles.times import now

from .holdout import PairedTimes, judge
from .progress import Silent
from .proving import run_interleaved, times_of
from .sample import build_sample, read_prompts
from .settings import Settings
from .steady import pace_of
from .tracing import record_answers

N_PASSES = 30
"""Fixed passes that tell about how long one takes."""


@dataclass(frozen=True)
class _Source:
    """What is needed to let the target speak."""

    loaded: LoadedTarget
    settings: Settings


def recheck(
    profile: Profile,
    prompts: str | Path,
    *,
    n_prompts: int = 8,
    max_new_tokens: int = 64,
    raw: bool = False,
    trust: bool = False,
    trust_remote_code: bool = False,
    progress: Silent | None = None,
) -> Recheck:
    """Measure a profile that speculates against plain decoding: forced text, A B B A.

    Args:
        profile: The profile.
        prompts: Prompts of its domain.
        n_prompts: How many of them are used; fewer than 8 prove nothing.
        max_new_tokens: Tokens per answer.
        raw: Leave out the chat template, as is done anyway where the profile's prompts had none.
        trust: Measure although the profile does not fit this machine.
        trust_remote_code: Let the target's checkpoint run its own Python code.
        progress: Told what is being done.

    Raises:
        SpectuneError: The profile does not fit, or its models or the prompts cannot be used.
    """
    progress = progress or Silent()
    decoder = _decoder(profile, trust=trust, trust_remote_code=trust_remote_code)
    raw = raw or decoder.raw
    loaded = decoder.loaded
    settings = Settings(max_new_tokens=max_new_tokens, sampling=profile.sampling, raw=raw)
    longest = (loaded.target.max_positions or 2**31) - max_new_tokens
    sample = build_sample(
        read_prompts(prompts),
        loaded.tokenizer,
        seed=settings.seed,
        n_tune=n_prompts,
        n_holdout=0,
        max_prompt_tokens=min(settings.max_prompt_tokens, longest),
        raw=raw,
    )
    progress.say(sample.summary(is_split=False))
    source = _Source(loaded, settings)
    texts = record_answers(source, sample.tune, progress, "Tracing")
    run_forced(decoder, texts[0][0])  # warm-up; plain decoding is warm from tracing
    pass_s = pace_of(loaded.target, statistics.fmean(reference_times(loaded.target, N_PASSES)))
    plain = SpeculativeDecoder(loaded, sampling=profile.sampling)
    with progress.step("Measuring again", 4 * len(texts)) as tick:
        steadily = run_interleaved([plain, decoder], texts, pass_s, tick)
    if note := steadily.summary():
        progress.say(f"Warning: {note}")
    (times,) = times_of(list(steadily.blocks.values()), 1)
    return verdict_on(times, max_new_tokens)


def verdict_on(times: PairedTimes, max_new_tokens: int) -> Recheck:
    """Return the result: each of the two sides may be proved the faster one, or neither."""
    faster, slower = judge(times, 1), judge(times.swapped(), 1)
    return Recheck(
        date=now().date(),
        spectune=version("spectune"),
        prompts=faster.n_prompts,
        max_new_tokens=max_new_tokens,
        ratio=faster.ratio if faster.n_prompts else None,
        low=faster.low,
        high=1 / slower.low if slower.low else None,
        confidence=faster.confidence,
        verdict="confirmed"
        if faster.is_faster
        else "refuted"
        if slower.is_faster
        else "inconclusive",
    )


def with_recheck(profile: Profile, found: Recheck) -> Profile:
    """Return the profile with a re-check appended; a refuted one decodes plainly from now on.

    The evidence it was written with stays: as its own, or, once refuted, as the first of the
    alternatives.
    """
    changes: dict[str, object] = {"rechecks": (*profile.rechecks, found)}
    if found.verdict == "refuted":
        changes |= _refuted(profile, found)
    changed = profile.model_copy(update=changes)
    # An edited profile stays one: a re-check vouches for no other figure.
    changed = sealed(changed) if is_sealed(profile) else changed
    return validated(Profile, changed.model_dump(), profile.name)


def _refuted(profile: Profile, found: Recheck) -> dict[str, object]:
    rivals: Sequence[Alternative] = profile.alternatives
    if profile.evidence is not None:
        draft = draft_name(profile.draft)
        was = Alternative(draft=draft, tree=profile.tree, evidence=profile.evidence)
        rivals = (was, *rivals)
    return {
        "decision": "plain",
        "reason": f"Slower than plain decoding when measured again: {describe(found)}.",
        "tree": PLAIN,
        "adaptive": False,
        "evidence": None,
        "batch_schedule": (),
        "alternatives": tuple(rivals),
    }


def describe(found: Recheck) -> str:
    """Return the figures of a re-check in words."""
    if found.ratio is None:
        return "no prompt was measured undisturbed"
    high = "" if found.high is None else f" and at most {found.high:.3f}x"
    return (
        f"{found.ratio:.3f}x in total, at least {found.low:.3f}x{high} at "
        f"{100 * found.confidence:.0f} % confidence each, on {found.prompts} prompts of up to "
        f"{found.max_new_tokens} tokens"
    )


def _decoder(profile: Profile, *, trust: bool, trust_remote_code: bool) -> SpeculativeDecoder:
    """Return the profile's decoder, on the very path that serves; refuse one that does not fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrustedProfileWarning)
        try:
            return SpeculativeDecoder.from_profile(
                profile, trust=trust, trust_remote_code=trust_remote_code
            )
        except UntrustedProfileWarning as warning:
            raise SpectuneError(str(warning)) from None
