"""Our decoding beside other engines on the same CPU, model, prompts and threads, in one run.

Always: transformers' `generate`, and the floor (bytes over bandwidth, operations over matrix
rate). Where installed, each in an environment of its own: vLLM's CPU build, OpenVINO GenAI and
llama.cpp, plain and with their own drafts from the text itself. `benchmarks/README.md` says how
to install them. Engines take turns: a few prompts each, in alternating order, while the servers
that are not timed sleep; every engine decodes every prompt once, to the same number of tokens.

Per domain of `examples/domains`, speculation uses the profile `--profiles DIR/*DOMAIN.yaml`, or
else `--draft` with an untuned tree. Finished domains are kept in `--records`, and an interrupted
run goes on with the next one.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import DOMAINS, conditions, parser, publish, say
from peer_figures import SPECULATIVE, domain_figures, overall_figures, speed_cell, speeds
from peer_passes import pass_figures
from peer_records import PeerRecords
from peer_setup import add_places, configured_peers, start, versions
from peer_tables import tables

from autotune.bench.contenders import PLAIN_NAME, generate_modes, ours, untuned_tree, warm_up_text
from autotune.bench.contest import Contender, Runs, compete, warm_up
from autotune.bench.measuring import FLOOR, record_texts, served
from autotune.progress import OnTerminal
from autotune.sample import build_sample, read_prompts
from autotune.serving_engines.process import interrupt_on_signals
from autotune.serving_engines.server import Server
from autotune.settings import Settings
from engine.decoder import SpeculativeDecoder
from engine.floor import measure_limits, work_of
from engine.pair import LoadedTarget, load_draft, load_target
from engine.trace import Trace
from profiles import Profile, load

N_BEFORE = 8
"""Tokens of the untimed text at the start of every turn."""


@dataclass(frozen=True)
class Domain:
    """A domain's texts, and the decoder that speculates on them."""

    texts: list[Trace]
    decoder: SpeculativeDecoder
    profile: Profile | None


def main() -> None:
    """Measure and print."""
    arguments = read_options()
    interrupt_on_signals()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    progress = OnTerminal()
    loaded = load_target(arguments.target, dtype=arguments.dtype, device="cpu")
    domains = {name: prepare(name, arguments, loaded, progress) for name in arguments.domains}
    peers = [] if arguments.quick else configured_peers(arguments, loaded)
    records = PeerRecords(arguments.records, settings_of(arguments, loaded, domains, peers))
    limits = measure_limits(loaded.target.device, loaded.target.dtype)
    skipped: dict[str, str] = {}
    by_domain = time_domains(arguments, loaded, domains, peers, records, skipped, progress)
    say("timing passes")
    texts = next(iter(domains.values())).texts
    passes = pass_figures(loaded, load_draft(arguments.draft, loaded).draft, texts)
    limits = limits.or_better(measure_limits(loaded.target.device, loaded.target.dtype))
    if (work := work_of(loaded.target)) is not None:
        for name, runs in by_domain.items():
            runs[FLOOR] = [work.plain_text(limits, text) for text in domains[name].texts]
    figures: dict[str, Any] = overall_figures(by_domain) | passes
    figures |= {name: domain_figures(runs) for name, runs in by_domain.items()}
    figures["tokens_per_s"] = {name: speeds(runs) for name, runs in by_domain.items()}
    facts = conditions(
        loaded.target.device,
        dtype=loaded.ref.dtype,
        target=loaded.ref.id,
        trees={name: domain.decoder.tree.label() for name, domain in domains.items()},
        prompts_per_domain=arguments.prompts,
        max_new_tokens=arguments.max_new_tokens,
        bandwidth_gb_per_s=round(limits.bytes_per_s / 1e9, 1),
        matrix_gflop_per_s=round(limits.operations_per_s / 1e9),
        peers=versions(arguments),
        left_out=skipped,
    )
    publish(figures, facts, tables(by_domain, figures), arguments.json)


def time_domains(
    arguments: argparse.Namespace,
    loaded: LoadedTarget,
    domains: dict[str, Domain],
    peers: Sequence[Server],
    records: PeerRecords,
    skipped: dict[str, str],
    progress: OnTerminal,
) -> dict[str, Runs]:
    """Return the runs of every domain; those that are recorded already are not run again."""
    recorded = {name: runs for name in domains if (runs := records.get(name)) is not None}
    if len(recorded) == len(domains):
        return recorded
    contenders = common_contenders(arguments, loaded, skipped)
    with ExitStack() as stack:
        contenders += start(peers, stack, skipped)
        say("warming up")
        texts = [text for domain in domains.values() for text in domain.texts]
        warm_up(contenders, warm_up_text(texts, loaded.target.vocab_size), skipped)
        for name, domain in domains.items():
            if name not in recorded:
                turn = [contenders[0], ours(SPECULATIVE, domain.decoder), *contenders[1:]]
                runs = compare(name, domain.texts, turn, arguments.block, skipped, progress)
                records.put(name, runs)
                recorded[name] = runs
    for name, reason in skipped.items():
        say(f"left out: {name}: {reason}")
    return {name: recorded[name] for name in domains}


