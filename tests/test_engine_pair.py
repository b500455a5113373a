"""Targets and drafts by name: their references, their fit, and drafts with other padding."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from engine import pair
from engine.decoder import SpeculativeDecoder
from engine.eagle3 import Eagle3Config, Eagle3Head
from engine.eagle3_checkpoint import save_eagle3
from engine.fingerprint import weights_sha256
from engine.loaded_draft import KNOBS
from engine.pair import draft_of, load_draft, load_target
from pairs import SPECIAL, VOCAB, save, save_noisy_copy, save_target, small_llama
from pairs import tokenizer as pair_tokenizer
from profiles import PLAIN, DraftRef, Sampling, TreeConfig
from profiles.errors import SpectuneError, UsageError

N_LAYERS = 4
N_HEAD_WORDS = 100
COMMIT = "0123456789abcdef" * 2 + "01234567"
CHAIN = TreeConfig(depth=3, width=1, top_k=1, nodes=3)
TREE = TreeConfig(depth=3, width=3, top_k=4, nodes=12)
PROMPT = [0, 7, 8, 9, 7, 8]


def target_at(folder, dtype="float64", **options):
    return load_target(str(folder), dtype=dtype, device="cpu", **options)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def loaded(target_folder):
    return target_at(target_folder)


def save_head(folder, seed=0):
    """Save a random head for the target, with a draft vocabulary of its own."""
    torch.manual_seed(seed)
    config = Eagle3Config(
        hidden_size=32,
        intermediate_size=48,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        n_layers=1,
        target_hidden_size=32,
        n_features=3,
        target_vocab_size=VOCAB,
        draft_vocab_size=N_HEAD_WORDS,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        feature_layers=(1, 2, 3),
    )
    head = Eagle3Head(config, None)
    head.target_ids = torch.arange(N_HEAD_WORDS) + len(SPECIAL)
    save_eagle3(head, folder)
    return folder


def put_in_hub_cache(folder, cache, hub_id="acme/tiny"):
    """Lay a folder where the hub's client keeps what it downloaded."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache and a hub that does not answer."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def refusal(name, loaded):
    """Return the one sentence with which a draft is refused."""
    with pytest.raises(SpectuneError) as caught:
        load_draft(str(name), loaded)
    sentence = str(caught.value)
    assert "\n" not in sentence, "a refusal is one line"
    return sentence


# --- targets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_is_known_by_its_path_weights_dtype_and_size(target_folder, dtype):
    ref = target_at(target_folder, dtype).ref
    model = LlamaForCausalLM.from_pretrained(target_folder, dtype=getattr(torch, dtype))
    assert (ref.id, ref.revision, ref.dtype) == (str(target_folder), None, dtype)
    assert ref.sha256 == weights_sha256(model)
    # Tied embeddings count once.
    assert ref.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert ref.parameters < sum(tensor.numel() for tensor in model.state_dict().values())


def test_b29_other_weights_and_other_dtypes_have_other_hashes(target_folder, tmp_path):
    model = LlamaForCausalLM.from_pretrained(target_folder)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    changed = save(model, tmp_path)
    hashes = {target_at(target_folder).ref.sha256, target_at(target_folder, "float32").ref.sha256}
    hashes.add(target_at(changed).ref.sha256)
    assert len(hashes) == 3


def test_a_target_from_the_hub_is_known_by_id_and_commit(target_folder, hub_cache):
    put_in_hub_cache(target_folder, hub_cache)
    ref = load_target("acme/tiny", dtype="float64", device="cpu").ref
    assert (ref.id, ref.revision) == ("acme/tiny", COMMIT)
    assert ref.sha256 == target_at(target_folder).ref.sha256


@pytest.mark.parametrize(
    ("generation_eos", "tokenizer_eos", "expected"),
    [
        (7, "<eos>", (7,)),
        ([7, 9], "<eos>", (7, 9)),
        (None, "<eos>", (1,)),
        (None, None, ()),
    ],
)
def test_the_ids_that_end_a_text_come_from_the_generation_config_then_the_tokenizer(
    tmp_path, generation_eos, tokenizer_eos, expected
):
    model = small_llama()
    model.generation_config.eos_token_id = generation_eos
    model.save_pretrained(tmp_path)
    words = pair_tokenizer()
    words.eos_token = tokenizer_eos
    words.save_pretrained(tmp_path)
    assert target_at(tmp_path).eos_ids == expected


