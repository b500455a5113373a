"""How well the demo head drafts: agreement and tokens per round on text it was not trained on.

Greedy answers of the demo target to the prompts of `examples/domains`, replayed. Prints, per
domain and as a mean, the share of positions where the head's first choice is the target's next
token, tau of a chain of three and of a tree of ten nodes, acceptance by depth and rank, and how
much the text repeats itself, since loops flatter every draft.
"""

from collections.abc import Sequence

import torch
from common import DOMAINS, conditions, parser, publish, say, table

from autotune.sample import read_prompts, render
from engine.pair import load_draft, load_target
from engine.replay import Replay
from engine.trace import Trace, record
from profiles import Sampling, TreeConfig

CHAIN = TreeConfig.chain(3)
TREE = TreeConfig(depth=5, width=4, top_k=4, nodes=10)


def repeated_share(traces: Sequence[Trace], n: int = 4) -> float:
    """Return the share of n-grams of the answers that occurred before in the same answer."""
    seen = repeated = 0
    for trace in traces:
        ngrams = [tuple(trace.generated[i : i + n]) for i in range(len(trace.generated) - n + 1)]
        seen += len(ngrams)
        repeated += len(ngrams) - len(set(ngrams))
    return repeated / max(1, seen)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--target", default="demo")
    options.add_argument("--draft", default="demo")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--domains", nargs="+", default=["code", "chat", "math"])
    options.add_argument("--prompts", type=int, default=32, help="prompts per domain")
    options.add_argument("--max-new-tokens", type=int, default=128)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.prompts, arguments.max_new_tokens = 6, 64
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    loaded = load_target(arguments.target, dtype=arguments.dtype)
    draft = load_draft(arguments.draft, loaded).draft
    figures: dict[str, dict[str, float]] = {}
    accepted: dict[str, list[list[float]]] = {}
    for domain in arguments.domains:
        prompts = read_prompts(DOMAINS / f"{domain}.jsonl").records[: arguments.prompts]
        say(f"{domain}: {len(prompts)} prompts")
        traces = [
            record(
                loaded.target,
                prompt.id,
                render(prompt, [], loaded.tokenizer),
                max_new_tokens=arguments.max_new_tokens,
                eos_ids=loaded.eos_ids,
                sampling=Sampling(temperature=0.0),
                seed=arguments.seed,
                index=index,
            )
            for index, prompt in enumerate(prompts)
        ]
        replay = Replay(loaded.target, draft, traces, TREE.depth)
        taus = {}
        for name, tree in (("tau_chain3", CHAIN), ("tau_tree10", TREE)):
            rounds = replay.rounds(tree)
            taus[name] = sum(int(r.n_emitted.sum()) for r in rounds) / sum(
                len(r.n_emitted) for r in rounds
            )
        tried, by_rank = replay.acceptance()
        accepted[domain] = [
            [n / max(1, t) for n in row] for t, row in zip(tried, by_rank, strict=True)
        ]
        figures[domain] = {
            "agreement_step0": accepted[domain][0][0],
            **taus,
            "repeated_4grams": repeated_share(traces),
        }
    names = list(next(iter(figures.values())))
    figures["mean"] = {
        name: sum(f[name] for f in figures.values()) / len(arguments.domains) for name in names
    }
    tables = [
        table(
            f"Draft {arguments.draft}, greedy; tree {TREE.label()}",
            ["domain", *names],
            [[domain, *(f[name] for name in names)] for domain, f in figures.items()],
        ),
        table(
            "Share of expanded nodes whose child of that rank was right",
            ["domain, depth", *(f"rank {k + 1}" for k in range(TREE.top_k))],
            [
                [f"{domain}, {depth}", *row]
                for domain, rows in accepted.items()
                for depth, row in enumerate(rows, start=1)
            ],
        ),
    ]
    facts = conditions(
        loaded.target.device,
        dtype=loaded.ref.dtype,
        target=loaded.ref.id,
        draft=arguments.draft,
        prompts=arguments.prompts,
        max_new_tokens=arguments.max_new_tokens,
    )
    publish(figures, facts, tables, arguments.json)


if __name__ == "__main__":
    main()
