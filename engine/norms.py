"""RMS norms in few calls. Knows rows of numbers only."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """Divide rows by their root mean square and scale them: x / sqrt(mean(x^2) + eps) * w.

    On a CPU, torch composes this of half a dozen kernels, but has one kernel for layer norm:
    the row (x, -x) has mean zero and the variance mean(x^2), so its layer norm is the RMS norm.

    Args:
        module: The norm as transformers has it.
    """

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self.eps: float = module.variance_epsilon
        self._size = len(self.weight)
        self._mirror: tuple[Tensor, Tensor] | None = None  # signs and weights of (x, -x)
        if self.weight.device.type == "cpu" and self.weight.dtype != torch.float64:
            signs = self.weight.new_tensor([[1.0], [-1.0]])
            self._mirror = signs, self.weight.expand(2, -1).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised rows of x [n, size]."""
        if self._mirror is not None:
            signs, weight = self._mirror
            rows = x.unsqueeze(1) * signs
            return F.layer_norm(rows, (2, self._size), weight, None, self.eps).select(1, 0)
        if self.weight.dtype == torch.float64:
            return unit_rms(x, self.eps) * self.weight
        return F.rms_norm(x, (self._size,), self.weight, self.eps)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Return x over its root mean square along the last axis, in float32 as transformers does."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
