"""Transformers' own `generate`, timed: the baseline that everybody knows.

Greedy, same weights, dtype, threads and number of tokens as a recorded text. Must not know what
it is compared with.
"""

import os
import shutil
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig

from .packed import unpacked
from .pair import LoadedTarget
from .timing import TimedText
from .trace import Trace

STATIC_CACHE: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}
"""Options for a cache of fixed size."""

_COMPILERS = ("g++", "c++", "clang++", "cl")


def compiled() -> dict[str, Any]:
    """Return the options for a static cache and a compiled decoding step, on any device."""
    config = CompileConfig()
    config._compile_all_devices = True  # without it `generate` compiles on accelerators only
    return {"cache_implementation": "static", "compile_config": config}


def prompt_lookup(n_tokens: int, max_match: int) -> dict[str, Any]:
    """Return the options for drafts of `n_tokens` copied from the text so far."""
    return {"prompt_lookup_num_tokens": n_tokens, "max_matching_ngram_size": max_match}


def has_compiler() -> bool:
    """Tell whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX"), *_COMPILERS) if name)


def run_generate(loaded: LoadedTarget, trace: Trace, **options: Any) -> TimedText:
    """Let `generate` answer a trace's prompt with as many tokens as the trace has.

    Args:
        loaded: The target.
        trace: Gives the prompt and the number of tokens; the end token ends nothing.
        **options: Of `generate`, such as `STATIC_CACHE`, `prompt_lookup(...)` or an
            `assistant_model`.
    """
    model, device = loaded.target.model, loaded.target.device
    prompt = torch.tensor([trace.prompt], device=device)
    if model.generation_config.pad_token_id is None:
        options = {"pad_token_id": 0} | options
    clock = _FirstTokens()
    assistant = options.get("assistant_model")
    with unpacked(model), nullcontext() if assistant is None else unpacked(assistant):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        started = time.perf_counter()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(trace.generated),
            do_sample=False,
            eos_token_id=None,
            streamer=clock,
            **options,
        )
        token_ids = tuple(output[0, len(trace.prompt) :].tolist())  # waits for the device
        ended = time.perf_counter()
    return TimedText(ended - started, ended - clock.at, token_ids, clock.n_tokens)


class _FirstTokens:
    """A streamer that notes when the first tokens came, and how many."""

    def __init__(self) -> None:
        self.at = 0.0
        self.n_tokens = 0
        self._n_calls = 0

    def put(self, tokens: Tensor) -> None:
        """Take tokens; the first call brings the prompt, the second one the first tokens."""
        self._n_calls += 1
        if self._n_calls == 2:
            self.at = time.perf_counter()
            self.n_tokens = tokens.numel()

    def end(self) -> None:
        """Take note of the end."""
