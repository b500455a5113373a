"""The benchmark of a device runs anywhere in a tiny shape, and what it forces is what it says."""

import json
import random
from pathlib import Path
from typing import Any

import gpu
import gpu_acceptance
import pytest
import torch
from gpu_acceptance import TREES, ForcedDraft, ForcedPath, rounds_of
from gpu_shapes import SHAPES, head_config, random_pair, target_config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import engine.floor
from engine.decode import Request, decode
from engine.eagle3 import Eagle3Head
from engine.graphs import CallAgain
from engine.sampling import Sampler
from engine.stopping import StopRules
from profiles import TreeConfig

PARAMETERS = {"1.7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360}
"""Of the public checkpoints."""

HEAD_PARAMETERS = {"1.7b": 136_847_360, "4b": 218_245_120}
"""Of the public heads for them."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_as_many_weights_as_the_public_models(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(target_config(shape))
        head = Eagle3Head(head_config(shape), None)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    if name in HEAD_PARAMETERS:
        assert head.n_parameters == HEAD_PARAMETERS[name]


def test_a_forced_path_follows_the_tree_as_deep_as_asked() -> None:
    """The path leads to the deepest node, 0 - 2 - 4 - 5, and then takes in others."""
    parents = [0, 0, 1, 2, 4, 0]
    for n in range(4):
        path, walked = [0], ForcedPath(parents, n)
        while (node := walked.get((path[-1], 99))) is not None:
            path.append(node)
        assert path == [0, 2, 4, 5][: n + 1]
    assert ForcedPath(parents, 5)._next == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}


@pytest.mark.parametrize("recorded", [False, True])
def test_forced_rounds_get_as_far_as_recorded_ones(recorded: bool) -> None:
    """With random weights and forced text, whatever the head proposes; the last rounds of a text
    have smaller trees. Replayed by the cost model they are the same rounds."""
    loaded, draft = random_pair("tiny", torch.float64, torch.device("cpu"), 0)
    if recorded:
        loaded.target.record(CallAgain())
        draft.record(CallAgain())
    accepted = [2, 0, 1, 3, 4, 1]
    tree = TreeConfig(depth=3, width=3, top_k=3, nodes=9)
    rng = random.Random(0)
    prompt, text = ([rng.randrange(500) for _ in range(n)] for n in (8, 40))
    forced: Any = ForcedDraft(draft, accepted)
    request = Request(loaded.target, forced, prompt, Sampler(), StopRules(40), forced=text)
    rounds = []
    for _ in decode(request, lambda _: tree, lambda done, _: rounds.append(done)):
        pass
    assert request.generated == text
    expected = rounds_of(accepted, tree, 40)
    assert [done.n_emitted for done in rounds] == expected.n_emitted.tolist()
    assert [done.n_nodes for done in rounds] == expected.n_nodes.tolist()
    assert [done.n_emitted for done in rounds[:5]] == [3, 1, 2, 4, 4]


def test_the_recording_covers_the_trees_that_are_timed() -> None:
    recording = gpu_acceptance.load_recording()
    assert set(recording) == {tree.label() for tree in TREES}
    for tree in TREES:
        texts = recording[tree.label()]
        assert len(texts) > 4
        assert all(0 <= n <= tree.depth for text in texts for n in text)
        assert sum(n for text in texts for n in text) > 0


def test_one_command_prints_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a CPU in the tiny shape, with an acceptance of its own."""
    monkeypatch.setattr(engine.floor, "N_BYTES", 2**20)
    monkeypatch.setattr(engine.floor, "SIDE", 64)
    path = tmp_path / "accepted.json"
    accepted = {tree.label(): [[1, 0, 2, 1], [0, 3]] for tree in TREES}
    path.write_text(json.dumps({"source": "made up", "accepted": accepted}))
    options = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--quick"]
    options += ["--no-compiled", "--acceptance", str(path), "--json"]
    monkeypatch.setattr("sys.argv", ["gpu.py", *options])
    assert gpu.main() == 0
    document = json.loads(capsys.readouterr().out)
    figures, conditions = document["figures"], document["conditions"]
    assert set(figures["latency_ms"]) == {str(n) for n in gpu.QUICK.curve}
    assert figures["latency_over_1"]["1"] == 1.0
    for name in (
        *("plain_over_transformers", "plain_over_floor", "draft_step_share", "pass_8_over_1"),
        *("round_error_median", "round_error_p90", "speedup_error_median", "replay_speed_ratio"),
    ):
        assert figures[name] > 0
    assert set(figures["trees"]) == {tree.label() for tree in TREES}
    parts = {"extend", "levels", "verify", "commit", "total", "reference"}
    assert all(set(row) == parts for row in figures["round_parts_ms"].values())
    assert figures["round_parts_ms"]
    assert (conditions["kind"], conditions["cuda_graphs"]) == ("cpu", False)
    assert conditions["acceptance"] == "accepted.json"
