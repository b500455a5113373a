"""What a device makes of passes, drafts and rounds: the figures behind a tree, in one command.

    python benchmarks/gpu.py --shape 8b                   # random weights, recorded acceptance
    python benchmarks/gpu.py --target T --draft HEAD      # a real pair, from folders or the hub
    python benchmarks/gpu.py --shape tiny --quick         # whether it runs, anywhere

Prints the latency of passes over 1 to 512 tokens beside the least that the memory's bandwidth and
the matrix rate allow, the parts of a round by tree, plain decoding against transformers'
`generate` (compiled, too) and against speculation, what CUDA graphs save, and how far the cost
model is off on trees that it was not fitted on. With `--shape` the weights are drawn at random in
the sizes of Qwen3-1.7B, 4B or 8B and their EAGLE-3 heads; how far rounds get is then taken from
`gpu_acceptance.json`, which `--record` writes from the demo pair. Texts are forced, so that all
sides do the same work.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import DOMAINS, conditions, parser, publish, say, table
from gpu_acceptance import (
    RECORDED,
    TREES,
    ForcedDraft,
    Recording,
    load_recording,
    record_demo,
    rounds_of,
)
from gpu_shapes import SHAPES, random_pair
from peer_figures import overall_figures
from peer_passes import pass_figures

from autotune.bench.contenders import GENERATE, PLAIN_NAME, generate_modes, ours, warm_up_text
from autotune.bench.contest import Runs, compete, flat, warm_up
from autotune.bench.measuring import FLOOR, choose_prompts, record_texts
from autotune.bench.speeds import median_of, ratio_of_totals
from autotune.cost import CostModel
from autotune.cost.fitting import grouped
from autotune.cost.timing import draft_probes, verify_probes
from autotune.progress import Silent
from autotune.space import SearchSpace
from engine.contexts import measure_contexts
from engine.decoder import SpeculativeDecoder
from engine.devices import resolve_device, resolve_dtype
from engine.draft import Draft
from engine.floor import MachineLimits, Work, measure_limits, work_of
from engine.pair import LoadedTarget, load_draft, load_target
from engine.replay import Replay, ReplayedRounds
from engine.rounds import ProbeDraft, RoundTime, measure_rounds
from engine.target import Target
from engine.timing import synchronize
from engine.trace import Trace
from profiles import GREEDY, TreeConfig

CURVE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512)
"""Tokens of the timed passes."""

COMPILED = "transformers compiled"


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        n_passes: Timed passes per point of the latency curve.
        curve: Its points.
        context: Tokens before them.
        n_texts: Texts to decode whole.
        n_prompt, n_new: Tokens of a text.
        n_rounds: Timed rounds per tree.
        n_left_out: Trees to judge the cost model on.
    """

    n_passes: int = 40
    curve: tuple[int, ...] = CURVE
    context: int = 512
    n_texts: int = 6
    n_prompt: int = 512
    n_new: int = 256
    n_rounds: int = 30
    n_left_out: int = 10


QUICK = Size(
    n_passes=5,
    curve=(1, 2, 8, 32, 128, 512),
    context=64,
    n_texts=2,
    n_prompt=48,
    n_new=32,
    n_rounds=4,
    n_left_out=3,
)


# --- what is measured ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A pair and its texts.

    Attributes:
        loaded: The target.
        draft: The draft.
        texts: Forced on every side.
        recording: How far rounds get where the pair's own say nothing; else None.
    """

    loaded: LoadedTarget
    draft: Draft
    texts: list[Trace]
    recording: Recording | None

    def drafting(self, tree: TreeConfig) -> Any:
        """Return the draft for rounds of a tree: as it is, or with recorded acceptance."""
        if self.recording is None:
            return self.draft
        return ForcedDraft(self.draft, self._accepted(tree))

    def rounds(self, tree: TreeConfig) -> list[ReplayedRounds]:
        """Return the rounds that a tree takes on the texts, recorded or replayed."""
        if self.recording is None:
            return Replay(self.loaded.target, self.draft, self.texts, tree.depth).rounds(tree)
        return [rounds_of(self._accepted(tree), tree, len(t.generated)) for t in self.texts]

    def _accepted(self, tree: TreeConfig) -> list[int]:
        assert self.recording is not None  # noqa: S101 - asked by the callers
        return [n for text in self.recording[tree.label()] for n in text]


def subject_of(arguments: argparse.Namespace, size: Size) -> Subject:
    """Load or make the pair, and choose its texts: recorded answers, or random tokens."""
    device = resolve_device(arguments.device)
    if arguments.target is None:
        dtype = resolve_dtype(arguments.dtype, device)
        loaded, draft = random_pair(arguments.shape, dtype, device, arguments.seed)
        texts = random_texts(loaded.target, size, arguments.seed)
        return Subject(loaded, draft, texts, load_recording(arguments.acceptance))
    loaded = load_target(arguments.target, dtype=arguments.dtype, device=str(device))
    progress = Silent()
    prompts = choose_prompts(
        loaded,
        arguments.prompts,
        n_prompts=size.n_texts,
        max_new_tokens=size.n_new,
        seed=arguments.seed,
        raw=False,
        progress=progress,
    )
    texts = record_texts(loaded, prompts, size.n_new, progress)
    return Subject(loaded, load_draft(arguments.draft, loaded).draft, texts, None)


def random_texts(target: Target, size: Size, seed: int) -> list[Trace]:
    """Return texts of random tokens: what they say does not matter to the time they take."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.n_texts, size.n_prompt + size.n_new)
    rows = torch.randint(0, target.vocab_size, shape, generator=generator).tolist()
    n = size.n_prompt
    return [Trace(str(i), row[:n], row[n:]) for i, row in enumerate(rows)]