def test_b01_every_id_of_a_list_ends_the_text(target_folder, tmp_path, loaded):
    plain = SpeculativeDecoder(loaded).generate(PROMPT, max_new_tokens=12).token_ids
    assert len(plain) == 12
    for position in (2, 6):
        folder = Path(shutil.copytree(target_folder, tmp_path / str(position)))
        model = LlamaForCausalLM.from_pretrained(folder)
        model.generation_config.eos_token_id = [VOCAB - 1, plain[position]]
        model.save_pretrained(folder)
        ends = SpeculativeDecoder(target_at(folder)).generate(PROMPT, max_new_tokens=12)
        assert ends.token_ids == plain[: plain.index(plain[position]) + 1]
        assert ends.finish_reason == "eos"


# --- drafts by name -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lookup", "suffix"])
def test_model_free_drafts_need_no_files(loaded, kind):
    found = load_draft(kind, loaded)
    assert found.draft.kind == found.ref.kind == kind
    assert found.knobs == KNOBS[kind]
    assert (found.ref.id, found.ref.sha256, found.ref.parameters) == (None, None, None)


def test_a_small_model_is_a_draft_in_the_targets_dtype(target_folder, loaded, tmp_path):
    folder = save_noisy_copy(target_folder, tmp_path)
    messages = []
    found = load_draft(str(folder), loaded, messages.append)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert found.draft.kind == found.ref.kind == "model"
    assert (found.ref.id, found.ref.sha256) == (str(folder), weights_sha256(model))
    assert found.ref.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert messages == [f"loading {folder} (float64, cpu)"]


def test_a_head_is_a_draft(loaded, tmp_path):
    folder = save_head(tmp_path)
    found = load_draft(str(folder), loaded)
    assert found.draft.kind == found.ref.kind == "eagle3"
    assert found.ref.id == str(folder)
    assert found.draft.max_top_k == N_HEAD_WORDS
    assert found.draft.feature_layers == (1, 2, 3)
    other = load_draft(str(save_head(tmp_path / "other", seed=1)), loaded)
    assert other.ref.parameters == found.ref.parameters
    assert other.ref.sha256 != found.ref.sha256


def test_the_demo_is_the_head_of_the_package_and_never_the_demo_target(
    loaded, tmp_path, monkeypatch
):
    monkeypatch.setattr(pair, "demo_head_path", lambda: tmp_path)
    assert "config.json" in refusal("demo", loaded)
    save_head(tmp_path)
    found = load_draft("demo", loaded)
    assert (found.ref.kind, found.ref.id) == ("eagle3", "demo")


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_a_relative_folder_is_known_by_its_absolute_path(
    target_folder, loaded, tmp_path, monkeypatch, kind
):
    folder = tmp_path / "draft"
    save_head(folder) if kind == "eagle3" else save_noisy_copy(target_folder, folder)
    monkeypatch.chdir(tmp_path)
    found = load_draft("draft", loaded)
    assert (found.ref.kind, found.ref.id) == (kind, str(folder))


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_a_hub_id_is_a_head_or_a_small_model(target_folder, loaded, tmp_path, hub_cache, kind):
    folder = tmp_path / "draft"
    save_head(folder) if kind == "eagle3" else save_noisy_copy(target_folder, folder)
    put_in_hub_cache(folder, hub_cache)
    messages = []
    found = load_draft("acme/tiny", loaded, messages.append)
    local = load_draft(str(folder), loaded)
    assert (found.ref.kind, found.ref.id) == (kind, "acme/tiny")
    assert found.ref == local.ref.model_copy(update={"id": "acme/tiny"})
    assert messages[0] == "fetching acme/tiny from the hub"


