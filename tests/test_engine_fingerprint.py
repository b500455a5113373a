"""Fingerprints: stable where nothing changed, different where anything did."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from engine.fingerprint import _WHOLE_BYTES, cgroup_limits, describe_device, weights_sha256
from profiles.errors import SpectuneError
from profiles.schema import Device


def tiny_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def large_linear():
    """One weight matrix well above the size that is hashed whole."""
    torch.manual_seed(0)
    layer = nn.Linear(1024, 2048, bias=False)
    assert layer.weight.nbytes > 4 * _WHOLE_BYTES
    return layer


def test_a_model_its_folder_and_a_second_saving_agree(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "once")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "once")
    again.save_pretrained(tmp_path / "twice", max_shard_size="20KB")
    assert len(list((tmp_path / "twice").glob("*.safetensors"))) > 1, "saved in several shards"
    found = {
        weights_sha256(model),
        weights_sha256(again),
        weights_sha256(tmp_path / "once"),
        weights_sha256(str(tmp_path / "twice")),
        weights_sha256(tmp_path / "once" / "model.safetensors"),
    }
    assert len(found) == 1


def test_a_pytorch_file_agrees_with_safetensors(tmp_path):
    layer = large_linear()
    torch.save(layer.state_dict(), tmp_path / "pytorch_model.bin")
    assert weights_sha256(tmp_path) == weights_sha256(layer)


def test_another_process_finds_the_same(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    code = "import sys; from engine.fingerprint import weights_sha256 as f; print(f(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == weights_sha256(tmp_path)


def flip_lowest_bit(tensor, index):
    words = tensor.detach().view(-1).view(torch.int32)
    words[index] ^= 1


def test_one_bit_of_a_small_tensor_shows():
    model = tiny_llama()
    before = weights_sha256(model)
    flip_lowest_bit(model.model.norm.weight, 5)
    assert weights_sha256(model) != before
    flip_lowest_bit(model.model.norm.weight, 5)
    assert weights_sha256(model) == before


@pytest.mark.parametrize("index", [0, 5_001, 123_457, 1_048_575, 2_097_150, 2_097_151])
def test_one_bit_of_a_large_tensor_shows_wherever_it_lies(index):
    layer = large_linear()
    before = weights_sha256(layer)
    flip_lowest_bit(layer.weight, index)
    assert weights_sha256(layer) != before


def test_a_large_tensor_of_odd_length_shows_its_last_byte():
    # 8 does not divide the size, so that the last bytes are no whole word.
    layer = nn.ParameterDict({"w": nn.Parameter(torch.zeros(_WHOLE_BYTES + 3).half())})
    before = weights_sha256(layer)
    with torch.no_grad():
        layer["w"][-1] = 1
    assert weights_sha256(layer) != before


def test_reordered_rows_of_a_large_tensor_show():
    layer = large_linear()
    before = weights_sha256(layer)
    with torch.no_grad():
        layer.weight[:-1] = layer.weight[:-1].flip(0)  # the sum and the last bytes stay
    assert weights_sha256(layer) != before


def test_dtype_shape_and_name_count():
    zeros = torch.zeros(4, 4)
    variants = [
        nn.ParameterDict({name: nn.Parameter(tensor)})
        for name, tensor in [
            ("a", zeros),
            ("b", zeros),
            ("a", zeros.view(2, 8)),
            ("a", zeros.view(16)),
            ("a", zeros.half()),
            ("a", zeros.bfloat16()),
        ]
    ]
    assert len({weights_sha256(variant) for variant in variants}) == len(variants)


def test_layout_in_memory_does_not_count():
    weight = torch.randn(8, 16)
    row_major, column_major = (
        nn.ParameterDict({"w": nn.Parameter(tensor)})
        for tensor in (weight, weight.t().contiguous().t())
    )
    assert column_major["w"].stride() != row_major["w"].stride()
    assert weights_sha256(row_major) == weights_sha256(column_major)


def test_an_unaligned_view_of_a_large_tensor_is_read():
    values = torch.randint(0, 100, (_WHOLE_BYTES + 9,), dtype=torch.uint8)
    for start in (0, 1, 7):
        view, copy = nn.Module(), nn.Module()
        view.register_buffer("w", values[start : start + _WHOLE_BYTES + 2])
        copy.register_buffer("w", values[start : start + _WHOLE_BYTES + 2].clone())
        assert weights_sha256(view) == weights_sha256(copy)


def test_a_path_without_weights_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SpectuneError, match=f"{path} holds none; pass the folder"):
            weights_sha256(path)


def test_the_cpu_is_described_in_the_fields_of_a_profile():
    found = describe_device("cpu")
    assert found.keys() == Device.model_fields.keys()
    device = Device(**found)
    assert device.kind == "cpu"
    assert device.threads == torch.get_num_threads()
    assert 1 <= device.count <= os.cpu_count()
    assert device.memory_gib > 0
    assert device.driver is None
    assert torch.__version__.startswith(device.torch)


def test_fewer_allowed_cores_are_fewer_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert describe_device("cpu")["count"] == 1


def test_the_tightest_memory_limit_of_the_control_groups_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_limits(tmp_path) == []
    (tmp_path / "memory.max").write_text(f"{2**31}\n")
    assert cgroup_limits(tmp_path) == [2**31]
    monkeypatch.setattr("engine.fingerprint.cgroup_limits", lambda: [2**31])
    assert describe_device("cpu")["memory_gib"] == 2.0


def test_the_gpu_asked_for_is_described(monkeypatch):
    """A second GPU of another model is known by its own name, cores and memory."""

    class Properties:
        def __init__(self, device):
            self.name = ("Tesla T4", "NVIDIA L4")[device.index]
            self.multi_processor_count = (40, 58)[device.index]
            self.total_memory = (15, 22)[device.index] * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr("engine.fingerprint._output_of", lambda *command: None)
    device = Device(**describe_device("cuda:1"))
    assert (device.kind, device.name, device.count) == ("cuda", "NVIDIA L4", 58)
    assert device.memory_gib == 22.0


def test_a_gpu_is_described_by_its_multiprocessors(monkeypatch):
    class Properties:
        name = "NVIDIA H200"
        multi_processor_count = 132
        total_memory = 139 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr("engine.fingerprint._output_of", lambda *command: "550.54.15\n550.54.15")
    device = Device(**describe_device("cuda:0"))
    assert (device.kind, device.name, device.count) == ("cuda", "NVIDIA H200", 132)
    assert (device.memory_gib, device.driver) == (139.0, "550.54.15")
