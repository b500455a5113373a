"""`spectune export`: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest
import yaml

from autotune.commands.cli import main
from engine.demo import demo_head_path
from toy_profiles import YAML, write

CHAIN = "tree: {depth: 5, width: 1, top_k: 1, nodes: 5}"


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return write(tmp_path, YAML.replace("tree: {depth: 4, width: 3, top_k: 3, nodes: 10}", CHAIN))


def test_export_prints_a_file_the_engine_reads(
    chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(chain), "--to", "sglang"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert yaml.safe_load(printed.out)["speculative-num-draft-tokens"] == 6


def test_export_writes_a_file_and_one_json_document(
    chain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "vllm.yaml"
    assert main(["export", str(chain), "--to", "vllm", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["text"] == out.read_text("utf-8")
    assert document["settings"]["num_speculative_tokens"] == 5
    assert document["tree"] == {"depth": 5, "width": 1, "top_k": 1, "nodes": 5}
    assert document["speculate"] is True
    assert document["evidence"]["speedup"]["ratio"] == 1.79
    assert main(["export", str(chain), "--to", "vllm", "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""


def test_a_refusal_is_one_sentence_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, out = write(tmp_path), tmp_path / "vllm.yaml"
    assert main(["export", str(tree), "--to", "vllm", "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("spectune: vLLM drafts with kind eagle3 in a chain only")
    assert not out.exists()
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tree), "--to", "tgi"])
    assert stop.value.code == 2


def test_the_demo_pair_is_exported_by_its_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = YAML.replace("toy/target", "demo").replace("toy/head", "demo")
    text = text.replace("- draft: lookup\n  tree: {depth: 2", "- draft: demo\n  tree: {depth: 2")
    text = text.replace("ratio: 0.98, low: 0.9", "ratio: 1.2, low: 1.1")
    path = write(tmp_path, text)
    command = ["export", str(path), "--to", "vllm", "--project", "chain", "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["model"] == str(demo_head_path())
    assert "demo" not in document["settings"]["method"]
    assert "serve demo" not in document["text"]