def test_a_head_on_the_hub_is_downloaded(loaded, tmp_path, monkeypatch):
    import huggingface_hub

    from engine import hub

    folder = save_head(tmp_path / COMMIT)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda hub_id, name, **_: str(folder / name)
    )
    downloads = []

    def snapshot_download(hub_id, *, revision, **_):
        downloads.append((hub_id, revision))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = load_draft("acme/head", loaded)
    assert (found.ref.kind, found.ref.id) == ("eagle3", "acme/head")
    assert downloads == [("acme/head", COMMIT)]


def test_a_folder_wins_over_a_hub_id_of_the_same_name(loaded, tmp_path, monkeypatch):
    save_head(tmp_path / "acme" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert load_draft("acme/tiny", loaded).ref.id == str(tmp_path / "acme" / "tiny")


# --- drafts that are refused --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./missing", "missing", "/no/such/folder", "a/b.gguf", "lookop"])
def test_a_name_that_stands_for_nothing_is_wrong_usage_and_lists_what_there_is(name, loaded):
    with pytest.raises(UsageError, match=f"there is no {name}; check") as caught:
        load_draft(name, loaded)
    for choice in ("`lookup`", "`demo`", "folder", "hub id (org/name)", "head", ".gguf"):
        assert choice in str(caught.value)


def test_a_hub_id_that_cannot_be_had_is_one_sentence(loaded, hub_cache):
    sentence = refusal("acme/nothing-here", loaded)
    assert "acme/nothing-here is neither here nor in the Hugging Face cache" in sentence


def test_a_file_that_is_not_gguf_is_refused(target_folder, loaded):
    assert "must be a .gguf file" in refusal(target_folder / "config.json", loaded)


def test_b38_a_folder_that_is_neither_head_nor_model_says_what_it_holds(
    target_folder, loaded, tmp_path
):
    supported = "must hold an EAGLE-3 head or a causal language model with its tokenizer"
    assert "holds nothing; use" in refusal(tmp_path, loaded)
    (tmp_path / "notes.txt").touch()
    sentence = refusal(tmp_path, loaded)
    assert supported in sentence
    assert f"{tmp_path} holds notes.txt; use" in sentence
    small_llama().save_pretrained(tmp_path / "weights")  # no tokenizer: it may be anything
    sentence = refusal(tmp_path / "weights", loaded)
    assert supported in sentence
    assert "holds config.json, generation_config.json, model.safetensors; use" in sentence


def test_a_snapshot_that_is_neither_is_refused_by_its_hub_id(loaded, tmp_path, hub_cache):
    small_llama().save_pretrained(tmp_path / "weights")
    put_in_hub_cache(tmp_path / "weights", hub_cache)
    assert "but acme/tiny holds config.json, " in refusal("acme/tiny", loaded)


def test_b38_adapters_and_folders_of_gguf_files_keep_their_own_advice(loaded, tmp_path):
    (tmp_path / "tiny.gguf").touch()
    assert f"pass the file {tmp_path / 'tiny.gguf'}" in refusal(tmp_path, loaded)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge it into its base model first" in refusal(tmp_path, loaded)


def test_a_model_with_other_token_ids_is_refused(loaded, tmp_path):
    save(small_llama(seed=1), tmp_path, order=-1)
    sentence = refusal(tmp_path, loaded)
    assert "must share the target's tokenizer, but the two differ in 256 tokens" in sentence


def test_a_model_without_rows_for_the_tokens_in_use_is_refused(loaded, tmp_path):
    save(small_llama(vocab_size=VOCAB - 64), tmp_path)
    sentence = refusal(tmp_path, loaded)
    assert f"each of the {VOCAB} token ids the target uses, but it has {VOCAB - 64}" in sentence


def test_a_head_of_another_target_is_refused(tmp_path):
    target = target_at(save_target(tmp_path / "target", num_hidden_layers=3))
    assert "3 layers of a target with 3" in refusal(save_head(tmp_path / "head"), target)


# --- drafts of a profile ------------------------------------------------------------------------


def test_the_draft_of_a_profile_is_loaded_again(target_folder, loaded, tmp_path, hub_cache):
    put_in_hub_cache(save_head(tmp_path / "hub_head"), hub_cache, "acme/head")
    model = save_noisy_copy(target_folder, tmp_path / "model")
    head = save_head(tmp_path / "head")
    for name in ("lookup", "suffix", str(model), str(head), "acme/head", f"hybrid:{head}"):
        found = load_draft(name, loaded)
        again = draft_of(found.ref, loaded)
        assert again.ref == found.ref
        assert type(again.draft) is type(found.draft)


def test_a_profile_fixes_the_match_lengths_of_a_lookup(loaded):
    ref = DraftRef(kind="lookup", min_match=2, max_match=3)
    found = draft_of(ref, loaded)
    assert found.ref is ref
    assert (found.draft.min_match, found.draft.max_match) == (2, 3)


def test_a_profile_fixes_the_knobs_of_a_hybrid(loaded, tmp_path):
    """The head is that of the profile, under its conventions, and so are all knobs."""
    head = save_head(tmp_path)
    conventions = {"feature_layers": (1, 0, 1), "rope_theta": 5000.0}
    knobs = {"min_match": 2, "max_match": 7, "min_probability": 0.1, "history": 60}
    knobs |= {"match_nodes": 5, "match_tau": 1.5}
    made = load_draft(f"hybrid:{head}", loaded).variant(**knobs, **conventions)
    found = draft_of(made.ref, loaded)
    assert found.ref == made.ref
    assert found.knobs == knobs
    draft = found.draft
    assert draft.feature_layers == draft.head.feature_layers == (1, 0, 1)
    assert draft.head.head.config.rope["rope_theta"] == 5000.0
    assert (draft.match_nodes, draft.match_tau) == (5, 1.5)
    suffix = draft.suffix
    assert (suffix.min_match, suffix.max_match, suffix.history) == (2, 7, 60)
    assert suffix.min_probability == 0.1


@pytest.mark.parametrize("kind", ["lookup", "suffix", "hybrid"])
def test_knobs_that_a_profile_leaves_out_are_off(loaded, tmp_path, kind):
    """Every node is proposed and nothing remembered, whatever the defaults of new drafts are."""
    name = f"hybrid:{save_head(tmp_path)}" if kind == "hybrid" else kind
    ref = load_draft(name, loaded).ref
    found = draft_of(ref.model_copy(update={"min_probability": None, "history": None}), loaded)
    draft = found.draft.suffix if kind == "hybrid" else found.draft
    assert (draft.min_probability, draft.history) == (0.0, 0)
    assert found.ref.min_probability is None


def test_a_variant_shares_weights_and_forgets(loaded, tmp_path):
    """Another knob gives another draft with the same head, and leaves the first one alone."""
    hybrid = load_draft(f"hybrid:{save_head(tmp_path)}", loaded)
    other = hybrid.variant(match_tau=9.0, history=10)
    assert other.draft.head is hybrid.draft.head
    assert (other.ref.match_tau, hybrid.ref.match_tau) == (9.0, KNOBS["hybrid"]["match_tau"])
    assert other.head.ref == hybrid.head.ref
    assert (other.head.ref.kind, other.head.knobs) == ("eagle3", {})
    assert hybrid.with_head(hybrid.head).ref == hybrid.ref
    lookup = load_draft("lookup", loaded)
    assert lookup.variant(max_match=2).draft.max_match == 2
    assert lookup.head is lookup
    with pytest.raises(SpectuneError, match=r"history is 5: only kind suffix or hybrid has it"):
        lookup.variant(history=5)
    with pytest.raises(SpectuneError, match=r"match_tau is 0\.5: it must be at least 1"):
        hybrid.variant(match_tau=0.5)


@pytest.mark.parametrize("name", ["hybrid:lookup", "hybrid:suffix", "hybrid:hybrid:suffix"])
def test_a_hybrid_is_made_of_something_with_weights(loaded, name):
    with pytest.raises(UsageError, match="a hybrid must be made of a head or a small model"):
        load_draft(name, loaded)


# --- drafts with more or fewer embedding rows than the target -----------------------------------

N_ROWS = VOCAB + 128
"""Embedding rows of the padded target; its tokenizer uses the first VOCAB."""


@pytest.fixture(scope="module")
def padded_folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("padded"), vocab_size=N_ROWS)


