"""Linear layers laid out for a handful of rows.

Knows matrices only: neither attention nor models.

A decoding pass reads every weight once for a few rows, so what counts is the memory it reads and
what a call costs before it computes. Layers that share their input are fused into one call. On a
CPU, oneDNN would otherwise reorder a weight into its own blocks at every call; here that is done
once, at the price of a second copy of the weight in a layout that only oneDNN reads.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_N_UNPACKED = {torch.bfloat16: 0, torch.float32: 2}
"""Dtypes worth packing on a CPU, and up to how many rows the weight as it is is faster still."""


class PackedLinear:
    """Linear layers of one input as a single one: y = x W^T + b, their outputs side by side.

    Where the fused weight is read as it is, it becomes the storage of the modules' own weights:
    they keep working and cost no second copy. A packed copy costs one, and does not follow later
    changes of the weights.

    Args:
        linears: The modules in the order of their outputs; all of them or none have a bias.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        weights = [linear.weight.detach() for linear in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._n_unpacked = sys.maxsize
        if packs(weight.device, weight.dtype):
            self._n_unpacked = _N_UNPACKED[weight.dtype]
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._weight: Any = None
        if self._n_unpacked > 0:
            self._weight = weight
            _share_storage(weight, linears)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + b, [n, out], for x [n, in]."""
        if len(x) <= self._n_unpacked:
            return F.linear(x, self._weight, self._bias)
        y: Tensor = _ONEDNN.default(x, self._packed, self._bias, "none", [], "")
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + x W^T + b, [n, out], as a new tensor, for x [n, in]."""
        if len(x) <= self._n_unpacked:
            return F.linear(x, self._weight, self._bias).add_(residual)
        y: Tensor = _ONEDNN.binary(x, residual, self._packed, self._bias, "add")
        return y


def pack_in_place(module: nn.Module) -> None:
    """Let the linear layers inside a module compute with packed weights, where that is faster.

    Parameters and their names stay as they are; changes of the weights are not seen any more.
    """
    for linear in module.modules():
        # Subclasses are adapters and the like, which add to what the layer computes.
        if (
            type(linear) is nn.Linear
            and "forward" not in vars(linear)
            and packs(linear.weight.device, linear.weight.dtype)
        ):
            setattr(linear, "forward", _PackedForward(linear))  # noqa: B010


@contextmanager
def unpacked(module: nn.Module) -> Iterator[None]:
    """Let a module compute as it was before `pack_in_place`."""
    packed = {
        linear: forward
        for linear in module.modules()
        if isinstance(forward := vars(linear).get("forward"), _PackedForward)
    }
    for linear in packed:
        del linear.forward
    try:
        yield
    finally:
        for linear, forward in packed.items():
            setattr(linear, "forward", forward)  # noqa: B010


class _PackedForward:
    """A linear layer's `forward` over rows of any shape."""

    def __init__(self, linear: nn.Linear) -> None:
        self._packed = PackedLinear(linear)

    def __call__(self, x: Tensor) -> Tensor:
        return self._packed(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and computes in a dtype faster than torch itself."""
    if device.type != "cpu" or dtype not in _N_UNPACKED or _ONEDNN is None:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.backends.mkldnn.is_available())


def _share_storage(weight: Tensor, linears: tuple[nn.Linear, ...]) -> None:
    for linear, rows in zip(
        linears, weight.split([linear.out_features for linear in linears]), strict=True
    ):
        linear.weight.data = rows
