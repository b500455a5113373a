"""What each command does. Heavy packages are imported by the commands that need them."""

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles import (
    GREEDY,
    Profile,
    Sampling,
    compare,
    load,
    validated,
)
from profiles.errors import UsageError

from .console import tell
from .report.command import show_profile
from .serving_engines.command import check_options, run_on_server

if TYPE_CHECKING:
    from engine.decoder import Generation, SpeculativeDecoder

    from .sample import Prompt

MAX_THREADS = 1024
"""More are a mistake, and the system may refuse to make them."""


def tune(arguments: argparse.Namespace) -> None:
    """Run a tuning job and print its result."""
    from .job import Models
    from .pipeline import plan
    from .pipeline import tune as run_job
    from .progress import OnTerminal

    check_options(arguments)
    set_threads(arguments.threads)
    domain = arguments.domain or arguments.prompts.stem
    out = arguments.out or Path(f"spectune-{domain}.yaml")
    models = Models(
        arguments.target,
        arguments.draft or ["lookup"],
        arguments.dtype,
        arguments.device,
        arguments.trust_remote_code,
        arguments.history,
    )
    settings, progress = _settings(arguments), OnTerminal()
    budget_s = _seconds(arguments.budget_min)
    if arguments.quick:
        progress.say(
            f"A quick job holds out {settings.n_holdout} prompts of {settings.max_new_tokens} "
            "tokens: what it proves is less certain than by default."
        )
    if arguments.backend != "spectune":
        planned = run_on_server(arguments, models, domain, settings, out, progress)
    elif arguments.dry_run:
        planned = plan(
            models, arguments.prompts, settings=settings, budget_s=budget_s, progress=progress
        )
    else:
        planned = None
        run_job(
            models,
            arguments.prompts,
            out,
            domain=domain,
            settings=settings,
            keep_text=arguments.keep_text,
            storage=arguments.storage,
            resume=arguments.resume,
            study=arguments.study,
            budget_s=budget_s,
            progress=progress,
        )
    if planned is None:
        show_profile(out, as_json=arguments.json)
        on_own = arguments.backend == "spectune"
        then = f"run {out} --prompt TEXT" if on_own else f"export {out} --to {arguments.backend}"
        tell(f"Wrote {out}. Next: spectune {then}")
    elif arguments.json:
        _print_json({"plan_s": planned.seconds, "total_s": planned.total_s})
    else:
        print(planned.text())


def run(arguments: argparse.Namespace) -> None:
    """Decode prompts with a profile.

    Raises:
        SpectuneError: The profile, its models or the prompts cannot be used.
    """
    from engine.decoder import SpeculativeDecoder

    if arguments.compare and arguments.stream:
        raise UsageError("--compare prints figures and --stream prints text; give one of them")
    profile = load(arguments.profile)
    set_threads(profile.device.threads if profile.device.kind == "cpu" else None)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: tell(f"spectune: {message}")
        decoder = SpeculativeDecoder.from_profile(
            profile,
            device=arguments.device,
            sampling=_sampling(arguments, profile.sampling),
            trust=arguments.trust,
        )
    _note_differences(profile, decoder)
    prompts = _prompts(arguments)
    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        "stop": arguments.stop,
        "raw": arguments.raw or decoder.raw,
    }
    if arguments.compare:
        _compare(arguments, decoder, prompts, options)
        return
    results = [
        _converse(decoder, prompt, options | {"index": index}, arguments)
        for index, prompt in enumerate(prompts)
    ]
    if arguments.json:
        stats = decoder.stats
        _print_json(
            {"profile": profile.name, "tree": decoder.tree.label()}
            | {"adaptive": profile.adaptive, "guard": stats and asdict(stats), "results": results}
        )


def _note_differences(profile: Profile, decoder: "SpeculativeDecoder") -> None:
    """Tell what is harmless but not as it was when the profile was made."""
    from engine.decoder import facts

    if profile.decision == "plain":
        return
    here = facts(decoder.loaded, profile.draft, decoder.sampling)
    for mismatch in compare(profile, here):
        if mismatch.level == "noted":
            tell(f"spectune: {mismatch}")