# --- passes -------------------------------------------------------------------------------------


@torch.inference_mode()
def latency_curve(target: Target, size: Size, seed: int) -> dict[int, list[float]]:
    """Return the seconds of passes by their tokens, in random order, the first ones left out."""
    rng, vocabulary = random.Random(seed), range(target.vocab_size)
    cache = target.lend_cache(size.context)
    target.forward(rng.choices(vocabulary, k=size.context), cache, last_only=True)
    seconds: dict[int, list[float]] = {n: [] for n in size.curve}
    for i in range(size.n_passes + 2):
        for n in rng.sample(size.curve, len(size.curve)):
            tokens = rng.choices(vocabulary, k=n)
            synchronize(target.device)
            started = time.perf_counter()
            target.forward(tokens, cache)
            synchronize(target.device)
            if i > 1:
                seconds[n].append(time.perf_counter() - started)
            cache.truncate(size.context)
    return seconds


def curve_figures(
    curve: dict[int, list[float]], work: Work | None, limits: MachineLimits, context: int
) -> dict[str, Any]:
    """Return the latency curve: milliseconds, over a 1-token pass, and over the floor."""
    medians = {n: statistics.median(seconds) for n, seconds in curve.items()}
    figures: dict[str, Any] = {
        "latency_ms": {n: 1e3 * s for n, s in medians.items()},
        "latency_over_1": {n: s / medians[1] for n, s in medians.items()},
    }
    if work is not None:
        figures["latency_over_floor"] = {
            n: s / work.pass_s(limits, n, context, n_logits=n) for n, s in medians.items()
        }
    return figures


# --- whole texts --------------------------------------------------------------------------------


def decode_texts(
    subject: Subject, arguments: argparse.Namespace, skipped: dict[str, str]
) -> tuple[Runs, dict[str, TreeConfig]]:
    """Let plain decoding, the trees and the modes of `generate` decode the texts in turns.

    Returns:
        The runs, and the trees by the name of their contender.
    """
    loaded, texts = subject.loaded, subject.texts
    trees = {f"spectune {tree.label()}": tree for tree in TREES}
    rivals = [
        ours(name, SpeculativeDecoder(loaded, subject.drafting(tree), tree))
        for name, tree in trees.items()
    ]
    modes, left_out = generate_modes(loaded, {}, with_compiled=arguments.compiled)
    skipped |= left_out
    modes = [mode for mode in modes if mode.name in (GENERATE, COMPILED)]
    contenders = [ours(PLAIN_NAME, SpeculativeDecoder(loaded)), *rivals, *modes]
    warm_up(contenders, warm_up_text(texts, loaded.target.vocab_size), skipped)
    return compete(contenders, texts, skipped=skipped), trees


def without_graphs(subject: Subject, n_runs: int) -> dict[str, float | None]:
    """Return plain decoding's time with passes as they come over that with recorded ones."""
    target = subject.loaded.target
    recorded, seconds = target.static, np.zeros((2, n_runs))
    if recorded is None:
        return {"plain_without_graphs_over_with": None}
    plain = ours(PLAIN_NAME, SpeculativeDecoder(subject.loaded))
    for run in range(n_runs):
        for i, static in enumerate((None, recorded)):
            target.static = static
            seconds[i, run] = plain.run(subject.texts[0]).decode_s
    return flat("plain_without_graphs_over_with", ratio_of_totals(*seconds.tolist()))


