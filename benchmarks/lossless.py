"""Count the texts that speculation changes: random cases, then the demo pair.

Random tiny targets in float64 (Llama, Qwen3, Mistral and Gemma 2 with sliding windows, GPT-NeoX;
tied and untied, odd head sizes), with every kind of draft, tree, sampling, processor and stopping
rule; with `--minutes N` these alone. Then the demo target on prompts of five domains, in float32
(no difference is allowed) and in bfloat16. There a pass over several tokens rounds differently
from a pass over one, so leads of one token over another shift a little; that shift is measured on
the same texts, and a difference counts as rounding only if the lead of plain decoding's choice
was within it.
"""

import argparse
import json
import math
import platform
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from common import say  # noqa: E402

from engine.decode import Request, decode  # noqa: E402
from engine.demo import demo_head_path  # noqa: E402
from engine.draft import Draft  # noqa: E402
from engine.pair import LoadedTarget, load_draft, load_target  # noqa: E402
from engine.sampling import Sampler  # noqa: E402
from engine.stopping import StopRules  # noqa: E402
from engine.text import encode_prompt  # noqa: E402
from lossless_cases import (  # noqa: E402
    Tap,
    Verdict,
    first_difference,
    judge,
    judge_crowd,
    random_wanted,
)
from profiles import PLAIN, TreeConfig  # noqa: E402

DOMAINS = ROOT / "examples" / "domains"
TREES = {
    "lookup": TreeConfig(depth=5, width=2, top_k=3, nodes=10),
    "suffix": TreeConfig(depth=16, width=2, top_k=2, nodes=16),
    "demo": TreeConfig(depth=4, width=3, top_k=3, nodes=12),
    "hybrid:demo": TreeConfig(depth=4, width=3, top_k=3, nodes=12),
}


@dataclass(frozen=True)
class Size:
    """How much is run."""

    n_cases: float
    minutes: float
    n_prompts_per_domain: int
    n_new: int


TELL_EVERY_S = 60

SHARE_OF_BATCHES = 0.25
"""Of the random cases: several requests at a time, beside each other."""

QUICK = Size(n_cases=150, minutes=0.6, n_prompts_per_domain=1, n_new=24)
FULL = Size(n_cases=3000, minutes=30.0, n_prompts_per_domain=8, n_new=128)


@dataclass
class DemoResult:
    """What the demo pair showed in one dtype.

    Attributes:
        n_texts: Texts decoded with a draft.
        n_accepted: Draft tokens accepted in them.
        leads: For each text that differed, the lead in logits that plain decoding's token had
            over speculation's token where they first differ.
        shifts: With the plain text forced on both: by how much the lead of the best token over
            the second differed between plain and speculative decoding, at every token.
    """

    n_texts: int = 0
    n_accepted: int = 0
    leads: list[float] = field(default_factory=list)
    shifts: list[float] = field(default_factory=list)


def run_random_cases(size: Size, seed: int) -> Verdict:
    """Judge random requests until the number or the time is reached."""
    rng, verdict = random.Random(seed), Verdict()
    started = told = time.monotonic()
    while verdict.n_cases < size.n_cases and time.monotonic() < started + 60 * size.minutes:
        if rng.random() < SHARE_OF_BATCHES:
            judge_crowd(rng, verdict)
        else:
            judge(random_wanted(rng), rng, verdict)
        if time.monotonic() > told + TELL_EVERY_S:
            told = time.monotonic()
            minutes = (told - started) / 60
            say(f"{minutes:.0f} min: {verdict.n_cases} cases, {len(verdict.differences)} differ")
    return verdict


