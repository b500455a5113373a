"""What the makers of devices say about them: memory bandwidth and compute, with the source.

One YAML file per device in `profiles/devices`. A processor without a sheet, such as a server's
CPU, is described elsewhere by what it achieved. Knows nothing of models or of measured times.
"""

from pathlib import Path

from pydantic import Field

from .errors import UsageError
from .strict import Items, Positive, StrictModel, Text, validated
from .strict_yaml import parse_mapping

FOLDER = Path(__file__).parent / "devices"


class DataSheet(StrictModel):
    """Peak figures of one device."""

    name: Text = Field(description="short name, the one to ask for")
    names: Items[Text] = Field(description="names under which drivers report it, exactly")
    memory_gb_s: Positive = Field(description="memory bandwidth, 1e9 bytes per second")
    memory_gib: Positive = Field(description="memory, GiB")
    tflops: dict[Text, Positive] = Field(
        description="peak dense matrix products by dtype, 1e12 operations per second"
    )
    source: Text = Field(description="where the figures come from")

    def peak_tflops(self, dtype: str) -> float:
        """Return the peak for a dtype; one the device lacks runs at its float32 speed."""
        return self.tflops.get(dtype, self.tflops["float32"])


def data_sheets() -> list[DataSheet]:
    """Return every data sheet, by name."""
    paths = sorted(FOLDER.glob("*.yaml"))
    return [
        validated(DataSheet, parse_mapping(path.read_text("utf-8"), str(path)), str(path))
        for path in paths
    ]


def find_sheet(name: str | None) -> DataSheet | None:
    """Return the data sheet of a device by its short name or the one its driver reports.

    Only whole names count: a laptop's RTX 4090 is another device than the RTX 4090.
    """
    wanted = (name or "").casefold()
    for sheet in data_sheets():
        if wanted in (known.casefold() for known in (sheet.name, *sheet.names)):
            return sheet
    return None


def sheet(name: str) -> DataSheet:
    """Return the data sheet of a device that must have one.

    Raises:
        UsageError: There is none.
    """
    found = find_sheet(name)
    if found is None:
        known = ", ".join(s.name for s in data_sheets())
        raise UsageError(
            f"a device must have a data sheet, but {name!r} has none; give one of {known}, or a "
            "number"
        )
    return found
