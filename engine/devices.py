"""Where and in which number format to decode: names, `auto`, and what this machine offers.

Must not know about models.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiles.errors import UsageError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_SEVERAL_GPUS = ("balanced", "balanced_low_0", "sequential")


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the torch device of a name: `auto` (the accelerator, else cpu), cpu, cuda[:i], mps.

    Raises:
        UsageError: There is no such device here, or the name spreads over several GPUs.
    """
    name = str(device)
    if name in _SEVERAL_GPUS or "," in name:
        raise UsageError(
            f"the engine decodes on one device, but {name} spreads the model over several GPUs; "
            "name one of them, such as cuda:0, or tune in a serving engine that splits models "
            "(--backend vllm)"
        )
    available = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        available.append("mps")
    if name == "auto":
        name = available[1] if len(available) > 1 else "cpu"
    elif name == "cuda":
        name = "cuda:0"
    if name not in available:
        raise UsageError(
            f"the device must be one that torch finds here, but {device} is not; choose from "
            f"{', '.join(available)}"
        )
    return torch.device(name)


def device_like(kind: str | None, name: str | None) -> str:
    """Return the device here that a description fits best: of several GPUs the one of that name.

    Args:
        kind: `cpu`, `cuda` or `mps`; None for whatever there is.
        name: The model of the device.
    """
    if kind == "cuda":
        for i in range(torch.cuda.device_count()):
            if torch.cuda.get_device_name(i) == name:
                return f"cuda:{i}"
    return kind or "auto"


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; `auto` is the fastest one the device computes in natively.

    That is bfloat16 where the hardware multiplies it, else float16 on GPUs and float32 on CPUs.

    Raises:
        UsageError: There is no such dtype, or not on this device.
    """
    if dtype == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
        if device.type == "cuda" and _gpu_has_bfloat16(device):
            return torch.bfloat16
        return torch.float16
    if dtype not in DTYPES:
        raise UsageError(
            f"the dtype must be auto or one of {', '.join(DTYPES)}, but it is {dtype}; choose one "
            "of these"
        )
    if dtype == "float64" and device.type == "mps":
        raise UsageError("mps has no float64, which was asked for; use float32 or the cpu")
    return DTYPES[dtype]


def _gpu_has_bfloat16(device: torch.device) -> bool:
    """Tell whether this very GPU multiplies bfloat16; others of the machine may differ."""
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _cpu_has_bfloat16() -> bool:
    """Tell whether the processor multiplies bfloat16; False where torch cannot say."""
    probe = getattr(torch.cpu, "get_capabilities", None)
    found = probe() if probe else {}
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def sent(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for what the device is doing."""
    return torch.as_tensor(values).to(device, non_blocking=True)