def demo_prompts(n_per_domain: int) -> list[str]:
    """Return the first prompts of every domain."""
    prompts = []
    for path in sorted(DOMAINS.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()[:n_per_domain]
        prompts += [json.loads(line)["prompt"] for line in lines]
    return prompts


def decode_ids(
    loaded: LoadedTarget,
    ids: list[int],
    n_new: int,
    draft: Draft | None,
    tree: TreeConfig,
    tap: Tap | None = None,
    forced: list[int] | None = None,
) -> Request:
    """Decode greedily, without an end token, so that every text has its full length."""
    sampler = Sampler(processors=[tap] if tap else [])
    request = Request(loaded.target, draft, ids, sampler, StopRules(n_new), forced)
    for _ in decode(request, lambda _: tree):
        pass
    return request


def run_demo(dtype: str, size: Size) -> DemoResult:
    """Decode the demo prompts plainly and with each draft of the demo target."""
    loaded = load_target("demo", dtype=dtype, device="cpu")
    heads = ["demo", "hybrid:demo"] if demo_head_path().is_dir() else []
    drafts = {name: load_draft(name, loaded).draft for name in ["lookup", "suffix", *heads]}
    result = DemoResult()
    for prompt in demo_prompts(size.n_prompts_per_domain):
        ids = encode_prompt(prompt, loaded.tokenizer)
        tap = Tap()
        plain = decode_ids(loaded, ids, size.n_new, None, PLAIN, tap).generated
        for name, draft in drafts.items():
            request = decode_ids(loaded, ids, size.n_new, draft, TREES[name])
            result.n_texts += 1
            result.n_accepted += sum(request.stats.accepted_by_depth)
            if request.generated != plain:
                result.leads.append(plain_lead(tap, plain, request.generated))
            forced = Tap()
            decode_ids(loaded, ids, size.n_new, draft, TREES[name], forced, plain)
            result.shifts += lead_shifts(tap, forced)
    return result


def plain_lead(tap: Tap, plain: list[int], other: list[int]) -> float:
    """Return the logit lead of plain's token over the other where the texts first differ."""
    index = first_difference(plain, other)
    logits = tap.scores[index]
    return float(logits[plain[index]] - logits[other[index]])


def lead_shifts(plain: Tap, other: Tap) -> list[float]:
    """Return how far the lead of plain's best token over its second moved, token by token."""
    shifts = []
    for ours, theirs in zip(plain.scores, other.scores, strict=True):
        best, second = ours.topk(2).indices
        shifts.append(float(((ours - theirs)[best] - (ours - theirs)[second]).abs()))
    return shifts


def noise_quantiles(result: DemoResult) -> list[float]:
    """Return the median, the 90th and the 99th percentile of the shifts."""
    shifts = torch.tensor(result.shifts, dtype=torch.float64)
    return [float(q) for q in shifts.quantile(torch.tensor([0.5, 0.9, 0.99]).double())]


def measure(size: Size, seed: int, *, with_demo: bool) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    verdict = run_random_cases(size, seed)
    figures, conditions = of_random_cases(verdict, seed)
    if with_demo:
        demo = {dtype: run_demo(dtype, size) for dtype in ("float32", "bfloat16")}
        more, how = of_demo(demo, size)
        figures, conditions = figures | more, conditions | how
    return {"figures": figures, "conditions": conditions}


Figures = tuple[dict[str, Any], dict[str, Any]]
"""What was found, and under which conditions."""


def of_random_cases(verdict: Verdict, seed: int) -> Figures:
    """Return what the random cases showed."""
    figures = {
        "cases": verdict.n_cases,
        "differences": len(verdict.differences),
        "near_ties": verdict.near_ties,
    }
    conditions = {
        "seed": seed,
        "case_dtype": "float64",
        "accepted_by_draft": dict(sorted(verdict.n_accepted.items())),
        "first_differences": verdict.differences[:5],
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return figures, conditions


def of_demo(demo: dict[str, DemoResult], size: Size) -> Figures:
    """Return what the demo pair showed, by dtype."""
    noise = max(demo["bfloat16"].shifts)
    return (
        {
            "demo_fp32_differences": len(demo["float32"].leads),
            "demo_bf16_differences": len(demo["bfloat16"].leads),
            "demo_bf16_largest_gap": max(demo["bfloat16"].leads, default=0.0),
            "demo_bf16_noise": noise,
            "demo_bf16_beyond_noise": sum(lead > noise for lead in demo["bfloat16"].leads),
        },
        {
            "demo_texts": demo["float32"].n_texts,
            "demo_tokens_per_text": size.n_new,
            "demo_accepted": {dtype: result.n_accepted for dtype, result in demo.items()},
            "demo_fp32_leads": demo["float32"].leads,
            "demo_fp32_noise": max(demo["float32"].shifts),
            "demo_bf16_noise_quantiles": dict(
                zip(("0.5", "0.9", "0.99"), noise_quantiles(demo["bfloat16"]), strict=True)
            ),
            "demo_bf16_leads": sorted(demo["bfloat16"].leads, reverse=True),
            "demo_trees": {name: tree.label() for name, tree in TREES.items()},
        },
    )


def show(document: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table("figure", "value", title="Is the text the same with and without speculation?")
    for name, value in document["figures"].items():
        table.add_row(name, f"{value:g}")
    console = Console()
    console.print(table)
    for name, value in document["conditions"].items():
        console.print(f"{name}: {value}", style="dim", highlight=False)


def main() -> int:
    """Run the benchmark; exit code 1 if a text differs that must not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="end within two minutes")
    parser.add_argument("--cases", type=int, help="random cases to run")
    parser.add_argument("--minutes", type=float, help="run random cases alone, for so long")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random cases")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    n_cases = size.n_cases if arguments.minutes is None else math.inf
    n_cases = n_cases if arguments.cases is None else arguments.cases
    size = Size(
        n_cases=n_cases,
        minutes=size.minutes if arguments.minutes is None else arguments.minutes,
        n_prompts_per_domain=size.n_prompts_per_domain,
        n_new=size.n_new,
    )
    document = measure(size, arguments.seed, with_demo=arguments.minutes is None)
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)
    figures = document["figures"]
    return int(bool(figures["differences"] or figures.get("demo_fp32_differences")))


if __name__ == "__main__":
    sys.exit(main())
