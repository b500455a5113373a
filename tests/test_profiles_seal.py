"""The seal: whatever decides is covered, and writing and reading leave it whole."""

from pathlib import Path
from typing import Any

import pytest

from profiles import Profile, is_sealed, load, save, sealed, validated
from toy_profiles import data, profile, write


def test_a_profile_stays_sealed_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    save(profile(), path)
    assert is_sealed(load(path))
    assert load(path) == profile()


def test_b29_a_profile_that_was_never_sealed_is_not(tmp_path: Path) -> None:
    assert not is_sealed(load(write(tmp_path)))
    assert is_sealed(sealed(load(write(tmp_path))))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "tree: {depth: 4, width: 3, top_k: 3, nodes: 10}",
            "tree: {depth: 4, width: 3, top_k: 3, nodes: 9}",
        ),
        ("ratio: 1.79, low: 1.7", "ratio: 1.79, low: 1.71"),
        ("threads: 2", "threads: 1"),
        ("temperature: 0.7", "temperature: 0.0"),
        ("dtype: bfloat16", "dtype: float32"),
        ("kind: eagle3", "kind: model"),
        ("reference_ms: 16.4", "reference_ms: 16.5"),
        ("n_holdout: 32", "n_holdout: 33"),
    ],
)
def test_b29_an_edit_of_whatever_decides_breaks_the_seal(
    tmp_path: Path, old: str, new: str
) -> None:
    path = tmp_path / "x.yaml"
    save(profile(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert not is_sealed(load(path))


@pytest.mark.parametrize("changes", [{"name": "mine"}, {"measurements": "other.json.gz"}])
def test_other_names_do_not(changes: dict[str, Any]) -> None:
    assert is_sealed(profile().model_copy(update=changes))


def test_layout_and_comments_do_not(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    save(profile(), path)
    path.write_text("# mine\n" + path.read_text().replace("tree: {", "tree:  {"))
    assert is_sealed(load(path))


def test_a_default_written_out_is_no_edit() -> None:
    # So fields that later versions add with a default leave older profiles sealed.
    written, left_out = data(), data()
    assert written["adaptive"] is False
    del left_out["adaptive"]
    first, second = (sealed(validated(Profile, d, "toy")) for d in (written, left_out))
    assert first.content_sha256 == second.content_sha256
