"""Keys, values and sweeps of what-if questions, as typed and as given from Python."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.what_if.scenario import KEYS, Quantity, expand, parse_sweep, parse_value
from profiles.errors import UsageError


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("depth", "0", 0),
        ("nodes", 12, 12),
        ("acceptance", "0.5", 0.5),
        ("acceptance", "other.yaml", "other.yaml"),
        ("fixed_overhead", "1.5", 1.5),
        ("memory_bandwidth", "300", Quantity(300.0, False)),
        ("memory_bandwidth", "2.5x", Quantity(2.5, True)),
        ("compute", "RTX 4090", "RTX 4090"),
        ("target_size", "4B", Quantity(4e9, False)),
        ("draft_size", "137m", Quantity(137e6, False)),
        ("draft", "lookup", "lookup"),
    ],
)
def test_values_are_read_as_typed(key: str, text: str, value: object) -> None:
    assert parse_value(key, text) == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("depth", v) for v in ("-1", "1.5", "nan", "two", "", True, None, 1e400)),
        *(("batch", v) for v in (0, "0", "1e99x")),
        *(("acceptance", v) for v in ("-0.1", -1)),
        *(("verify_cost", v) for v in ("inf", "x", "-1")),
        *(("memory_bandwidth", v) for v in ("0", "-3x", "4B", "0x")),
        *(("target_size", v) for v in ("T4", "0", "-2x", "nan")),
        *(("draft", v) for v in ("", 3)),
        ("colour", 1),
    ],
)
def test_nonsense_is_refused(key: str, value: object) -> None:
    with pytest.raises(UsageError):
        parse_value(key, value)


@pytest.mark.parametrize(
    ("key", "text", "values"),
    [
        ("depth", "1:4", [1, 2, 3, 4]),
        ("nodes", "4:16:4", [4, 8, 12, 16]),
        ("nodes", "4:15:4", [4, 8, 12]),
        ("acceptance", "0:1:0.25", [0.0, 0.25, 0.5, 0.75, 1.0]),
        ("batch", "1,8,64", [1, 8, 64]),
        ("draft", "lookup,demo,lookup", ["lookup", "demo"]),
        ("compute", "1x:2x:0.5x", [Quantity(v, True) for v in (1.0, 1.5, 2.0)]),
        ("context", range(0, 30, 10), [0, 10, 20]),
        ("verify_cost", "2:2", [2.0]),
    ],
)
def test_sweeps_are_read_as_typed(key: str, text: object, values: list[object]) -> None:
    assert parse_sweep(key, text) == values  # type: ignore[arg-type]


def test_a_real_range_without_a_step_has_eleven_points() -> None:
    assert parse_sweep("acceptance", "0:2") == pytest.approx([0.2 * i for i in range(11)])


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("depth", v) for v in ("4:1", "1:4:0", "1:4:-1", "1:4:0.5", "1:2:3:4", "1:", ":", ",")),
        *(("depth", v) for v in ("0:900000", [])),
        *(("compute", v) for v in ("1x:300", "T4:L4")),
        *(("draft", v) for v in ("1:2", "")),
        ("acceptance", "a:b"),
    ],
)
def test_nonsense_sweeps_are_refused(key: str, text: object) -> None:
    with pytest.raises(UsageError):
        parse_sweep(key, text)  # type: ignore[arg-type]


def test_a_grid_has_its_first_sweep_outermost_and_keeps_what_is_set() -> None:
    grid = expand({"batch": 2}, {"depth": [1, 2], "nodes": [3, 4]})
    assert [(p["depth"], p["nodes"]) for p in grid] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert all(point["batch"] == 2 for point in grid)
    assert expand({}, {}) == [{}]


def test_what_cannot_be_swept_together_is_refused() -> None:
    with pytest.raises(UsageError, match="at most two"):
        expand({}, {"depth": [1], "nodes": [1], "batch": [1]})
    with pytest.raises(UsageError, match="either set or swept"):
        expand({"depth": 1}, {"depth": [1, 2]})
    with pytest.raises(UsageError, match="points"):
        expand({}, {"depth": [*range(500)], "nodes": [*range(500)]})


@given(key=st.sampled_from(sorted(KEYS)), text=st.text(max_size=12))
def test_any_text_gives_a_value_or_one_sentence(key: str, text: str) -> None:
    for parse in (parse_value, parse_sweep):
        try:
            parse(key, text)
        except UsageError as error:
            assert len(str(error).splitlines()) <= 1 + text.count("\n")
