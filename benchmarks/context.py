"""What do long texts cost, and what is accepted behind them? Contexts of 128 to 4096 tokens.

A prompt of a domain stands behind other prompts of it, cut to the length asked for. The target's
own answers are then forced on plain decoding and on every draft, in random order. With a profile
its cost model's break-even stands beside the measured one, so that one sees how far it carries.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path

import torch
from common import DOMAINS, conditions, parser, publish, say, table

from autotune.sample import read_prompts, render
from autotune.what_if import what_if
from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedRun, run_forced
from engine.memory import need_of
from engine.pair import LoadedTarget, load_draft, load_target
from engine.trace import Trace, record
from profiles import GREEDY, TreeConfig

TREES = {
    "lookup": TreeConfig(depth=8, width=1, top_k=1, nodes=8),
    "demo": TreeConfig(depth=3, width=3, top_k=3, nodes=6),
    "hybrid:demo": TreeConfig(depth=3, width=3, top_k=3, nodes=6),
}


@dataclass(frozen=True)
class Size:
    """How much is run: contexts in tokens, texts behind each, and tokens of an answer."""

    contexts: tuple[int, ...]
    n_texts: int
    n_new: int


FULL = Size((128, 256, 512, 1024, 2048, 4096), 4, 48)
QUICK = Size((128, 512, 1024), 2, 24)


@dataclass(frozen=True)
class Cell:
    """One draft behind one length of context.

    Attributes:
        plain: The plain run of each text.
        speculative: The run of each text with the draft's tree.
    """

    plain: Sequence[ForcedRun]
    speculative: Sequence[ForcedRun]

    @property
    def plain_ms(self) -> float:
        """Milliseconds of a plain token."""
        return 1e3 * statistics.median(run.decode_s / (run.n_tokens - 1) for run in self.plain)

    @property
    def tau(self) -> float:
        """Tokens per round."""
        stats = [run.stats for run in self.speculative]
        return sum(s.n_round_tokens for s in stats) / sum(s.n_rounds for s in stats)

    @property
    def speedup(self) -> float:
        """Plain over speculative decoding time, the target's prefill left out."""
        return sum(r.decode_s for r in self.plain) / sum(r.decode_s for r in self.speculative)

    @property
    def break_even_tau(self) -> float:
        """Round time over plain token time."""
        return self.tau / self.speedup


def main() -> None:
    """Record, run, and print."""
    options = parser(__doc__)
    options.add_argument("--target", default="demo")
    options.add_argument("--domain", default="code")
    options.add_argument("--profile", type=Path, help="predict from this profile's cost model")
    arguments = options.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size = QUICK if arguments.quick else FULL
    loaded = load_target(arguments.target)
    sides = {"plain": SpeculativeDecoder(loaded)}
    sides |= {
        name: SpeculativeDecoder(loaded, load_draft(name, loaded).draft, tree)
        for name, tree in TREES.items()
    }
    rng = random.Random(arguments.seed)
    cells: dict[tuple[int, str], Cell] = {}
    for context in size.contexts:
        say(f"Behind {context} tokens.")
        traces = texts(loaded, arguments.domain, context, size, rng)
        runs = run_all(sides, traces, rng)
        cells |= {(context, name): Cell(runs["plain"], runs[name]) for name in TREES}
    show(cells, arguments, loaded, size)


def texts(
    loaded: LoadedTarget, domain: str, context: int, size: Size, rng: random.Random
) -> list[Trace]:
    """Return answers to prompts of exactly `context` tokens."""
    records = read_prompts(DOMAINS / f"{domain}.jsonl").records
    rendered = [render(prompt, [], loaded.tokenizer) for prompt in records]
    traces = []
    for i, last in enumerate(rng.sample(rendered, size.n_texts)):
        others = rng.sample(rendered, len(rendered))
        before = list(chain.from_iterable(_until(others, context)))
        prompt = [*before, *last][-context:]
        traces.append(
            record(
                loaded.target,
                f"{context}-{i}",
                prompt,
                max_new_tokens=size.n_new,
                eos_ids=(),  # an answer that ends at once would time nothing
                sampling=GREEDY,
                seed=0,
                index=i,
            )
        )
    return traces


def _until(parts: Sequence[Sequence[int]], n_tokens: int) -> list[Sequence[int]]:
    """Take parts in turn, anew where they run out, until they have that many tokens."""
    taken: list[Sequence[int]] = []
    n = 0
    for part in cycle(parts):
        if n >= n_tokens:
            break
        taken.append(part)
        n += len(part)
    return taken


def run_all(
    sides: dict[str, SpeculativeDecoder], traces: Sequence[Trace], rng: random.Random
) -> dict[str, list[ForcedRun]]:
    """Run every side on every text, in random order within a text."""
    for decoder in sides.values():
        run_forced(decoder, traces[0])  # warm-up
    runs: dict[str, list[ForcedRun]] = {name: [] for name in sides}
    for trace in traces:
        for name in rng.sample(list(sides), len(sides)):
            runs[name].append(run_forced(sides[name], trace))
    return runs


def predicted(profile: Path, name: str, context: int, n_new: int) -> float:
    """Return the break-even tau that a profile's cost model gives."""
    tree = TREES[name]
    shape = {key: getattr(tree, key) for key in ("depth", "width", "top_k", "nodes")}
    asked = {"draft": name, **shape, "context": context, "output_length": n_new}
    return what_if(profile, asked).answers[0].break_even_tau


def show(
    cells: dict[tuple[int, str], Cell],
    arguments: argparse.Namespace,
    loaded: LoadedTarget,
    size: Size,
) -> None:
    """Print the figures."""
    n_bytes = {context: need_of(loaded.target).bytes(context) for context in size.contexts}
    rows, figures = [], {}
    for (context, name), cell in cells.items():
        row = [
            f"{name} {TREES[name].label()}",
            context,
            cell.plain_ms,
            cell.tau,
            cell.break_even_tau,
            f"{cell.speedup:.2f}x",
            statistics.median(run.stats.prefill_s for run in cell.plain),
            n_bytes[context] / 2**20,
        ]
        key = f"{name.replace(':', '_')}_{context}"
        figures |= {f"tau_{key}": cell.tau, f"speedup_{key}": cell.speedup}
        figures[f"break_even_tau_{key}"] = cell.break_even_tau
        if arguments.profile:
            guess = predicted(arguments.profile, name, context, size.n_new)
            figures[f"predicted_break_even_tau_{key}"] = guess
            row.insert(5, guess)
        rows.append(row)
    columns = ["draft", "context", "plain ms", "tau", "break-even", "speedup", "prefill s", "MiB"]
    if arguments.profile:
        columns.insert(5, "predicted")
    facts = conditions(
        loaded.target.device,
        dtype=loaded.ref.dtype,
        target=loaded.ref.id,
        domain=arguments.domain,
        texts=size.n_texts,
        new_tokens=size.n_new,
        text="forced, greedy",
        **{"MiB": "estimated for plain decoding, weights left out"},
    )
    publish(figures, facts, [table("Long contexts, decoding only", columns, rows)], arguments.json)


if __name__ == "__main__":
    main()
