"""Data sheets of devices: found by whole names only, each with its source."""

import pytest

from profiles.datasheets import data_sheets, find_sheet, sheet
from profiles.errors import UsageError


def test_every_sheet_is_whole_and_names_are_unique() -> None:
    sheets = data_sheets()
    assert {"T4", "L4", "A10", "A100", "H100", "H200", "RTX 3090", "RTX 4090"} <= {
        s.name for s in sheets
    }
    names = [name.casefold() for s in sheets for name in {s.name, *s.names}]
    assert len(names) == len(set(names))
    for one in sheets:
        assert "float32" in one.tflops
        assert len(one.source) > 20


def test_devices_are_found_by_their_own_and_their_drivers_name() -> None:
    assert sheet("t4").memory_gb_s == 320.0
    assert find_sheet("Tesla T4") == sheet("T4")
    assert find_sheet("NVIDIA H200") == sheet("H200")
    assert sheet("T4").peak_tflops("bfloat16") == 8.1  # it has no bfloat16 of its own


@pytest.mark.parametrize("name", [None, "", "Intel Xeon", "NVIDIA GeForce RTX 4090 Laptop GPU"])
def test_other_devices_have_none(name: str | None) -> None:
    assert find_sheet(name) is None


def test_a_sheet_that_must_exist_is_asked_for_by_the_known_names() -> None:
    with pytest.raises(UsageError, match="one of A10, "):
        sheet("Abacus")