@pytest.fixture(scope="module")
def padded(padded_folder):
    return target_at(padded_folder)


def save_twin(target_folder, folder, n_rows):
    """Save the target with another number of rows; those that are new outscore the old ones."""
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    twin = small_llama(vocab_size=n_rows)
    weights = dict(target.state_dict())
    del weights["lm_head.weight"]  # tied
    old = weights["model.embed_tokens.weight"]
    new = 8 * torch.randn(n_rows, old.shape[1], generator=torch.Generator().manual_seed(3))
    n_shared = min(n_rows, len(old))
    new[:n_shared] = old[:n_shared]
    twin.load_state_dict(weights | {"model.embed_tokens.weight": new}, strict=False)
    return save(twin, folder)


def generate(loaded, draft=None, tree=PLAIN, temperature=0.0):
    decoder = SpeculativeDecoder(loaded, draft, tree, Sampling(temperature=temperature))
    return decoder.generate(PROMPT, max_new_tokens=60, seed=5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("n_rows", [N_ROWS + 64, N_ROWS - 64], ids=["more", "fewer"])
def test_text_stays_the_targets_whatever_the_rows_of_the_draft(
    padded_folder, padded, tmp_path, n_rows, tree, temperature
):
    draft = load_draft(str(save_twin(padded_folder, tmp_path, n_rows)), padded).draft
    plain = generate(padded, temperature=temperature)
    assert any(token >= N_ROWS - 64 for token in plain.token_ids), "ids a smaller draft lacks"
    found = generate(padded, draft, tree, temperature)
    assert found.token_ids == plain.token_ids
    assert found.stats.n_drafted > 0


def test_plain_text_of_a_padded_target_is_that_of_transformers(padded_folder, padded):
    model = LlamaForCausalLM.from_pretrained(padded_folder, dtype=torch.float64)
    ids = torch.tensor([PROMPT])
    reference = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=60,
        do_sample=False,
        pad_token_id=0,
    )
    assert generate(padded).token_ids == reference[0, len(PROMPT) :].tolist()


