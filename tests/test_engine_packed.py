"""Packed linear layers compute what the plain ones do."""

import pytest
import torch
from torch import nn

from engine.packed import pack_in_place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 7, 24), (2, 3, 24)])
def test_a_packed_module_gives_the_same_for_rows_of_any_shape(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 8, bias=False)).to(dtype)
    names = [name for name, _ in module.named_parameters()]
    x = torch.randn(shape, dtype=dtype)
    with torch.inference_mode():
        expected = module(x)
        pack_in_place(module)
        pack_in_place(module)  # a second time changes nothing
        packed = module(x)
    assert packed.shape == expected.shape
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(packed, expected, rtol=0, atol=tolerance)
    assert [name for name, _ in module.named_parameters()] == names
