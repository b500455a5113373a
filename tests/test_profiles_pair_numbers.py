"""A device and pair described by numbers alone: strict, and honest about what is assumed."""

from pathlib import Path

import pytest
import yaml

from profiles.errors import SpectuneError
from profiles.pair_numbers import load_numbers

EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "what_if").glob("*.yaml"))
SMALL = {
    "schema_version": 1,
    "name": "toy",
    "source": "a test",
    "target": {"name": "t", "passes": [{"tokens": 1, "ms": 10.0}, {"tokens": 8, "ms": 12.0}]},
    "draft": {"name": "d", "step_ms": 1.0},
    "acceptance": {"all": [[0.5, 0.2]]},
    "tree": {"depth": 2, "width": 1, "top_k": 1, "nodes": 2},
}


def write(folder: Path, key: str, value: object) -> Path:
    data = yaml.safe_load(yaml.safe_dump(SMALL))
    *parents, last = key.split(".")
    place = data
    for name in parents:
        place = place[name]
    place[last] = value
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_say_of_everything_but_the_articles_figures_that_it_is_assumed(
    path: Path,
) -> None:
    numbers = load_numbers(path)
    stated = {(1, 44.7), (192, 51.8), (512, 125.6)}
    assert {(p.tokens, p.ms) for p in numbers.target.passes} == stated or (
        "target.passes" in numbers.assumed
    )
    assert numbers.draft.parameters in (136_847_360, 218_245_120)  # 137M and 218M
    for key in ("draft.step_ms", "acceptance", "tree", "target.overhead_ms"):
        assert key in numbers.assumed


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("target.passes", [{"tokens": 2, "ms": 1.0}, {"tokens": 8, "ms": 2.0}], "of 1 token"),
        ("target.passes", [{"tokens": 1, "ms": 1.0}], "at least 2"),
        ("target.passes", [{"tokens": 1, "ms": 1.0}, {"tokens": 1, "ms": 2.0}], "increase"),
        ("target.overhead_ms", 10.0, "below the 1-token pass"),
        ("draft.step_ms", -1.0, "at least 0"),
        ("draft.speed", 1.0, "not a known key"),
        ("acceptance", {}, "at least 1"),
        ("acceptance.all", [[0.9, 0.2]], "at most one child is right"),
        ("acceptance.all", [[]], "at least one depth"),
        ("acceptance.all", [[1.5]], "at most 1"),
        ("assumed", {"draft.stepms": "because"}, "names no key"),
        ("tree.nodes", 9, "candidates"),
        ("schema_version", 99, "upgrade"),
    ],
)
def test_broken_files_are_refused_with_key_and_remedy(
    tmp_path: Path, key: str, value: object, says: str
) -> None:
    with pytest.raises(SpectuneError, match=says):
        load_numbers(write(tmp_path, key, value))
