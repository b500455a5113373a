"""What a pass must read and compute, and the time that takes at least."""

import pytest
import torch

import engine.floor
from engine.floor import MachineLimits, Work, measure_limits, work_of
from engine.target import Target
from engine.trace import Trace
from tiny import tiny_model

WORK = Work(
    body_bytes=800, head_bytes=200, cache_bytes=10, body_operations=400, head_operations=100
)


def test_a_pass_is_bound_by_bytes_when_short_and_by_operations_when_long() -> None:
    limits = MachineLimits(bytes_per_s=1000.0, operations_per_s=2000.0)
    assert WORK.pass_s(limits, n_tokens=1, context=99) == pytest.approx((1000 + 10 * 100) / 1000)
    assert WORK.pass_s(limits, n_tokens=20, context=0) == pytest.approx((400 * 20 + 100) / 2000)


def test_a_plain_text_is_its_prefill_and_a_pass_per_further_token() -> None:
    limits = MachineLimits(bytes_per_s=1000.0, operations_per_s=1e9)
    text = WORK.plain_text(limits, Trace("a", [1, 2, 3], [4, 5, 6]))
    assert text.decode_s == pytest.approx((1000 + 40 + 1000 + 50) / 1000)
    assert text.total_s == pytest.approx(text.decode_s + (1000 + 30) / 1000)
    assert text.n_tokens == 3


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_counted_once_and_a_pure_lookup_table_never(tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied, dtype=torch.float32)
    work = work_of(Target(model))
    assert work is not None
    table = model.get_input_embeddings().weight.numel()
    n_all = sum(parameter.numel() for parameter in model.parameters())
    n_read = n_all if tied else n_all - table
    assert work.body_bytes + work.head_bytes == 4 * n_read
    assert work.body_operations + work.head_operations == 2 * n_read
    assert work.head_operations == 2 * table
    config = model.config
    n_cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert work.cache_bytes == 4 * n_cached


def test_a_mixture_of_experts_has_no_floor() -> None:
    target = Target(tiny_model("llama", dtype=torch.float32))
    target.config.num_experts = 8
    assert work_of(target) is None


def test_limits_are_measured_and_the_better_of_two_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.floor, "N_BYTES", 2**20)
    monkeypatch.setattr(engine.floor, "SIDE", 64)
    limits = measure_limits(torch.device("cpu"), torch.float32)
    assert limits.bytes_per_s > 1e6
    assert limits.operations_per_s > 1e6
    better = MachineLimits(1.0, 4.0).or_better(MachineLimits(2.0, 3.0))
    assert better == MachineLimits(2.0, 4.0)
