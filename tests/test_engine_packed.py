"""Packed linear layers compute what the plain ones do."""

import pytest
import torch
from torch import nn

from engine.packed import pack_in_place, unpacked


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


def test_unpacked_computes_as_before_and_only_inside() -> None:
    """Inside the context a module runs torch's own layers, afterwards the packed ones again."""
    module = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8)).to(torch.float32)
    pack_in_place(module)
    packed = [vars(linear)["forward"] for linear in module]
    with unpacked(module):
        assert not any("forward" in vars(linear) for linear in module)
    assert [vars(linear)["forward"] for linear in module] == packed


def test_a_linear_layer_that_is_not_torchs_own_is_left_alone() -> None:
    """Adapters subclass or wrap linear layers; packing them would drop what they add."""

    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    module = nn.Sequential(Adapted(4, 4))
    pack_in_place(module)
    assert "forward" not in vars(module[0])
