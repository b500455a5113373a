"""A profile in the words of the serving engines people run.

Every export says where its figures come from and that they prove nothing on that engine yet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine_spaces import ENGINE_SPACES
from ..errors import UsageError
from ..evidence import Evidence
from ..schema import Profile
from ..tree import PLAIN, TreeConfig
from . import comment, eagle, hugging_face, llama_cpp, openvino, sglang, tensorrt_llm, vllm
from .body import Body
from .choice import Choice, check_runnable, own_chain, own_tree

__all__ = ["ENGINES", "Engine", "Export", "export"]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that profiles are exported to.

    Attributes:
        version: The version whose rules are followed.
        drafts: The kinds of draft it runs.
        write: Writes a choice in its terms.
        off: Writes, for a target, that nothing is to be speculated.
    """

    version: str
    drafts: frozenset[str]
    write: Callable[[Choice], Body]
    off: Callable[[str], Body]


def _engine(module: Any, *drafts: str) -> Engine:
    return Engine(module.VERSION, frozenset(drafts), module.write, module.off)


ENGINES = {
    "sglang": _engine(sglang, "eagle3", "model", "lookup"),
    "vllm": _engine(vllm, "eagle3", "model", "lookup", "suffix"),
    "tensorrt-llm": _engine(tensorrt_llm, "eagle3", "model", "lookup"),
    "openvino": _engine(openvino, "eagle3", "model", "lookup"),
    "transformers": _engine(hugging_face, "model", "lookup"),
    "llama.cpp": _engine(llama_cpp, "eagle3", "model", "lookup"),
    "eagle": _engine(eagle, "eagle3"),
}
"""The engines by the name that `--to` takes."""


@dataclass(frozen=True, slots=True)
class Export:
    """A profile written for one engine.

    Attributes:
        engine: A key of `ENGINES`.
        tree: The exported tree; plain where speculation is to stay off.
        evidence: What that tree did on our engine; None for plain.
        comments: Where the figures come from, what was dropped and how to use the text.
        settings: Names and values in the engine's terms; empty for plain where off is the default.
        text: The comments and the settings as one file of the engine's own kind.
    """

    engine: str
    tree: TreeConfig
    evidence: Evidence | None
    comments: list[str]
    settings: dict[str, Any]
    text: str


def export(profile: Profile, engine: str, *, chain: bool = False) -> Export:
    """Write a profile in an engine's terms.

    Args:
        profile: The profile; where it decided for plain, so does the export.
        engine: A key of `ENGINES`.
        chain: Take the best chain that the profile proved, with its evidence, not the tree.

    Raises:
        UsageError: There is no such engine.
        SpectuneError: The engine cannot run the draft or the tree, or there is no such chain; the
            message names the rule and the nearest choice that it can run.
    """
    if engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise UsageError(f"the engine must be one of {known}, but is {engine}; choose one of them")
    title, rules = ENGINE_SPACES[engine].title, ENGINES[engine]
    comments = comment.provenance(profile, title, rules.version)
    tree, evidence = PLAIN, None
    if profile.decision == "plain":
        comments += comment.no_proof(profile)
        body = rules.off(profile.target.id)
    else:
        choice = own_chain(profile) if chain else own_tree(profile)
        check_runnable(choice, engine, rules.drafts)
        tree, evidence = choice.tree, choice.evidence
        comments += comment.proof(profile, tree, evidence)
        comments += comment.dropped(profile, title)
        body = rules.write(choice)
    if profile.server is not None and profile.engine == engine:
        body.usage.append(vllm.started_as_measured(profile, body.settings))
    lines = [
        comment.one_line(line)
        for line in [*comments, *body.usage, comment.standing(profile, engine, title)]
    ]
    text = "".join(f"# {line}\n" for line in lines) + body.text
    return Export(engine, tree, evidence, lines, body.settings, text)