def tree_figures(
    subject: Subject, costs: CostModel, runs: Runs, trees: dict[str, TreeConfig]
) -> dict[str, dict[str, Any]]:
    """Return how fast each tree decodes beside plain decoding, and what was predicted."""
    result = {}
    lengths = [len(text.prompt) for text in subject.texts]
    for name, tree in trees.items():
        pairs = [[run.total_s for run in runs[side]] for side in (PLAIN_NAME, name)]
        decode = [sum(run.decode_s for run in runs[side]) for side in (PLAIN_NAME, name)]
        predicted = costs.predict("head", tree, subject.rounds(tree), lengths)
        speedup = decode[0] / decode[1]
        result[tree.label()] = flat("speculative_over_plain", ratio_of_totals(*pairs)) | {
            "tau": predicted.tau,
            "decode_speedup": speedup,
            "predicted_speedup": predicted.decode_speedup,
            "speedup_error": abs(predicted.decode_speedup / speedup - 1),
        }
    return result


# --- rounds and the cost model ------------------------------------------------------------------


def fit_costs(subject: Subject, space: SearchSpace, size: Size, seed: int) -> CostModel:
    """Fit the cost model as a tuning job does."""
    target, draft = subject.loaded.target, subject.drafting(TREES[2])
    probes = [
        TreeConfig(depth=1, width=1, top_k=n, nodes=n) for n in verify_probes(space.max_nodes)
    ]
    options: dict[str, Any] = {"n_rounds": size.n_rounds, "sampling": GREEDY, "seed": seed}
    contexts = measure_contexts(target, (64, max(65, 2 * size.context)), size.n_passes, seed)
    return CostModel(
        measure_rounds(target, ProbeDraft(), subject.texts, probes, **options),
        {"head": measure_rounds(target, draft, subject.texts, draft_probes(space), **options)},
        contexts,
    )


def rounds_left_out(
    subject: Subject, space: SearchSpace, size: Size, seed: int
) -> dict[TreeConfig, list[RoundTime]]:
    """Time rounds of random trees that the fit has not seen, and of those decoded whole."""
    seen = {*draft_probes(space), *TREES}
    others = [tree for tree in space.enumerate() if tree not in seen]
    chosen = random.Random(seed).sample(others, min(size.n_left_out, len(others)))
    times = measure_rounds(
        subject.loaded.target,
        subject.drafting(TREES[2]),
        subject.texts,
        [*chosen, *TREES],
        n_rounds=size.n_rounds,
        sampling=GREEDY,
        seed=seed,
    )
    return grouped(timed for timed in times if not timed.is_first)


def break_even_rows(
    costs: CostModel, by_tree: dict[TreeConfig, list[RoundTime]]
) -> list[tuple[str, float, float, float]]:
    """Return label, predicted and measured break-even tau and the error of every tree."""
    rows = []
    for tree, rounds in by_tree.items():
        predicted = statistics.median(costs.expected("head", t) for t in rounds)
        measured = statistics.median(t.total_s / t.reference_s for t in rounds)
        rows.append((tree.label(), predicted, measured, abs(predicted / measured - 1)))
    return rows


def round_parts(rounds: Sequence[RoundTime]) -> dict[str, float]:
    """Return the milliseconds of a round by part, medians."""
    parts = ("extend_s", "levels_s", "verify_s", "commit_s", "total_s", "reference_s")
    return {
        part.removesuffix("_s"): 1e3 * statistics.median(getattr(t, part) for t in rounds)
        for part in parts
    }


def scoring_s(subject: Subject, costs: CostModel, space: SearchSpace) -> float:
    """Return the mean seconds it takes to score a tree by replay of a text."""
    texts = subject.texts[:1]
    trees = list(space.enumerate(((2, 2),)))
    started = time.perf_counter()
    replay = Replay(subject.loaded.target, subject.draft, texts, space.max_depth)
    for tree in trees:
        costs.predict("head", tree, replay.rounds(tree), [len(text.prompt) for text in texts])
    return (time.perf_counter() - started) / len(trees)


