"""Exports read by the engines they are for: by their own parsers, or by a run.

transformers is at hand. vLLM and OpenVINO GenAI live in environments of their own, because they
bring another torch: SPECTUNE_VLLM_PYTHON and SPECTUNE_OPENVINO_PYTHON name their interpreters.
"""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from profiles import export
from tiny import tiny_model, twin_with_noise
from toy_profiles import profile

DEPTH = 5
CHAIN = {"tree": {"depth": DEPTH, "width": 1, "top_k": 1, "nodes": DEPTH}}
MODEL = {"draft": {"kind": "model", "id": "toy/small", "sha256": "0b" * 32}}
LOOKUP = {"draft": {"kind": "lookup", "min_match": 1, "max_match": 3}}
PROMPT = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9]])


@pytest.fixture
def target() -> PreTrainedModel:
    model = tiny_model(dtype=torch.float32)
    model.generation_config.pad_token_id = 0
    return model


def generate(model: PreTrainedModel, **options: Any) -> list[int]:
    mask = torch.ones_like(PROMPT)
    ids = model.generate(
        PROMPT, attention_mask=mask, do_sample=False, max_new_tokens=24, **options
    )
    return list(ids[0].tolist())


def draft_lengths(
    monkeypatch: pytest.MonkeyPatch, generator: type[CandidateGenerator]
) -> list[int]:
    """Return a list that is filled with the number of tokens of each draft."""
    lengths: list[int] = []
    original = generator.get_candidates

    def recording(self: Any, input_ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        candidates, logits = original(self, input_ids, *rest, **named)
        lengths.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, logits

    monkeypatch.setattr(generator, "get_candidates", recording)
    return lengths


def test_transformers_drafts_as_long_as_the_profile_says(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generate(target)
    assistant = twin_with_noise(target, 0.02)
    lengths = draft_lengths(monkeypatch, AssistedCandidateGenerator)
    exec(export(profile(CHAIN | MODEL), "transformers").text, {"assistant": assistant})
    assistant.generation_config.validate(strict=True)
    assert generate(target, assistant_model=assistant) == plain
    # Neither the schedule nor the confidence threshold changes the length; only the end does.
    assert len(lengths) > 2
    assert set(lengths[:-1]) == {DEPTH}


def test_transformers_looks_up_as_the_profile_says(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generate(target)
    seen: list[tuple[int, int]] = []
    original = PromptLookupCandidateGenerator.__init__

    def recording(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        seen.append((self.num_output_tokens, self.max_matching_ngram_size))

    monkeypatch.setattr(PromptLookupCandidateGenerator, "__init__", recording)
    lengths = draft_lengths(monkeypatch, PromptLookupCandidateGenerator)
    exec(export(profile(CHAIN | LOOKUP), "transformers").text, {"model": target})
    target.generation_config.validate(strict=True)
    assert generate(target) == plain
    assert seen == [(DEPTH, 3)]
    assert max(lengths) == DEPTH


def test_transformers_knows_every_exported_name() -> None:
    known = set(GenerationConfig().to_dict())
    for draft in (MODEL, LOOKUP):
        assert set(export(profile(CHAIN | draft), "transformers").settings) <= known
