"""`spectune what-if` as typed: tables, JSON, CSV, pictures and refusals."""

import json
from pathlib import Path

import pandas as pd
import pytest

import toy_what_if
from autotune.commands.cli import main

T4 = Path(__file__).parent.parent / "examples" / "what_if" / "t4_qwen3_1.7b.yaml"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toy_what_if.write(tmp_path_factory.mktemp("toy")))


def test_a_sweep_prints_a_row_each_and_numbers_its_notes(
    toy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", toy, "--sweep", "depth=0:3", "--set", "output-length=200"]) == 0
    out = capsys.readouterr().out
    assert "output_length 200" in out
    for label in ("plain", "D1 W3 K3 N3", "D2 W3 K3 N8", "D3 W3 K3 N8"):
        assert out.count(label) >= 2
    assert "[1] " in out


def test_json_is_one_document_with_every_figure(
    toy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", toy, "--sweep", "depth=1:2", "--sweep", "batch=1,4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["swept"] == ["depth", "batch"]
    assert len(document["rows"]) == 4
    row = document["rows"][0]
    total = sum(
        row[f"{part}_ms"]
        for part in ("prefill", "extend", "levels", "verify", "commit", "overhead")
    )
    assert row["round_ms"] == pytest.approx(total)
    assert row["decode_speedup_low"] < row["decode_speedup"] < row["decode_speedup_high"]


def test_csv_and_pictures_are_written(toy: str, tmp_path: Path) -> None:
    csv, line, grid = (tmp_path / name for name in ("rows.csv", "line.png", "grid.png"))
    options = ["--csv", str(csv), "--plot", str(line)]
    assert main(["what-if", toy, "--sweep", "acceptance=0:1.4:0.2", *options]) == 0
    frame = pd.read_csv(csv)
    assert len(frame) == 8
    assert frame["decode_speedup"].is_monotonic_increasing
    sweeps = ["--sweep", "depth=0:3", "--sweep", "draft=toy/head,lookup"]
    assert main(["what-if", toy, *sweeps, "--plot", str(grid)]) == 0
    for picture in (line, grid):
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 10_000


def test_numbers_alone_are_asked_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", "--measurements", str(T4), "--set", "acceptance=atypical"]) == 0
    out = capsys.readouterr().out
    assert "assumed: draft.step_ms" in out
    assert "unknown" in out  # no error of the round time is known


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "either a profile or --measurements"),
        (["{toy}", "--measurements", str(T4)], "either a profile or --measurements"),
        (["{toy}", "--set", "depth"], "KEY=VALUE"),
        (["{toy}", "--set", "depth=-1"], "depth must be a whole number"),
        (["{toy}", "--set", "depth=1", "--set", "depth=2"], "comes twice"),
        (["{toy}", "--set", "depth=1", "--sweep", "depth=1:2"], "either set or swept"),
        (["{toy}", "--plot", "x.png"], "add a --sweep"),
        (["{toy}", "--set", "speed=9"], "a key must be one of"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    toy: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text.replace("{toy}", toy) for text in arguments]
    assert main(["what-if", *given]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not captured.out


def test_a_missing_file_or_an_unwritable_path_fails_in_one_sentence(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", str(tmp_path / "none.yaml")]) == 1
    assert main(["what-if", "--measurements", str(tmp_path / "none.yaml")]) == 1
    nowhere = str(tmp_path / "no" / "rows.csv")
    assert main(["what-if", toy, "--csv", nowhere]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 3
