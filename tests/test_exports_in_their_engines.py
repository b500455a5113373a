"""Exports read by the engines they are for: by their own parsers, or by a run.

transformers is at hand. vLLM and OpenVINO GenAI live in environments of their own, because they
bring another torch: SPECTUNE_VLLM_PYTHON and SPECTUNE_OPENVINO_PYTHON name their interpreters.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from engine.eagle3_checkpoint import save_eagle3
from pairs import save_target, small_llama
from profiles import export
from tiny import tiny_head, tiny_model, twin_with_noise
from toy_profiles import PLAIN_CHANGES, profile

DEPTH = 5
CHAIN = {"tree": {"depth": DEPTH, "width": 1, "top_k": 1, "nodes": DEPTH}}
MODEL = {"draft": {"kind": "model", "id": "toy/small", "sha256": "0b" * 32}}
LOOKUP = {"draft": {"kind": "lookup", "min_match": 1, "max_match": 3}}
TREE = {"tree": {"depth": 4, "width": 3, "top_k": 3, "nodes": 10}}
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


def run_elsewhere(variable: str, program: str, given: Any, env: Mapping[str, str] = {}) -> Any:
    """Run a program in the interpreter that a variable names; it reads and prints JSON."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python that has this engine")
    done = subprocess.run(
        [python, "-c", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=os.environ | env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


OPENVINO_PROGRAM = """
import json, sys
found = []
for text, names in json.load(sys.stdin):
    space = {}
    exec(text, space)
    config = space["config"]
    config.max_new_tokens = 8
    config.validate()
    values = {name: getattr(config, name) for name in names}
    found.append(values | {"tree": config.is_tree_search()})
print(json.dumps(found))
"""


def test_openvino_accepts_every_export() -> None:
    """Its own validation passes, every value arrives, and only trees switch tree search on."""
    cases = [TREE, CHAIN, CHAIN | MODEL, CHAIN | LOOKUP, PLAIN_CHANGES]
    exports = [export(profile(case), "openvino") for case in cases]
    given = [(exported.text, list(exported.settings)) for exported in exports]
    found = run_elsewhere("SPECTUNE_OPENVINO_PYTHON", OPENVINO_PROGRAM, given)
    for exported, config in zip(exports, found, strict=True):
        assert config.pop("tree") == ("tree_depth" in exported.settings)
        assert config == exported.settings


VLLM_PROGRAM = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

found = []
for target, path, flag in json.load(sys.stdin):
    given = []
    for words in (["--config", path], flag):
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        arguments = parser.parse_args([*words, "--model", target, "--dtype", "float32"])
        given.append(arguments.speculative_config)
    config = EngineArgs.from_cli_args(arguments).create_engine_config().speculative_config
    names = {"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
    used = None if config is None else {name: getattr(config, name) for name in names}
    found.append([*given, used])
print()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_vllm_reads_the_file_and_the_flag_alike(tmp_path: Path) -> None:
    """Its parser takes both, and its engine's configuration holds what was asked for."""
    target = save_target(tmp_path / "target", num_hidden_layers=8)
    save_eagle3(tiny_head(small_llama(num_hidden_layers=8)), tmp_path / "head")
    drafts: list[dict[str, Any]] = [
        {"draft": {"kind": "eagle3", "id": str(tmp_path / "head"), "sha256": "0b" * 32}},
        {"draft": {"kind": "model", "id": str(target), "sha256": "0b" * 32}},
        LOOKUP,
        PLAIN_CHANGES,
    ]
    exports, given = [], []
    for index, draft in enumerate(drafts):
        exported = export(profile(CHAIN | draft), "vllm")
        path = tmp_path / f"{index}.yaml"
        path.write_text(exported.text)
        flag = ["--speculative-config", json.dumps(exported.settings)] if exported.settings else []
        exports.append(exported)
        given.append((str(target), str(path), flag))
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    found = run_elsewhere("SPECTUNE_VLLM_PYTHON", VLLM_PROGRAM, given, offline)
    for exported, (from_file, from_flag, used) in zip(exports, found, strict=True):
        assert from_file == from_flag == (exported.settings or None)
        if exported.settings:
            assert exported.settings["num_speculative_tokens"] == DEPTH
            wanted = {name: v for name, v in exported.settings.items() if name != "model"}
            assert wanted.items() <= used.items()
        else:
            assert used is None
