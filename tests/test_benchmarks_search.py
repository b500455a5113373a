"""The kept records of `benchmarks/search.py` can be played without a model."""

from pathlib import Path

import pytest
from search import Records, Size, play

RECORDS = Path(__file__).parent.parent / "benchmarks" / "search_records" / "full" / "code.jsonl"


def test_every_way_is_charged_what_it_measured() -> None:
    played = play(Records(RECORDS, None), Size())
    assert played.domain == "code"
    assert played.share("exhaustive") == pytest.approx(1.0)
    assert 0.0 < played.share("best_default") < played.share("spectune") < 0.5
    assert all(regret >= 0.0 for way in played.choices for regret in played.regrets(way))


def test_records_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "code.jsonl"
    path.write_text("".join(f"{line}\n" for line in RECORDS.read_text().splitlines()[:-1]))
    with pytest.raises(SystemExit, match="not whole"):
        play(Records(path, None), Size())
    with pytest.raises(SystemExit, match="no records"):
        Records(tmp_path / "chat.jsonl", None)