def read_options() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--target", default="demo")
    options.add_argument("--draft", default="demo", help="where there is no profile")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--profiles", type=Path, help="folder with a profile for every domain")
    options.add_argument(
        "--domains", nargs="+", default=["code", "math", "chat", "rewrite", "atypical"]
    )
    options.add_argument("--prompts", type=int, default=6, help="prompts per domain")
    options.add_argument("--block", type=int, default=3, help="prompts per turn")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--compiled", action="store_true", help="also compile `generate`")
    options.add_argument("--records", type=Path, default=Path("out/peers.json"))
    add_places(options)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.domains = arguments.domains[:1] + arguments.domains[-2:-1]
        arguments.prompts, arguments.max_new_tokens = 3, 48
        arguments.records = arguments.records.with_stem(f"{arguments.records.stem}-quick")
    return arguments


def prepare(
    name: str, arguments: argparse.Namespace, loaded: LoadedTarget, progress: OnTerminal
) -> Domain:
    """Choose a domain's decoder, and record texts on which its tree was not searched."""
    profile = find_profile(arguments.profiles, name)
    if profile is None:
        draft = load_draft(arguments.draft, loaded)
        decoder = SpeculativeDecoder(loaded, draft.draft, untuned_tree(draft))
    else:
        decoder = served(profile, loaded, progress)
    records = read_prompts(DOMAINS / f"{name}.jsonl")
    for settings in (Settings.quick(), Settings()):
        sample = build_sample(
            records,
            loaded.tokenizer,
            seed=arguments.seed,
            n_tune=settings.n_tune,
            n_holdout=settings.n_holdout,
            max_prompt_tokens=settings.max_prompt_tokens,
        )
        if profile and sample.fingerprint == profile.domain.sample_sha256:
            break
    else:
        if profile is not None:
            say(
                f"{name}: the profile was made with another sample, so its tree may have seen "
                "some of the prompts"
            )
    say(f"{name}: {decoder.tree.label()}")
    prompts = [list(prompt.token_ids) for prompt in sample.holdout[: arguments.prompts]]
    return Domain(
        record_texts(loaded, prompts, arguments.max_new_tokens, progress), decoder, profile
    )


def find_profile(folder: Path | None, domain: str) -> Profile | None:
    """Return the profile `DOMAIN.yaml` or `*-DOMAIN.yaml` of a folder."""
    if folder is None:
        return None
    found = sorted([*folder.glob(f"{domain}.yaml"), *folder.glob(f"*-{domain}.yaml")])
    return load(found[0]) if found else None


def common_contenders(
    arguments: argparse.Namespace, loaded: LoadedTarget, skipped: dict[str, str]
) -> list[Contender]:
    """Return plain decoding, and the modes of `generate`."""
    modes, left_out = generate_modes(loaded, {}, with_compiled=arguments.compiled)
    skipped |= left_out
    return [ours(PLAIN_NAME, SpeculativeDecoder(loaded)), *modes]


def compare(
    domain: str,
    texts: Sequence[Trace],
    contenders: Sequence[Contender],
    block: int,
    skipped: dict[str, str],
    progress: OnTerminal,
) -> Runs:
    """Let the contenders decode a domain's texts in turns."""
    before = Trace("before", texts[0].prompt[-32:], [0] * N_BEFORE)
    n_runs = len(texts) * sum(contender.name not in skipped for contender in contenders)
    with progress.step(domain, n_runs) as tick:
        runs = compete(contenders, texts, block=block, before=before, skipped=skipped, tick=tick)
    for name in runs:
        say(f"{domain}: {name}: {speed_cell(runs, name)} tokens/s (decode only)")
    return runs


def settings_of(
    arguments: argparse.Namespace,
    loaded: LoadedTarget,
    domains: dict[str, Domain],
    peers: Sequence[Server],
) -> dict[str, Any]:
    """Return everything the runs depend on."""
    return {
        "target": loaded.ref.model_dump(mode="json"),
        "threads": torch.get_num_threads(),
        "block": arguments.block,
        "compiled": arguments.compiled,
        "trees": {name: domain.decoder.tree.label() for name, domain in domains.items()},
        "profiles": {
            name: domain.profile and domain.profile.model_dump(mode="json")
            for name, domain in domains.items()
        },
        "draft": arguments.draft,
        "texts": {name: [t.tokens for t in domain.texts] for name, domain in domains.items()},
        "peers": [peer.name for peer in peers],
        "versions": conditions(loaded.target.device),
    }


if __name__ == "__main__":
    main()