# --- the run ------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Return figures, conditions and tables."""
    size, seed = QUICK if arguments.quick else Size(), arguments.seed
    subject, skipped = subject_of(arguments, size), dict[str, str]()
    loaded, target = subject.loaded, subject.loaded.target
    limits, work = measure_limits(target.device, target.dtype), work_of(target)

    say("passes")
    curve = latency_curve(target, size, seed)
    say("whole texts")
    runs, trees = decode_texts(subject, arguments, skipped)
    figures: dict[str, Any] = without_graphs(subject, max(3, size.n_texts))
    say("rounds")
    top_k = min(10, subject.draft.max_top_k)
    space = SearchSpace(8, top_k, top_k, 64)
    costs = fit_costs(subject, space, size, seed)
    by_tree = rounds_left_out(subject, space, size, seed + 1)
    figures |= pass_figures(loaded, subject.drafting(TREES[2]), subject.texts)
    limits = limits.or_better(measure_limits(target.device, target.dtype))
    if work is not None:
        runs[FLOOR] = [work.plain_text(limits, text) for text in subject.texts]

    figures |= overall_figures({"": runs})
    if COMPILED in runs:
        seconds = [[run.total_s for run in runs[name]] for name in (COMPILED, PLAIN_NAME)]
        figures |= flat("plain_over_compiled", ratio_of_totals(*seconds))
    figures["tokens_per_s"] = {
        name: median_of([run.tokens_per_s for run in done]).value for name, done in runs.items()
    }
    figures["trees"] = tree_figures(subject, costs, runs, trees)
    figures["round_parts_ms"] = {
        tree.label(): round_parts(by_tree[tree]) for tree in TREES if tree in by_tree
    }
    figures["break_even"] = break_even_rows(costs, by_tree)
    errors = [error for *_, error in figures["break_even"]]
    figures["round_error_median"] = statistics.median(errors)
    figures["round_error_p90"] = float(np.quantile(errors, 0.9))
    errors = [tree["speedup_error"] for tree in figures["trees"].values()]
    figures["speedup_error_median"] = statistics.median(errors)
    one_text_s = statistics.mean(run.total_s for name in trees for run in runs[name])
    figures["replay_speed_ratio"] = one_text_s / scoring_s(subject, costs, space)
    figures |= curve_figures(curve, work, limits, size.context)
    facts = conditions(
        target.device,
        target=loaded.ref.id,
        parameters=loaded.ref.parameters,
        dtype=loaded.ref.dtype,
        cuda_graphs=target.static is not None,
        acceptance="its own" if subject.recording is None else arguments.acceptance.name,
        bandwidth_gb_per_s=round(limits.bytes_per_s / 1e9, 1),
        matrix_gflop_per_s=round(limits.operations_per_s / 1e9),
        left_out=skipped or None,
        **vars(size) | {"curve": None},
    )
    return figures, facts, tables(figures)


def tables(figures: dict[str, Any]) -> list[Any]:
    """Return everything as tables."""
    over_floor = figures.get("latency_over_floor", {})
    curve = [
        [n, ms, figures["latency_over_1"][n], over_floor.get(n, "")]
        for n, ms in figures["latency_ms"].items()
    ]
    parts = figures["round_parts_ms"]
    names = ("tau", "decode_speedup", "predicted_speedup", "speculative_over_plain")
    trees = [[label, *(mine[name] for name in names)] for label, mine in figures["trees"].items()]
    single = [[name, value] for name, value in figures.items() if isinstance(value, float)]
    phases = ["extend", "levels", "verify", "commit", "total", "plain round"]
    return [
        table("Passes", ["tokens", "ms", "over 1 token", "over the floor"], curve),
        table("Rounds, ms", ["tree", *phases], [[t, *parts[t].values()] for t in parts]),
        table("Trees", ["tree", "tau", "decode", "predicted", "end to end"], trees),
        table(
            "Break-even tau of trees left out of the fit",
            ["tree", "predicted", "measured", "error"],
            figures["break_even"],
        ),
        table("Tokens per second", ["", "end to end"], list(figures["tokens_per_s"].items())),
        table("Figures", ["figure", "value"], single),
    ]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--shape", choices=list(SHAPES), default="1.7b", help="random weights")
    options.add_argument("--target", help="a real target instead: a folder or a hub id")
    options.add_argument("--draft", default="demo", help="the draft of a real target")
    options.add_argument(
        "--prompts", type=Path, default=DOMAINS / "chat.jsonl", help="what a real target answers"
    )
    options.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    options.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    options.add_argument(
        "--no-compiled", dest="compiled", action="store_false", help="leave compiled generate out"
    )
    options.add_argument("--acceptance", type=Path, default=RECORDED, help="recorded rounds")
    options.add_argument(
        "--record", action="store_true", help="write --acceptance from the demo pair, and end"
    )
    return options.parse_args()


def main() -> int:
    """Measure and print."""
    arguments = read_options()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.record:
        n_each, n_new = (1, 24) if arguments.quick else (4, 128)
        record_demo(arguments.acceptance, n_each, n_new, arguments.seed)
        return 0
    figures, facts, shown = measure(arguments)
    publish(figures, facts, shown, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
