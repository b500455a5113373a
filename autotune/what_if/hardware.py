"""What other memory, compute or model sizes do to passes: factors of time, with their grounds."""

from dataclasses import dataclass

from profiles.datasheets import sheet
from profiles.errors import UsageError

from .basis import BYTES, Basis, DraftBasis
from .scaling import Hardware, target_roofline
from .scenario import Quantity, Scenario

USABLE_MEMORY, USABLE_COMPUTE = 0.8, 0.5
"""Shares of a data sheet's peaks that good kernels reach; assumed where a device that is described
by what it achieved is compared with a data sheet."""


@dataclass(frozen=True)
class Moved:
    """Other hardware and sizes.

    Attributes:
        target, draft: What they do to the passes of each.
        notes: On what grounds, in sentences.
    """

    target: Hardware
    draft: Hardware
    notes: tuple[str, ...]


def moved_by(basis: Basis, draft: DraftBasis, scenario: Scenario) -> Moved:
    """Return what a scenario does to passes.

    Raises:
        UsageError: A figure is asked for in absolute terms, but nothing is known to compare it
            with.
    """
    notes: list[str] = []
    memory = _ratio(basis, draft, "memory_bandwidth", scenario.memory_bandwidth, notes)
    compute = _ratio(basis, draft, "compute", scenario.compute, notes)
    device = Hardware(1 / memory, 1 / compute)
    if draft.is_model_free and scenario.draft_size is not None:
        raise UsageError(f"draft_size needs a draft with weights, but {draft.name} has none")
    target_size = _size("target_size", scenario.target_size, basis.target_parameters)
    draft_size = _size("draft_size", scenario.draft_size, draft.parameters)
    if not device.changes_nothing:
        notes.append(
            "passes are moved by two rooflines, memory and compute; what launching them costs "
            "elsewhere is not in it"
        )
        if draft.is_model_free:
            notes.append(f"the time of {draft.name} itself is the host's and stays as it is")
    if target_size != 1 or draft_size != 1:
        notes.append(
            "passes are scaled with the number of weights, and acceptance is left as it is"
        )
    return Moved(
        target=device.times(target_size),
        draft=Hardware() if draft.is_model_free else device.times(draft_size),
        notes=tuple(dict.fromkeys(notes)),
    )


def achieved(basis: Basis, draft: DraftBasis) -> dict[str, float | None]:
    """Return what the measured passes reach: GB/s of weights read, and TFLOPS in large passes.

    This is how a device without a data sheet, such as a server's CPU, is described. None where
    the number of weights is not known, or passes never became bound by compute.
    """
    roofline = target_roofline(draft.costs, basis.overhead)
    if roofline is None or basis.target_parameters is None:
        return {"memory_bandwidth": None, "compute": None}
    reference_s = 1e-3 * draft.costs.reference_ms
    n_bytes = basis.target_parameters * BYTES.get(basis.dtype, 2)
    per_token_s = roofline.token * reference_s
    return {
        "memory_bandwidth": 1e-9 * n_bytes / (roofline.memory * reference_s),
        "compute": 2e-12 * basis.target_parameters / per_token_s if per_token_s else None,
    }


def _ratio(
    basis: Basis, draft: DraftBasis, key: str, wanted: Quantity | str | None, notes: list[str]
) -> float:
    """Return how many times faster it is than the device that was measured."""
    if wanted is None:
        return 1.0
    if isinstance(wanted, Quantity) and wanted.is_factor:
        return wanted.value
    unit = "GB/s" if key == "memory_bandwidth" else "TFLOPS"
    if basis.sheet is not None:
        other = wanted.value if isinstance(wanted, Quantity) else _peak(wanted, key, basis.dtype)
        return other / _peak(basis.sheet.name, key, basis.dtype)
    reached = achieved(basis, draft)[key]
    if reached is None:
        raise UsageError(
            f"{key} must be a factor such as 2x here, but is {wanted}: this device has no data "
            "sheet, and its measured passes do not tell"
        )
    notes.append(
        f"the measured device has no data sheet and counts by the {reached:.3g} {unit} it achieved"
    )
    if isinstance(wanted, Quantity):
        return wanted.value / reached
    usable = USABLE_MEMORY if key == "memory_bandwidth" else USABLE_COMPUTE
    peak = f"the {key.replace('_', ' ')} on the data sheet of {wanted}"
    notes.append(f"{100 * usable:.0f} % of {peak} is taken as usable")
    return usable * _peak(wanted, key, basis.dtype) / reached


def _peak(device: str, key: str, dtype: str) -> float:
    found = sheet(device)
    return found.memory_gb_s if key == "memory_bandwidth" else found.peak_tflops(dtype)


def _size(key: str, wanted: Quantity | None, parameters: int | None) -> float:
    if wanted is None:
        return 1.0
    if wanted.is_factor:
        return wanted.value
    if parameters is None:
        raise UsageError(
            f"{key} must be a factor such as 2x here, but is {wanted}: the present number of "
            "weights is not known"
        )
    return wanted.value / parameters
