"""`spectune tune`: find and prove the fastest draft tree, and write it as a profile."""

import argparse
from pathlib import Path
from typing import Any

from profiles import GREEDY
from profiles.engine_spaces import ENGINE_SPACES
from profiles.errors import UsageError

from ..console import print_json, tell
from ..report.command import show_profile
from ..serving_engines.command import check_options, run_on_server
from ..settings import Settings
from .options import add_command, add_device, add_sampling, sampling_of, set_threads


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    text = "Find and prove the fastest draft tree, and write it as a profile."
    command = add_command(subparsers, "tune", text, run)
    command.add_argument(
        "--target",
        required=True,
        help="the model to speed up: `demo`, a folder, a hub id (org/name) or a .gguf file",
    )
    command.add_argument(
        "--draft",
        action="append",
        help="what guesses its tokens: `lookup` (the default) or `suffix`, which need no model, "
        "`demo`, the folder or hub id of an EAGLE-3 head or a small model, or `hybrid`, which "
        "joins every head or small model given beside it with suffix; may be given several times, "
        "the best one is taken",
    )
    command.add_argument(
        "--history",
        type=int,
        default=0,
        metavar="N",
        help="tokens of earlier answers that suffix and hybrid drafts look in (default: 0)",
    )
    command.add_argument(
        "--prompts",
        required=True,
        type=Path,
        help="a file of prompts like those to come: .jsonl, .json, .txt (one a line), .csv or "
        ".parquet",
    )
    command.add_argument("--domain", help="a name for these prompts (default: the file's name)")
    command.add_argument(
        "--out", type=Path, help="profile to write (default: spectune-DOMAIN.yaml)"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="print how long the job would take, and stop"
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="fewer prompts, shorter answers, fewer trees: a short job that proves less",
    )
    command.add_argument(
        "--budget-min",
        type=float,
        metavar="MIN",
        help="minutes the job may take: its counts are cut until its plan fits",
    )
    serving = command.add_argument_group(
        "a serving engine", "instead of our own: its servers are started, measured and ended"
    )
    serving.add_argument(
        "--backend",
        choices=["spectune", "vllm"],
        default="spectune",
        help="the engine to tune (default: spectune, our own)",
    )
    serving.add_argument(
        "--backend-python",
        type=Path,
        metavar="PYTHON",
        help="Python of the environment it is installed in (default: $SPECTUNE_VLLM_PYTHON, "
        "else this Python)",
    )
    serving.add_argument(
        "--backend-args",
        default="",
        metavar="ARGS",
        help="further arguments of its servers in one text, such as "
        "--backend-args='--enforce-eager'",
    )
    serving.add_argument(
        "--concurrency", type=int, metavar="N", help="requests served at once (default: 1)"
    )
    command.add_argument(
        "--storage",
        metavar="URL",
        help="database for the search's record, as an Optuna URL (default: a file beside the "
        "profile)",
    )
    command.add_argument(
        "--study",
        metavar="NAME",
        help="name of a search in --storage to share: run the same command on several machines or "
        "GPUs of one kind, and each measures a part of it",
    )
    command.add_argument(
        "--resume",
        action="store_true",
        help="go on with the search of a stopped job, or, with more --trials, of a finished one",
    )
    command.add_argument(
        "--engine-space",
        choices=sorted(ENGINE_SPACES),
        help="take only drafts and trees that this engine can run",
    )
    command.add_argument(
        "--batch-sizes",
        type=_whole_numbers,
        metavar="N,N",
        help="prompts at a time for which trees are chosen and proved, such as 1,2,4,8 "
        "(default: 1)",
    )
    add_device(command)
    for name, field, text in (
        ("tune-prompts", "n_tune", "prompts to search on"),
        ("holdout-prompts", "n_holdout", "other prompts, to prove the result on"),
        ("max-new-tokens", "max_new_tokens", "most tokens of an answer"),
        ("max-prompt-tokens", "max_prompt_tokens", "longer prompts are skipped"),
        ("trials", "n_trials", "trees to measure, plain decoding counted as one"),
        ("max-nodes", "max_nodes", "most nodes of a tree: tokens guessed per round"),
        (
            "max-depth",
            "max_depth",
            "deepest tree of a head or a small model: tokens guessed ahead",
        ),
    ):
        command.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{text} ({_defaults(field)})"
        )
    command.add_argument("--seed", type=int, default=0, help="seed of the whole job (default: 0)")
    add_sampling(command, "greedy")
    command.add_argument("--raw", action="store_true", help="leave out the chat template")
    command.add_argument(
        "--keep-text",
        action="store_true",
        help="keep prompts and answers: all in NAME.texts.jsonl, a few in the report, both "
        "readable by you alone",
    )


def _defaults(field: str) -> str:
    """Return the default of a setting, and that of `--quick` where it is another."""
    usual, quick = getattr(Settings(), field), getattr(Settings.quick(), field)
    return f"default: {usual}" + (f", {quick} with --quick" if quick != usual else "")


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Return numbers that stand between commas; argparse tells of those that are none."""
    return tuple(int(part) for part in text.split(","))


_whole_numbers.__name__ = "list of whole numbers"  # as argparse calls what it expected


def run(arguments: argparse.Namespace) -> None:
    """Run a tuning job and print its result."""
    from ..job import Models
    from ..pipeline import plan
    from ..pipeline import tune as run_job
    from ..progress import OnTerminal

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
        print_json({"plan_s": planned.seconds, "total_s": planned.total_s})
    else:
        print(planned.text())


def _settings(arguments: argparse.Namespace) -> Any:
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
        "sampling": sampling_of(arguments, GREEDY),
        "seed": arguments.seed,
        "raw": arguments.raw,
    }
    return Settings.quick(**changes) if arguments.quick else Settings(**changes)


def _seconds(minutes: float | None) -> float | None:
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UsageError(f"--budget-min must be above 0, but is {minutes:g}")
    return None if minutes is None else 60 * minutes
