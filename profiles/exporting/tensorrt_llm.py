"""TensorRT-LLM: the `speculative_config` of a file for `trtllm-serve --config`.

`max_total_draft_tokens` leaves the root out, as our nodes do. Only Eagle3 has trees.
"""

from typing import Any

from .body import Body, command, yaml_text
from .choice import Choice
from .comment import shortest_match

VERSION = "1.4.0rc4"
TYPES = {"eagle3": "Eagle3", "model": "Draft_Target", "lookup": "NGram"}


def write(choice: Choice) -> Body:
    """Write a tree or a chain for TensorRT-LLM."""
    draft, tree = choice.draft, choice.tree
    config: dict[str, Any] = {"decoding_type": TYPES[draft.kind]}
    if draft.kind == "lookup":
        # Ours looks at the request's own text and believes the newest occurrence first.
        config["max_matching_ngram_size"] = draft.max_match
        config |= {"is_public_pool": False, "is_use_oldest": False}
    else:
        config["speculative_model"] = draft.id
    config["max_draft_len"] = tree.depth
    if not tree.is_chain:
        config["use_dynamic_tree"] = True
        config["dynamic_tree_max_topK"] = tree.top_k
        config["max_total_draft_tokens"] = tree.nodes
    usage = [*shortest_match(draft), _start(choice.profile.target.id)]
    return Body(config, yaml_text({"speculative_config": config}), usage)


def off(target: str) -> Body:
    """Return the settings of a server without speculation."""
    return Body({}, yaml_text({"speculative_config": None}), [_start(target)])


def _start(target: str) -> str:
    return f"start it: {command('trtllm-serve', target, '--config', 'FILE.yaml')}"
