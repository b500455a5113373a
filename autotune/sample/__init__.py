"""Step 1: the user's prompts, read from a file and made into token ids to tune and judge on."""

from .building import Sample, SamplePrompt, build_sample, first_of, render
from .prompts import Prompt, PromptFile, Skipped, describe_skipped, read_prompts
from .records import Message, UnusableError, read_turns

__all__ = [
    "Message",
    "Prompt",
    "PromptFile",
    "Sample",
    "SamplePrompt",
    "Skipped",
    "UnusableError",
    "build_sample",
    "describe_skipped",
    "first_of",
    "read_prompts",
    "read_turns",
    "render",
]