def test_rows_beyond_the_targets_are_never_proposed(padded_folder, padded, tmp_path):
    """Without them the draft is the target, so that every token it drafts is accepted."""
    folder = save_twin(padded_folder, tmp_path, N_ROWS + 64)
    logits = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([PROMPT])).logits
    assert logits[0, -1].argmax() >= N_ROWS, "the draft would rather propose a row of its own"
    draft = load_draft(str(folder), padded).draft
    assert draft.max_top_k == N_ROWS
    stats = generate(padded, draft, CHAIN).stats
    assert stats.n_drafted == sum(stats.accepted_by_depth) > 0


def test_a_draft_with_fewer_rows_is_right_wherever_it_can_be(padded_folder, padded, tmp_path):
    """Before any id it lacks has been read, it proposes the target's best token but for those."""
    draft = load_draft(str(save_twin(padded_folder, tmp_path, N_ROWS - 64)), padded).draft
    assert draft.max_top_k == N_ROWS - 64
    logits = padded.target.forward(PROMPT, padded.target.new_cache(16))[0]
    best = logits[:, : N_ROWS - 64].argmax(dim=-1).tolist()
    roots = list(range(len(PROMPT)))
    pools = draft.pools(PROMPT, None, roots, TreeConfig.chain(1))
    assert [pool.select(1).tokens for pool in pools] == [[token] for token in best]


@pytest.mark.parametrize("n_rows", [N_ROWS + 64, N_ROWS - 64], ids=["more", "fewer"])
def test_only_padding_differs_so_the_tokenizers_agree(padded_folder, padded, tmp_path, n_rows):
    folder = save_twin(padded_folder, tmp_path, n_rows)
    words = AutoTokenizer.from_pretrained(folder)
    assert words.get_vocab() == padded.tokenizer.get_vocab()
    assert max(words.get_vocab().values()) < min(n_rows, N_ROWS)
    assert load_draft(str(folder), padded).ref.kind == "model"
