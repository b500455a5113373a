"""vLLM: a file for `vllm serve --config`, with the `speculative_config` in it.

vLLM drafts in chains only: `num_speculative_tokens` is our depth, which is our nodes.
"""

import json
from typing import Any

from .body import Body, command, yaml_text
from .choice import Choice

VERSION = "0.33.0"
METHODS = {"eagle3": "eagle3", "model": "draft_model", "lookup": "ngram", "suffix": "suffix"}


def write(choice: Choice) -> Body:
    """Write a chain for vLLM."""
    draft = choice.draft
    config: dict[str, Any] = {"method": METHODS[draft.kind]}
    if draft.kind == "lookup":
        config |= {"prompt_lookup_min": draft.min_match, "prompt_lookup_max": draft.max_match}
    elif draft.kind == "suffix":
        if draft.history is None:  # earlier requests are not looked in, as they were not here
            config["suffix_decoding_max_cached_requests"] = 0
    else:
        config["model"] = draft.id
    config["num_speculative_tokens"] = choice.tree.depth
    if ranges := _per_batch(choice):
        config["num_speculative_tokens"] = max(depth for _, _, depth in ranges)
        config["num_speculative_tokens_per_batch_size"] = ranges
    usage = [
        "as a flag: " + command("--speculative-config", json.dumps(config)),
        f"start it: {command('vllm', 'serve', choice.profile.target.id, '--config', 'FILE.yaml')}",
    ]
    return Body(config, yaml_text({"speculative-config": config}), usage)


def _per_batch(choice: Choice) -> list[list[int]]:
    """Return `[first, last, tokens]` for every range of batches; empty if there is no schedule.

    A range whose tree is no chain, which vLLM cannot run, counts as plain: nothing else is proved
    there. vLLM carries the last range on to all larger batches.
    """
    if not choice.profile.batch_schedule:
        return []
    ranges = [[1, 1, choice.tree.depth]]
    for each in choice.profile.batch_schedule:
        depth = each.tree.depth if each.tree.is_chain else 0
        ranges.append([each.first, each.last or each.first, depth])
    return ranges


def off(target: str) -> Body:
    """Return the settings of a server without speculation: none."""
    return Body({}, "{}\n", [f"start it: {command('vllm', 'serve', target)}"])
