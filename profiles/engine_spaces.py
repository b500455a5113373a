"""Which draft trees other serving engines can run: one table of their rules.

Read from their sources: SGLang 0.5.23, vLLM 0.33.0, TensorRT-LLM 1.4 (`llm_args.py`) and
OpenVINO GenAI 2026.4 (`GenerationConfig::validate`). None of them has a width of its own: every
kept node of a level is expanded, so width equals top-k. Knows nothing of how a setting is
written for an engine; that is the exporters' business.
"""

from dataclasses import dataclass

from .tree import TreeConfig


@dataclass(frozen=True)
class EngineSpace:
    """What one engine can run.

    Attributes:
        title: The engine's name, as its authors write it.
        branching: Kinds of draft that may branch; every other kind proposes a chain.
        nodes_per_level: Whether nodes are limited to top-k times depth; otherwise only by the
            pool of a tree whose width is its top-k.
    """

    title: str
    branching: frozenset[str] = frozenset()
    nodes_per_level: bool = False


ENGINE_SPACES = {
    # topk 1 forces num_draft_tokens to num_steps + 1; STANDALONE (a small model) shares the
    # EAGLE worker; NGRAM grows trees of its own making, of which only the chain is ours too.
    "sglang": EngineSpace("SGLang", frozenset({"eagle3", "model"})),
    # Tree attention was removed (vllm#42121).
    "vllm": EngineSpace("vLLM"),
    # max_total_draft_tokens must be in [max_draft_len, topK * max_draft_len].
    "tensorrt-llm": EngineSpace("TensorRT-LLM", frozenset({"eagle3"}), nodes_per_level=True),
    # Only EAGLE-3 drafts have tree_depth; N <= K + (D - 1) K^2.
    "openvino": EngineSpace("OpenVINO GenAI", frozenset({"eagle3"})),
    "transformers": EngineSpace("transformers"),
    "llama.cpp": EngineSpace("llama.cpp"),
    "eagle": EngineSpace("EAGLE", frozenset({"eagle3"})),
}
"""The engines by the name that options take."""


def why_not(engine: str, tree: TreeConfig, draft_kind: str) -> str | None:
    """Return the rule of an engine that a tree breaks, in words; None if it can run the tree.

    Args:
        engine: A key of `ENGINE_SPACES`.
        tree: The tree; equal trees are judged alike, whatever their redundant numbers say.
        draft_kind: Kind of its draft: eagle3, model, lookup, ...
    """
    space, tree = ENGINE_SPACES[engine], tree.canonical()
    if tree.is_plain or (tree.is_chain and tree.nodes == tree.depth):
        return None
    if draft_kind not in space.branching:
        return f"{space.title} drafts with kind {draft_kind} in a chain only (width 1, top_k 1)"
    if tree.depth > 1 and tree.width != tree.top_k:
        return f"{space.title} has no width of its own (width must equal top_k)"
    if space.nodes_per_level and tree.nodes > tree.top_k * tree.depth:
        return f"{space.title} verifies at most top_k x depth = {tree.top_k * tree.depth} nodes"
    return None


def can_run(engine: str, tree: TreeConfig, draft_kind: str) -> bool:
    """Tell whether an engine can run a tree; the arguments are those of `why_not`."""
    return why_not(engine, tree, draft_kind) is None


def nearest(engine: str, tree: TreeConfig, draft_kind: str) -> TreeConfig:
    """Return the tree an engine can run that is most like a given one.

    Depth is kept. Where the draft may branch, so is the number of nodes, at the top-k nearest to
    the given one (the smaller of two equally near); elsewhere it is the chain of that depth.
    """
    if can_run(engine, tree, draft_kind):
        return tree
    if draft_kind not in ENGINE_SPACES[engine].branching:
        return TreeConfig.chain(tree.depth)
    for top_k in sorted(range(1, tree.nodes + 1), key=lambda k: (abs(k - tree.top_k), k)):
        pool = top_k + (tree.depth - 1) * top_k**2
        if tree.nodes <= pool:
            like = TreeConfig(depth=tree.depth, width=top_k, top_k=top_k, nodes=tree.nodes)
            if can_run(engine, like, draft_kind):
                return like
    raise AssertionError("a top_k of all nodes is legal everywhere")
