"""The what-if examples run as they stand and print what they promise."""

import runpy
from pathlib import Path

import pytest

import toy_what_if

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_data_frame_example_names_the_best_depth_of_every_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLES / "what_if_frame.py"))["main"]
    main(str(toy_what_if.write(tmp_path)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["1", "2", "4", "8"]
    assert any(line.startswith("- a batch is priced") for line in lines)


def test_the_four_findings_are_printed_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "what_if" / "four_findings.py"))["main"]()
    out = capsys.readouterr().out
    assert [line[0] for line in out.splitlines() if line[1:3] == ". "] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("name", ["what_if_frame.py", "what_if/four_findings.py"])
def test_the_examples_stay_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text("utf-8").splitlines()) < 40
