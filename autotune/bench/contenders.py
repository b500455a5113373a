"""Who competes in a bench: our decoders and the modes of transformers' `generate`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.decoder import SpeculativeDecoder
from engine.forced import run_forced
from engine.generate import STATIC_CACHE, compiled, has_compiler, prompt_lookup, run_generate
from engine.model_draft import ModelDraft
from engine.pair import LoadedDraft, LoadedTarget
from engine.timing import TimedText
from engine.trace import Trace
from profiles import TreeConfig

from .contest import Contender

PLAIN_NAME = "spectune plain"
GENERATE = "transformers generate"

N_DRAFT_TOKENS = 4
"""Tokens that transformers' prompt lookup and assistant draft at once."""

MAX_MATCH = 4
"""Longest n-gram that its prompt lookup looks for."""

_SMALL = TreeConfig(depth=3, width=3, top_k=3, nodes=6)

UNTUNED = {
    "eagle3": _SMALL,
    "hybrid": _SMALL,
    "model": TreeConfig.chain(3),
    "suffix": TreeConfig(depth=16, width=2, top_k=2, nodes=16),
}
"""Trees that are sensible without tuning, by kind of draft."""


def untuned_tree(draft: LoadedDraft) -> TreeConfig:
    """Return the tree to bench a draft with when there is no profile."""
    tree = UNTUNED.get(draft.ref.kind, TreeConfig.chain(N_DRAFT_TOKENS))
    return tree if tree.top_k <= draft.draft.max_top_k else TreeConfig.chain(tree.depth)


def ours(name: str, decoder: SpeculativeDecoder) -> Contender:
    """Return a decoder of ours, run on forced text so that every contender has one task.

    As in serving, a draft that looks back at earlier answers sees those of the run so far.
    """

    def run(trace: Trace) -> TimedText:
        done = run_forced(decoder, trace)
        decoder.remember([trace])
        return TimedText(done.total_s, done.decode_s, tuple(trace.generated))

    return Contender(name, run, required=True)


def generate_modes(
    loaded: LoadedTarget, drafts: Mapping[str, LoadedDraft], *, with_compiled: bool
) -> tuple[list[Contender], dict[str, str]]:
    """Return the modes of transformers' `generate`, and why a mode asked for is left out."""
    modes: dict[str, dict[str, Any]] = {
        GENERATE: {},
        "transformers static cache": STATIC_CACHE,
        "transformers prompt lookup": prompt_lookup(N_DRAFT_TOKENS, MAX_MATCH),
    }
    skipped = {}
    if with_compiled:
        name = "transformers compiled"
        if loaded.target.device.type == "cpu" and not has_compiler():
            skipped[name] = "there is no C++ compiler"
        else:
            modes[name] = compiled()
    for name, draft in drafts.items():
        if isinstance(draft.draft, ModelDraft):
            modes[f"transformers assistant {name}"] = {
                "assistant_model": draft.draft.model,
                "num_assistant_tokens": N_DRAFT_TOKENS,
                "num_assistant_tokens_schedule": "constant",
            }
    contenders = [_generate(name, loaded, options) for name, options in modes.items()]
    return contenders, skipped


def _generate(name: str, loaded: LoadedTarget, options: dict[str, Any]) -> Contender:
    return Contender(name, lambda trace: run_generate(loaded, trace, **options))


def warm_up_text(traces: Sequence[Trace], vocab_size: int) -> Trace:
    """Return a random text as long as the longest one, which nobody is timed on.

    As long, so that a static cache keeps its size and a compiled step is compiled once.
    """
    n_prompt = max(len(trace.prompt) for trace in traces)
    n_new = max(len(trace.generated) for trace in traces)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (n_prompt + n_new,), generator=generator).tolist()
    return Trace("warm-up", ids[:n_prompt], ids[n_prompt:])
