"""SGLang: a file for `--config`, whose keys are the names of its flags.

`speculative-num-steps` is our depth, `speculative-num-draft-tokens` counts the root: our nodes
plus 1. With top-k 1 SGLang forces num-draft-tokens to num-steps + 1, which is the same chain.
"""

import json
from typing import Any

from .body import Body, command, flags, yaml_text
from .choice import Choice

VERSION = "0.5.23"
ALGORITHMS = {"eagle3": "EAGLE3", "model": "STANDALONE", "lookup": "NGRAM"}


def write(choice: Choice) -> Body:
    """Write a tree for SGLang."""
    settings = _lookup(choice) if choice.draft.kind == "lookup" else _tree(choice)
    usage = ["as flags: " + command(*flags(settings)), *_usage(choice.profile.target.id)]
    if choice.draft.kind == "lookup":
        usage.append(
            "NGRAM is another lookup: its trie holds the tokens of all requests and has no "
            "shortest match"
        )
    if schedule := _adaptive(choice):
        usage += [
            f"for several requests at a time put this into FILE.json: {json.dumps(schedule)}",
            "and add: "
            + command("--speculative-adaptive-config", "FILE.json")
            + " --speculative-adaptive",
        ]
    return Body(settings, yaml_text(settings), usage)


def _adaptive(choice: Choice) -> dict[str, dict[str, list[int]]]:
    """Return the steps from each batch size on; empty where SGLang cannot vary them.

    It varies chains of a head only. A slot with a single candidate never moves, and 0 is plain;
    a range whose tree is no chain counts as plain, since nothing else is proved there.
    """
    profile = choice.profile
    if choice.draft.kind != "eagle3" or not choice.tree.is_chain or not profile.batch_schedule:
        return {}
    steps = {1: choice.tree.depth}
    for each in profile.batch_schedule:
        steps[each.first] = each.tree.depth if each.tree.is_chain else 0
    return {str(first): {"candidate_steps": [depth]} for first, depth in steps.items()}


def off(target: str) -> Body:
    """Return the settings of a server without speculation: none."""
    return Body({}, "", [f"start it: {command(*_SERVER, target)}"])


_SERVER = ("python", "-m", "sglang.launch_server", "--model-path")


def _tree(choice: Choice) -> dict[str, Any]:
    tree = choice.tree
    return {
        "speculative-algorithm": ALGORITHMS[choice.draft.kind],
        "speculative-draft-model-path": choice.draft.id,
        "speculative-num-steps": tree.depth,
        "speculative-eagle-topk": tree.top_k,
        "speculative-num-draft-tokens": tree.nodes + 1,
    }


def _lookup(choice: Choice) -> dict[str, Any]:
    """Write a chain: the trie must reach over the longest match and the drafted tokens."""
    assert choice.draft.max_match is not None  # noqa: S101 - the schema asks for it
    return {
        "speculative-algorithm": ALGORITHMS["lookup"],
        "speculative-num-draft-tokens": choice.tree.nodes + 1,
        "speculative-ngram-min-bfs-breadth": 1,
        "speculative-ngram-max-bfs-breadth": 1,
        "speculative-ngram-max-trie-depth": choice.draft.max_match + choice.tree.depth,
    }


def _usage(target: str) -> list[str]:
    return [
        f"start it: {command(*_SERVER, target, '--config', 'FILE.yaml')}",
        "with speculation SGLang takes at most 48 requests at once unless --max-running-requests "
        "says otherwise",
    ]