def _converse(
    decoder: "SpeculativeDecoder",
    prompt: "Prompt",
    options: dict[str, Any],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Answer the turns of a prompt in order; print them unless JSON is wanted."""
    from engine.text import TextStream

    from .sample import render

    answers: list[str] = []
    results = []
    for _ in prompt.turns:
        ids = render(prompt, answers, decoder.loaded.tokenizer, raw=options["raw"])
        request = decoder.request(ids, **options)
        stream = TextStream(decoder.loaded.tokenizer)
        for token_ids in decoder.run(request):
            if arguments.stream and not arguments.json:
                print(stream.push(token_ids), end="", flush=True)
        generation = decoder.result(request)
        if arguments.stream and not arguments.json:
            print(stream.finish(), flush=True)
        elif not arguments.json:
            print(generation.text)
        answers.append(generation.text)
        results.append(_as_json(generation))
    return results


def _as_json(generation: "Generation") -> dict[str, Any]:
    stats = generation.stats
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "rounds": stats.n_rounds,
        "round_tokens": stats.n_round_tokens,
        "drafted": stats.n_drafted,
        "accepted_by_depth": stats.accepted_by_depth,
        "prefill_ms": 1e3 * stats.prefill_s,
        "total_ms": 1e3 * stats.total_s,
    }


def _compare(
    arguments: argparse.Namespace,
    decoder: "SpeculativeDecoder",
    prompts: "list[Prompt]",
    options: dict[str, Any],
) -> None:
    from .comparing import compare_decoders, print_comparison
    from .sample import render

    tokenizer = decoder.loaded.tokenizer
    ids = [render(prompt, [], tokenizer, raw=options["raw"]) for prompt in prompts]
    figures = compare_decoders(decoder, ids, options)
    if arguments.json:
        _print_json(figures)
    else:
        print_comparison(figures)


def _prompts(arguments: argparse.Namespace) -> "list[Prompt]":
    from .sample import Prompt, UnusableError, describe_skipped, read_prompts, read_turns

    if arguments.limit is not None and arguments.limit < 1:
        raise UsageError(f"--limit must be at least 1, but is {arguments.limit}")
    if arguments.prompt is None:
        file = read_prompts(arguments.prompts)
        if file.skipped:
            tell(f"Skipped {describe_skipped(file.skipped, file.unit)}.")
        return file.records[: arguments.limit]
    try:
        return [Prompt(read_turns({"prompt": arguments.prompt}))]
    except UnusableError as error:
        raise UsageError(f"a prompt needs some text, but --prompt {error}") from error


def _settings(arguments: argparse.Namespace) -> Any:
    from .settings import Settings

    changes = {
        name: value
        for name, value in (
            ("n_tune", arguments.tune_prompts),
            ("n_holdout", arguments.holdout_prompts),
            ("max_new_tokens", arguments.max_new_tokens),
            ("max_prompt_tokens", arguments.max_prompt_tokens),
            ("n_trials", arguments.trials),
            ("max_nodes", arguments.max_nodes),
            ("max_depth", arguments.max_depth),
            ("engine_space", arguments.engine_space),
            ("batch_sizes", arguments.batch_sizes),
        )
        if value is not None
    }
    changes |= {
        "sampling": _sampling(arguments, GREEDY),
        "seed": arguments.seed,
        "raw": arguments.raw,
    }
    return Settings.quick(**changes) if arguments.quick else Settings(**changes)


def _seconds(minutes: float | None) -> float | None:
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UsageError(f"--budget-min must be above 0, but is {minutes:g}")
    return None if minutes is None else 60 * minutes


def _sampling(arguments: argparse.Namespace, default: Sampling) -> Sampling:
    """Return the sampling asked for; what was not given is the default's."""
    given = {
        "temperature": arguments.temperature,
        "top_k": arguments.sample_top_k,
        "top_p": arguments.sample_top_p,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return validated(Sampling, default.model_dump() | changes, "the sampling options")


def set_threads(threads: int | None) -> None:
    """Let torch compute with so many CPU threads, or leave it its choice.

    Raises:
        UsageError: No machine has so many.
    """
    if threads is None:
        return
    if not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"--threads must be from 1 to {MAX_THREADS}, but is {threads}")
    import torch

    torch.set_num_threads(threads)


def _print_json(document: Any) -> None:
    json.dump(document, sys.stdout, ensure_ascii=False)
    print()
