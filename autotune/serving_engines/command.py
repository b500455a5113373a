"""`spectune tune --backend ENGINE`: a job on a serving engine."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from profiles.errors import UsageError

if TYPE_CHECKING:
    from ..job import Models
    from ..plan import Plan
    from ..progress import Silent
    from ..settings import Settings

OWN_ALONE = (
    "storage",
    "study",
    "resume",
    "budget_min",
    "history",
    "engine_space",
    "max_nodes",
    "batch_sizes",
)
"""Options that say something about our own engine, or about a study, alone."""


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that the chosen backend has no use for.

    Raises:
        UsageError: There are such.
    """
    on_own = arguments.backend == "spectune"
    useless = ("backend_python", "backend_args", "concurrency") if on_own else OWN_ALONE
    for name in useless:
        if getattr(arguments, name):
            raise UsageError(
                f"--{name.replace('_', '-')} has no meaning for --backend {arguments.backend}; "
                "leave it out"
            )


def run_on_server(
    arguments: argparse.Namespace,
    models: "Models",
    domain: str,
    settings: "Settings",
    out: Path,
    progress: "Silent",
) -> "Plan | None":
    """Run a job, or return its plan if only that is asked for."""
    from .pipeline import ServerOptions, plan_server, tune_server
    from .process import interrupt_on_signals
    from .vllm import Vllm

    interrupt_on_signals()  # so that no server outlives the job
    engine = Vllm(arguments.backend_python)
    options = ServerOptions(arguments.concurrency or 1, tuple(shlex.split(arguments.backend_args)))
    if arguments.dry_run:
        return plan_server(
            engine,
            models,
            arguments.prompts,
            out,
            options=options,
            settings=settings,
            progress=progress,
        )
    tune_server(
        engine,
        models,
        arguments.prompts,
        out,
        options=options,
        domain=domain,
        settings=settings,
        keep_text=arguments.keep_text,
        progress=progress,
    )
    return None
