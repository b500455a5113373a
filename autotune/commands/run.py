"""`spectune run`: decode prompts with a profile."""

import argparse
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiles import Profile, compare, load
from profiles.errors import UsageError

from ..console import print_json, shown, tell
from .options import (
    add_command,
    add_remote_code,
    add_sampling,
    sampling_of,
    set_threads,
    threads_of,
)

if TYPE_CHECKING:
    from engine.decoder import Generation, SpeculativeDecoder

    from ..sample import Prompt


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    text = "Decode prompts with a profile."
    command = add_command(subparsers, "run", text, run)
    command.add_argument("profile", type=Path, help="the YAML file that `tune` wrote")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="one prompt")
    source.add_argument("--prompts", type=Path, help="a file of prompts")
    command.add_argument("--stream", action="store_true", help="print text as it comes")
    command.add_argument(
        "--compare",
        action="store_true",
        help="decode the first turn of every prompt plainly and with the profile, interleaved, "
        "and print both speeds",
    )
    command.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="most tokens of an answer (default: 256)",
    )
    command.add_argument(
        "--stop",
        action="append",
        default=[],
        help="a text that ends the answer; may be given several times",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    command.add_argument("--limit", type=int, metavar="N", help="use the first N prompts only")
    command.add_argument(
        "--trust", action="store_true", help="use the tree though the profile does not fit here"
    )
    command.add_argument(
        "--raw",
        action="store_true",
        help="leave out the chat template (default: as when the profile was made)",
    )
    command.add_argument(
        "--device", help="cpu, cuda, cuda:1 or mps (default: like the one the profile was made on)"
    )
    add_remote_code(command)
    add_sampling(command, "as in the profile")


def run(arguments: argparse.Namespace) -> None:
    """Decode prompts with a profile.

    Raises:
        SpectuneError: The profile, its models or the prompts cannot be used.
    """
    from engine.decoder import SpeculativeDecoder

    if arguments.compare and arguments.stream:
        raise UsageError("--compare prints figures and --stream prints text; give one of them")
    profile = load(arguments.profile)
    set_threads(threads_of(profile))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: tell(f"spectune: {message}")
        decoder = SpeculativeDecoder.from_profile(
            profile,
            device=arguments.device,
            sampling=sampling_of(arguments, profile.sampling),
            trust=arguments.trust,
            trust_remote_code=arguments.trust_remote_code,
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
        document = {
            "profile": profile.name,
            "tree": decoder.tree.label(),
            "adaptive": profile.adaptive,
            "guard": stats and asdict(stats),
            "results": results,
        }
        print_json(document)


def _note_differences(profile: Profile, decoder: "SpeculativeDecoder") -> None:
    """Tell what is harmless but not as it was when the profile was made."""
    from engine.trust import facts

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

    from ..sample import render

    answers: list[str] = []
    results = []
    for _ in prompt.turns:
        ids = render(prompt, answers, decoder.loaded.tokenizer, raw=options["raw"])
        request = decoder.request(ids, **options)
        stream = TextStream(decoder.loaded.tokenizer)
        for token_ids in decoder.run(request):
            if arguments.stream and not arguments.json:
                print(shown(stream.push(token_ids)), end="", flush=True)
        generation = decoder.result(request)
        if arguments.stream and not arguments.json:
            print(shown(stream.finish()), flush=True)
        elif not arguments.json:
            print(shown(generation.text))
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
    from ..sample import render
    from .comparing import compare_decoders, print_comparison

    tokenizer = decoder.loaded.tokenizer
    ids = [render(prompt, [], tokenizer, raw=options["raw"]) for prompt in prompts]
    figures = compare_decoders(decoder, ids, options)
    if arguments.json:
        print_json(figures)
    else:
        print_comparison(figures)


def _prompts(arguments: argparse.Namespace) -> "list[Prompt]":
    from ..sample import Prompt, UnusableError, describe_skipped, read_prompts, read_turns

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
