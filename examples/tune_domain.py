"""Tune for a domain from Python: `python examples/tune_domain.py examples/domains/code.jsonl`."""

import sys

from autotune import Models, Settings, tune
from autotune.progress import OnTerminal


def main(
    prompts: str, target: str = "demo", draft: str = "lookup", out: str = "tuned.yaml"
) -> None:
    """Write the profile of a short job and print its decision."""
    models = Models(target=target, drafts=[draft])
    profile = tune(models, prompts, out, settings=Settings.quick(), progress=OnTerminal())
    print(profile.decision, profile.tree.label(), "-", profile.reason)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
