"""Linear layers laid out for a handful of rows.

Knows matrices only: neither attention nor models.

A decoding pass reads every weight once for a few rows, so what counts is the memory it reads and
what a call costs before it computes. Layers that share their input are fused into one call, with
the norm before it. On a CPU our own kernels read the weights as they are; without them, or with
more rows than they are made for, oneDNN would reorder a weight into its own blocks at every call.
That is done once here, at the price of a second copy in a layout that only oneDNN reads.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels import kernels_for
from .norms import RMSNorm

_N_UNPACKED = {torch.bfloat16: 0, torch.float32: 2}
"""Dtypes worth packing on a CPU, and up to how many rows the weight as it is is faster still."""


class PackedLinear:
    """Linear layers of one input as a single one: y = norm(x) W^T + b, their outputs side by side.

    Where the fused weight is read as it is, it becomes the storage of the modules' own weights:
    they keep working and cost no second copy. A packed copy costs one, and does not follow later
    changes of the weights.

    Attributes:
        weight: [out, in]; None where only a packed copy is held.
        bias: [out], if any.
        scale: Weights [in] and epsilon of the norm, if any.
        n_own: Up to how many rows our own kernels compute it.

    Args:
        linears: The modules in the order of their outputs; all of them or none have a bias.
        norm: What the input goes through first.
    """

    def __init__(self, *linears: nn.Linear, norm: RMSNorm | None = None) -> None:
        weights = [linear.weight.detach() for linear in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0].contiguous()
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self._norm = norm
        self.scale = None if norm is None else (norm.weight, norm.eps)
        self._kernels = kernels_for(weight.device, weight.dtype)
        self.n_own = 0 if self._kernels is None else self._kernels.most_rows(weight.shape)
        self._n_unpacked = _n_unpacked(weight.shape, weight.device, weight.dtype)
        if self._n_unpacked < sys.maxsize:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.weight: Any = None
        if self._n_unpacked > 0:
            self.weight = weight
            _share_storage(weight, linears)

    def __call__(self, x: Tensor) -> Tensor:
        """Return norm(x) W^T + b, [n, out], for x [n, in]."""
        if self._kernels is not None and x.shape[0] <= self.n_own:
            return self._kernels.linear(x, self.weight, self.bias, norm=self.scale)
        if self._norm is not None:
            x = self._norm(x)
        if x.shape[0] <= self._n_unpacked:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = _ONEDNN.default(x, self._packed, self.bias, "none", [], "")
        return y

    def gated(self, x: Tensor) -> Tensor:
        """Return silu(a) * b, [n, out / 2]; a and b are the halves of what a call returns."""
        if self._kernels is not None and x.shape[0] <= self.n_own:
            return self._kernels.linear(x, self.weight, self.bias, norm=self.scale, gated=True)
        gate, up = self(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + norm(x) W^T + b, [n, out], as a new tensor, for x [n, in]."""
        if self._kernels is not None and x.shape[0] <= self.n_own:
            return self._kernels.linear(
                x, self.weight, self.bias, norm=self.scale, residual=residual
            )
        if self._norm is not None:
            x = self._norm(x)
        if x.shape[0] <= self._n_unpacked:
            return F.linear(x, self.weight, self.bias).add_(residual)
        y: Tensor = _ONEDNN.binary(x, residual, self._packed, self.bias, "add")
        return y


def pack_in_place(module: nn.Module) -> None:
    """Let the linear layers inside a module compute as `PackedLinear`, where that is faster.

    Parameters and their names stay as they are; changes of the weights may not be seen any more.
    """
    for linear in module.modules():
        # Subclasses are adapters and the like, which add to what the layer computes.
        if (
            type(linear) is nn.Linear
            and "forward" not in vars(linear)
            and _gains(linear.weight.device, linear.weight.dtype)
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


def _gains(device: torch.device, dtype: torch.dtype) -> bool:
    return packs(device, dtype) or kernels_for(device, dtype) is not None


def held_twice(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a packed copy of a weight of a shape [out, in] is held beside it."""
    return _n_unpacked(shape, device, dtype) < sys.maxsize


def _n_unpacked(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> int:
    """Return up to how many rows a product reads a weight of a shape [out, in] as it is."""
    if not packs(device, dtype):
        return sys.maxsize
    kernels = kernels_for(device, dtype)
    return max(_N_UNPACKED[dtype], 0 if kernels is None else kernels.most_rows(shape))


def _share_storage(weight: Tensor, linears: tuple[nn.Linear, ...]) -> None:
    for linear, rows in zip(
        linears, weight.split([linear.out_features for linear in linears]), strict=True
    ):
        linear.weight.data = rows
