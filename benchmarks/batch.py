"""Does speculation pay with several prompts at a time? Throughput under a profile's schedule.

Queues of prompts are served plainly and under the schedule, at every batch size, forced to the
same text, there and back (A B B A) on every queue; a queue holds twice as many prompts as are in
flight, so that rows are filled again and the batch runs empty at the end, as in serving. The
profile is tuned once, with these sizes, and kept in `--folder`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import DOMAINS, conditions, parser, publish, say, table

from autotune import Models, Settings, tune
from autotune.progress import OnTerminal
from autotune.sample import read_prompts, render
from engine.decoder import SpeculativeDecoder
from engine.forced import run_forced, run_forced_batch
from engine.pair import LoadedTarget, load_target
from engine.trace import Trace, record
from profiles import GREEDY, Profile, load

PROMISED = 0.99
"""What the interval of every size must reach."""

TINY_JOB = Settings.quick(
    n_tune=6, n_holdout=8, n_replay=4, n_race=2, max_new_tokens=16, n_trials=3, n_probe_rounds=3
)


@dataclass(frozen=True)
class Size:
    """How much is run: queues per batch size, and tokens of an answer."""

    n_queues: int
    n_new: int


FULL, QUICK = Size(6, 48), Size(2, 16)


@dataclass(frozen=True)
class Served:
    """One batch size: tokens and seconds by queue."""

    tokens: list[int]
    plain_s: list[float]
    scheduled_s: list[float]

    def ratio(self) -> tuple[float, float, float]:
        """Return how much faster the schedule is, with the 95 % interval of a bootstrap."""
        plain, ours = np.array(self.plain_s), np.array(self.scheduled_s)
        rows = np.random.default_rng(0).integers(len(ours), size=(2000, len(ours)))
        low, high = np.quantile(plain[rows].sum(1) / ours[rows].sum(1), [0.025, 0.975])
        return float(plain.sum() / ours.sum()), float(low), float(high)


def main() -> None:
    """Tune if there is no profile, serve, and print."""
    options = parser(__doc__)
    options.add_argument("--profile", type=Path, help="default: tuned, in the folder")
    options.add_argument("--target", default="demo")
    options.add_argument("--draft", action="append", help="default: lookup")
    options.add_argument("--domain", default="rewrite")
    options.add_argument("--sizes", type=int, nargs="+", help="default: 1 2 4 8, quick 1 2")
    options.add_argument("--folder", type=Path, help="default: out/batch")
    arguments = options.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size = QUICK if arguments.quick else FULL
    arguments.sizes = arguments.sizes or ([1, 2] if arguments.quick else [1, 2, 4, 8])
    profile = load(arguments.profile or tuned(arguments))
    loaded = load_target(profile.target.id, dtype=profile.target.dtype or "auto")
    longest = 2 * max(arguments.sizes) * size.n_queues
    traces = recorded(loaded, arguments.domain, longest, size.n_new)
    sides = {
        "plain": SpeculativeDecoder(loaded, sampling=profile.sampling),
        "scheduled": SpeculativeDecoder.from_profile(profile, loaded=loaded),
    }
    served = {n: serve(sides, traces, n, size.n_queues) for n in arguments.sizes}
    show(served, profile, loaded, size, as_json=arguments.json)


def tuned(arguments: argparse.Namespace) -> Path:
    """Return the profile tuned with the batch sizes, made if it is not there."""
    folder = arguments.folder or Path("out/batch-quick" if arguments.quick else "out/batch")
    path: Path = folder / f"{arguments.domain}.yaml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        job = TINY_JOB if arguments.quick else Settings()
        settings = replace(job, batch_sizes=tuple(arguments.sizes))
        models = Models(arguments.target, arguments.draft or ["lookup"])
        prompts = DOMAINS / f"{arguments.domain}.jsonl"
        tune(models, prompts, path, settings=settings, progress=OnTerminal())
    return path


def recorded(loaded: LoadedTarget, domain: str, n: int, n_new: int) -> list[Trace]:
    """Return the target's own greedy answers to the first `n` prompts of a domain."""
    prompts = read_prompts(DOMAINS / f"{domain}.jsonl").records[:n]
    say(f"Recording {len(prompts)} answers.")
    return [
        record(
            loaded.target,
            prompt.id,
            render(prompt, [], loaded.tokenizer),
            max_new_tokens=n_new,
            eos_ids=loaded.eos_ids,
            sampling=GREEDY,
            seed=0,
            index=i,
        )
        for i, prompt in enumerate(prompts)
    ]


def serve(
    sides: dict[str, SpeculativeDecoder], traces: Sequence[Trace], batch_size: int, n_queues: int
) -> Served:
    """Serve queues on both sides; the answers are taken in turn, anew where they run out."""
    say(f"Serving {batch_size} at a time.")
    n, served = 2 * batch_size, Served([], [], [])
    queues = [[traces[(i * n + j) % len(traces)] for j in range(n)] for i in range(n_queues)]
    for decoder in sides.values():
        seconds(decoder, queues[0][:batch_size], batch_size)  # warm-up
    for queue in queues:
        took = dict.fromkeys(sides, 0.0)
        for name in [*sides, *reversed(sides)]:
            took[name] += seconds(sides[name], queue, batch_size)
        served.tokens.append(2 * sum(len(trace.generated) for trace in queue))
        served.plain_s.append(took["plain"])
        served.scheduled_s.append(took["scheduled"])
    return served


def seconds(decoder: SpeculativeDecoder, queue: Sequence[Trace], batch_size: int) -> float:
    """Return the wall seconds of a queue; single prompts are served by themselves."""
    if batch_size == 1:
        return sum(run_forced(decoder, trace).total_s for trace in queue)
    return run_forced_batch(decoder, queue, batch_size).total_s


def show(
    served: dict[int, Served], profile: Profile, loaded: LoadedTarget, size: Size, *, as_json: bool
) -> None:
    """Print the figures."""
    ratios = {n: each.ratio() for n, each in served.items()}
    rows = [
        [
            n,
            profile.tree_of_batch(n).label(),
            sum(each.tokens) / sum(each.plain_s),
            sum(each.tokens) / sum(each.scheduled_s),
            "{:.3f} [{:.3f}, {:.3f}]".format(*ratios[n]),
        ]
        for n, each in served.items()
    ]
    worst = min(ratios, key=lambda n: ratios[n][0])
    figures = {
        **{f"speedup_{n}": ratio for n, (ratio, _, _) in ratios.items()},
        **{f"speedup_{n}_low": low for n, (_, low, _) in ratios.items()},
        **{f"speedup_{n}_high": high for n, (_, _, high) in ratios.items()},
        **{f"plain_tokens_per_s_{row[0]}": row[2] for row in rows},
        "worst_speedup": ratios[worst][0],
        "worst_speedup_high": ratios[worst][2],
        "kept": all(high >= PROMISED for _, _, high in ratios.values()),
    }
    facts = conditions(
        loaded.target.device,
        dtype=loaded.ref.dtype,
        target=loaded.ref.id,
        draft=profile.draft.id or profile.draft.kind,
        batch=", ".join(map(str, served)),
        domain=profile.domain.name,
        queues=size.n_queues,
        new_tokens=size.n_new,
    )
    columns = ["prompts at a time", "tree", "plain tokens/s", "scheduled tokens/s", "speedup"]
    title = f"Throughput of {profile.name} under its schedule, 95 % interval"
    publish(figures, facts, [table(title, columns, rows)], as_json)


if __name__ == "__main__":
    main()
