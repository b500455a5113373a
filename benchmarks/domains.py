"""What tuning gives on the five domains of `examples/domains`: the table of the README.

Runs one tuning job per domain on the demo pair and prints what each profile says: the tree, tau,
break-even tau, decode and end-to-end speedup on the holdout with its lower bound, and plain
decoding against transformers' generate. Profiles are kept in `--folder` and not made twice.
"""

from pathlib import Path

from common import DOMAINS, parser, publish, table

from autotune import Models, Settings, tune
from autotune.progress import OnTerminal
from profiles import Evidence, Profile, load


def main() -> None:
    """Tune where no profile lies yet, and print."""
    options = parser(__doc__, quick="jobs as of `tune --quick`: some minutes for each domain")
    options.add_argument("--target", default="demo")
    options.add_argument("--draft", action="append", help="default: lookup, demo and hybrid")
    options.add_argument(
        "--domains", nargs="+", default=["code", "math", "chat", "rewrite", "atypical"]
    )
    options.add_argument("--folder", type=Path, default=Path("out/domains"))
    arguments = options.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    settings = Settings.quick() if arguments.quick else Settings()
    models = Models(arguments.target, arguments.draft or ["lookup", "demo", "hybrid"])
    profiles = {}
    for domain in arguments.domains:
        path = arguments.folder / f"{domain}.yaml"
        if not path.exists():
            prompts = DOMAINS / f"{domain}.jsonl"
            tune(models, prompts, path, settings=settings, progress=OnTerminal())
        profiles[domain] = load(path)
    figures = {domain: figures_of(profile) for domain, profile in profiles.items()}
    columns = ("decision", "draft", "tree", "tau", "break_even", "decode", "speedup", "at_least")
    columns += ("worst_prompt", "plain_over_generate")
    rows = [[domain, *(f.get(name, "") for name in columns)] for domain, f in figures.items()]
    first = next(iter(profiles.values()))
    conditions = first.device.model_dump() | {
        "dtype": first.target.dtype,
        "batch": 1,
        "baseline": "plain decoding on this engine",
        "holdout prompts": first.domain.n_holdout,
        "new tokens": first.domain.max_new_tokens,
    }
    title = f"{models.target} + {', '.join(models.drafts)}, greedy, on the holdout"
    publish(figures, conditions, [table(title, ["domain", *columns], rows)], arguments.json)


def figures_of(profile: Profile) -> dict[str, str | float]:
    """Return what a profile says; for `plain`, the figures of the best rival."""
    judged: list[tuple[str, str, Evidence]] = [
        (rival.draft, rival.tree.label(), rival.evidence) for rival in profile.alternatives
    ]
    if profile.evidence:
        draft = profile.draft.id or profile.draft.kind
        judged.insert(0, (draft, profile.tree.label(), profile.evidence))
    if not judged:
        return {"decision": profile.decision}
    draft, tree, evidence = judged[0]
    return {
        "decision": profile.decision,
        "draft": draft,
        "tree": tree,
        "tau": evidence.tau,
        "break_even": evidence.break_even_tau,
        "decode": evidence.decode_speedup,
        "speedup": evidence.speedup.ratio,
        "at_least": evidence.speedup.low,
        "worst_prompt": evidence.speedup.worst_prompt,
        "plain_over_generate": evidence.plain_over_transformers_generate or 0.0,
    }


if __name__ == "__main__":
    main()
