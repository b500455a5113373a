"""What a profile must be able to recognise again: the device and the weights.

Describes only; whether two fingerprints match is decided in `profiles`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from profiles.errors import SpectuneError

from .kernels import has_kernels

# Up to this size a tensor is hashed whole.
_WHOLE_BYTES = 1 << 20
_N_BLOCKS = 64
_BLOCK_BYTES = 4096
_WEIGHT_FILES = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin")


def describe_device(device: torch.device | str) -> dict[str, Any]:
    """Describe the device in the fields of a profile's `device` block.

    Returns:
        `kind` (cpu, cuda or mps), `name`, `count` (CPU cores this process may use, GPU
        multiprocessors), `memory_gib` (what this process may use; GPU memory on a GPU),
        `threads` (torch's, on the host), `kernels` (on a CPU: own or torch), `driver` (NVIDIA's
        version, else None), and the versions `torch` and `transformers`.
    """
    device = torch.device(device)
    describe = {"cpu": _describe_cpu, "cuda": _describe_cuda, "mps": _describe_mps}[device.type]
    return {
        "kind": device.type,
        **describe(device),
        "threads": torch.get_num_threads(),
        # The part after "+" names the build (cpu, cu128), which the other fields say already.
        "torch": torch.__version__.split("+")[0],
        "transformers": version("transformers"),
    }


def weights_sha256(weights: nn.Module | Path | str) -> str:
    """Fingerprint weights by names, shapes, dtypes and values, in about a pass over the memory.

    Tensors up to 1 MiB are hashed whole. Of larger ones the hash takes 64 evenly spaced blocks of
    4 KiB and the sum of all 8-byte words modulo 2**64, so that a change of any single value shows
    wherever it lies; values exchanged between the blocks do not. It guards against mistakes, not
    against forgery.

    Tied tensors count once, under their first name. A model and the folder `save_pretrained`
    writes of it therefore agree, in the same dtype and wherever the architecture stores its
    tensors under the names it runs with.

    Args:
        weights: A model, a weights file (safetensors or PyTorch) or a folder of such files.

    Raises:
        SpectuneError: The path holds no weights.
    """
    tensors = _of_model(weights) if isinstance(weights, nn.Module) else _of_path(Path(weights))
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(_digest(tensor))
    return digest.hexdigest()


def _digest(tensor: Tensor) -> bytes:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    n_bytes = data.numel()
    if n_bytes <= _WHOLE_BYTES:
        return hashlib.sha256(_bytes(data)).digest()
    if data.storage_offset() % 8:  # the view as 8-byte words needs an aligned start
        data = data.clone()
    # Integer addition wraps and is associative: the sum depends on no thread count.
    total = int(data[: n_bytes // 8 * 8].view(torch.int64).sum())
    stride = (n_bytes - _BLOCK_BYTES) // (_N_BLOCKS - 1)
    blocks = data.unfold(0, _BLOCK_BYTES, stride)[:_N_BLOCKS]
    digest = hashlib.sha256(_bytes(blocks))
    digest.update(_bytes(data[-8:]))
    digest.update(total.to_bytes(8, "little", signed=True))
    return digest.digest()


def _bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        storage = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and storage in seen:
            continue
        seen.add(storage)
        yield name, tensor


def _of_path(path: Path) -> Iterator[tuple[str, Tensor]]:
    files = [path] if path.is_file() else []
    for pattern in _WEIGHT_FILES:
        files = files or sorted(path.glob(pattern))
    if not files:
        raise SpectuneError(
            f"weights are read from safetensors or PyTorch files, but {path} holds none; pass the "
            "folder of the saved model"
        )
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    yield name, opened.get_tensor(name)
        else:
            yield from torch.load(file, map_location="cpu", weights_only=True, mmap=True).items()


def _describe_cpu(device: torch.device) -> dict[str, Any]:
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": _cpu_name(),
        "count": n_cores or 1,
        "memory_gib": _gib(min([memory, *cgroup_limits()])),
        "kernels": "own" if has_kernels() else "torch",
        "driver": None,
    }


def _describe_cuda(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "count": properties.multi_processor_count,
        "memory_gib": _gib(properties.total_memory),
        "driver": _nvidia_driver(),
    }


def _describe_mps(device: torch.device) -> dict[str, Any]:
    return {
        "name": _cpu_name(),
        "count": os.cpu_count() or 1,
        "memory_gib": _gib(torch.mps.recommended_max_memory()),
        "driver": None,
    }


def _gib(n_bytes: int) -> float:
    return round(n_bytes / 2**30, 1)


def _cpu_name() -> str:
    """Return the processor's marketing name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return " ".join(value.split())
    named = _output_of("sysctl", "-n", "machdep.cpu.brand_string")
    return named or platform.processor() or platform.machine()


def _nvidia_driver() -> str | None:
    lines = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0].strip() if lines else None


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cgroup_limits(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the memory limits in bytes that control groups set on this process.

    Version 2 limits hold for a group and all below it, so each level on the way up counts.
    """
    files = [root / "memory" / "memory.limit_in_bytes"]  # version 1, as seen in a container
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        groups = []
    own = [line.removeprefix("0::/") for line in groups if line.startswith("0::/")]
    for group in own:
        path = root / group
        files += [level / "memory.max" for level in [path, *path.parents] if root in level.parents]
    files.append(root / "memory.max")
    limits = []
    for file in files:
        try:
            limits.append(int(file.read_text(encoding="utf-8")))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return limits
