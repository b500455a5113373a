"""The decoder people use: text in, text out, and when a profile is trusted."""

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.decoder as decoder_module
import toy_profiles
from engine import SpeculativeDecoder
from engine.lookup import LookupDraft
from engine.model_draft import ModelDraft
from engine.pair import LoadedTarget
from engine.target import Target
from engine.trust import UntrustedProfileWarning, facts
from profiles import PLAIN, DraftRef, Profile, Sampling, TargetRef, TreeConfig
from profiles.errors import SpectuneError, UsageError
from tiny import VOCAB, tiny_model, tiny_tokenizer, twin_with_noise

MODEL = tiny_model("llama", 0, num_hidden_layers=2)
TREE = TreeConfig(depth=3, width=2, top_k=2, nodes=6)
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.8)
LOOKUP = DraftRef(kind="lookup", min_match=1, max_match=3)


def loaded(eos_ids: tuple[int, ...] = ()) -> LoadedTarget:
    ref = TargetRef(id="tiny", sha256="a" * 64, dtype="float64")
    return LoadedTarget(Target(MODEL), tiny_tokenizer(), ref, eos_ids)


def plain(sampling: Sampling = GREEDY) -> SpeculativeDecoder:
    return SpeculativeDecoder(loaded(), sampling=sampling)


def speculative(sampling: Sampling = GREEDY) -> SpeculativeDecoder:
    draft = ModelDraft(twin_with_noise(MODEL, 0.1), VOCAB)
    return SpeculativeDecoder(loaded(), draft, TREE, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "T0.8"])
@pytest.mark.parametrize("prompt", ["hi é🙂", [5, 9, 77], [{"role": "user", "content": "x"}]])
def test_text_ids_and_stream_are_those_of_plain(prompt: Any, sampling: Sampling) -> None:
    """The whole generation agrees, and the streamed pieces add up to its text."""
    expected = plain(sampling).generate(prompt, max_new_tokens=40, seed=4)
    decoder = speculative(sampling)
    found = decoder.generate(prompt, max_new_tokens=40, seed=4)
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text == tiny_tokenizer().decode(found.token_ids, True)
    assert found.finish_reason == expected.finish_reason == "length"
    assert found.stats.n_rounds < expected.stats.n_rounds
    pieces = list(decoder.stream(prompt, max_new_tokens=40, seed=4))
    assert "".join(pieces) == expected.text
    assert all(pieces)


def test_b11_place_in_the_list_and_seed_fix_the_text_order_does_not() -> None:
    """Requests of one list have streams of their own, whenever they are decoded."""
    decoder = speculative(SAMPLED)
    texts = [decoder.generate([5, 9], max_new_tokens=20, index=i).token_ids for i in range(3)]
    again = [
        decoder.generate([5, 9], max_new_tokens=20, index=i).token_ids for i in reversed(range(3))
    ]
    assert texts == again[::-1]
    assert len({tuple(ids) for ids in texts}) == 3
    other = decoder.generate([5, 9], max_new_tokens=20, seed=1).token_ids
    assert other not in texts


@pytest.mark.parametrize("template", ["chat", "none", None])
@pytest.mark.parametrize("decision", ["speculate", "plain"])
def test_b20_prompts_are_built_as_those_that_were_measured(
    decision: str, template: str | None
) -> None:
    """What a profile was tuned on is what it serves; a request may still say otherwise."""
    where = loaded()
    where.tokenizer.chat_template = "<s>{{ messages[0]['content'] }}:"
    changes = {"domain.template": template}
    if decision == "plain":
        changes |= toy_profiles.PLAIN_CHANGES
    decoder = SpeculativeDecoder.from_profile(profile(where, changes), loaded=where)
    short: dict[str, Any] = {"max_new_tokens": 8}
    bare, chat = where.tokenizer.encode("hi"), where.tokenizer.encode("<s>hi:")
    assert decoder.request("hi", **short).tokens == (bare if template == "none" else chat)
    assert decoder.request("hi", raw=True, **short).tokens == bare
    assert decoder.request("hi", raw=False, **short).tokens == chat


def test_b21_prompts_of_any_length_in_turn_give_their_single_runs() -> None:
    """One after the other on one decoder, longest first: nothing of a request is left behind."""
    prompts = [list(range(3, 3 + n)) for n in (60, 1, 17)]
    decoder = speculative()
    together = [decoder.generate(prompt, max_new_tokens=24).token_ids for prompt in prompts]
    alone = [plain().generate(prompt, max_new_tokens=24).token_ids for prompt in prompts]
    assert together == alone


def test_b01_eos_and_stop_strings_end_the_text() -> None:
    """The reason is told; the end token is among the ids and not in the text."""
    free = plain().generate([5, 9], max_new_tokens=20).token_ids
    eos = free[6]
    first = free.index(eos)
    draft = ModelDraft(MODEL, VOCAB)
    ended = SpeculativeDecoder(loaded((eos,)), draft, TREE).generate([5, 9], max_new_tokens=20)
    assert ended.token_ids == free[: first + 1]
    assert ended.finish_reason == "eos"
    ending = SpeculativeDecoder(loaded((eos,)), draft, TREE)
    assert "".join(ending.stream([5, 9], max_new_tokens=20)) == ended.text
    tokenizer = tiny_tokenizer()
    said = plain(SAMPLED).generate("hi", max_new_tokens=60)
    stop = next(character for character in said.text[3:] if character.isascii())
    stopped = speculative(SAMPLED).generate("hi", max_new_tokens=60, stop=[stop])
    assert stopped.finish_reason == "stop"
    assert stop in stopped.text
    assert stop not in tokenizer.decode(stopped.token_ids[:-1], True)
    assert stopped.token_ids == said.token_ids[: len(stopped.token_ids)]


def test_b07_a_tree_needs_a_draft_and_a_vocabulary() -> None:
    """Trees without draft, and more children than the draft has tokens, are refused."""
    with pytest.raises(UsageError, match="needs a draft"):
        SpeculativeDecoder(loaded(), tree=TREE)
    wide = TreeConfig(depth=1, width=1, top_k=VOCAB + 1, nodes=1)
    with pytest.raises(SpectuneError, match="top_k"):
        SpeculativeDecoder(loaded(), ModelDraft(MODEL, VOCAB), wide)


def profile(where: LoadedTarget, changes: dict[str, Any] | None = None) -> Profile:
    """Return a profile that fits this machine and target, with changes made."""
    here = facts(where, LOOKUP, GREEDY)
    fitting = {
        "target": here.target.model_dump(exclude_none=True),
        "draft": LOOKUP.model_dump(exclude_none=True),
        "device": here.device.model_dump(exclude_none=True),
        "sampling": {"temperature": 0.0},
        "spectune": version("spectune"),
        "tree": TREE.model_dump(),
    }
    return toy_profiles.profile(fitting | (changes or {}))


def test_a_profile_that_fits_is_used_without_a_word() -> None:
    """Tree, draft and sampling are the profile's."""
    where = loaded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder = SpeculativeDecoder.from_profile(profile(where), loaded=where)
    assert decoder.tree == TREE
    assert isinstance(decoder.draft, LookupDraft)
    assert (decoder.draft.min_match, decoder.draft.max_match) == (1, 3)
    assert decoder.sampling == GREEDY


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device.name", "another machine"),
        ("device.name", None),
        ("device.threads", 77),
        ("device.memory_gib", 9999.0),
        ("target.sha256", "b" * 64),
        ("target.sha256", None),
        ("target.dtype", "bfloat16"),
        ("sampling", {"temperature": 0.7}),
    ],
)
def test_b29_a_profile_from_elsewhere_means_plain_and_a_warning(key: str, value: Any) -> None:
    """Both values are told and no draft is loaded; `trust` uses the tree all the same."""
    where = loaded()
    foreign = profile(where, {key: value})
    sampling = GREEDY
    with pytest.warns(UntrustedProfileWarning, match=key.split(".")[-1]):
        decoder = SpeculativeDecoder.from_profile(foreign, loaded=where, sampling=sampling)
    assert decoder.draft is None
    assert decoder.tree == PLAIN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trusted = SpeculativeDecoder.from_profile(
            foreign, loaded=where, sampling=sampling, trust=True
        )
    assert trusted.tree == TREE


def test_a_plain_profile_loads_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision `plain` is plain decoding and nothing else, on any machine."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a plain profile loaded its draft")

    monkeypatch.setattr(decoder_module, "draft_of", refuse)
    where = loaded()
    decided = profile(where, toy_profiles.PLAIN_CHANGES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder = SpeculativeDecoder.from_profile(decided, loaded=where)
    assert decoder.draft is None
    expected = plain().generate([5, 9], max_new_tokens=9).token_ids
    assert decoder.generate([5, 9], max_new_tokens=9).token_ids == expected


def test_a_profile_may_be_given_as_a_file(tmp_path: Path) -> None:
    """A path is read; here it was made on another machine."""
    path = toy_profiles.write(tmp_path)
    with pytest.warns(UntrustedProfileWarning, match="toy-code-epyc"):
        decoder = SpeculativeDecoder.from_profile(path, loaded=loaded())
    assert decoder.draft is None
    assert decoder.sampling == Sampling(temperature=0.7, top_k=20, top_p=0.9)


def test_b11_decoding_leaves_gradients_and_random_state_alone() -> None:
    """A library call must not change the caller's torch."""
    decoder, before = speculative(SAMPLED), torch.get_rng_state()
    decoder.generate([5, 9], max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_stream_left_half_way_does_not_disturb_the_next() -> None:
    """Closing a stream early, or running two at once, changes no text."""
    decoder = speculative()
    expected = plain().generate([5, 9], max_new_tokens=30).text
    left = decoder.stream([5, 9], max_new_tokens=30)
    next(left)
    del left
    one, two = (decoder.stream([5, 9], max_new_tokens=30) for _ in range(2))
    mixed = ["", ""]
    for piece_one, piece_two in zip(one, two, strict=True):
        mixed[0] += piece_one
        mixed[1] += piece_two
    assert mixed == [expected, expected]


def test_stop_may_be_one_string() -> None:
    """A string is one stop string, not a list of its characters."""
    decoder = plain()
    free = decoder.generate("hi", max_new_tokens=60)
    characters = "".join(sorted(set(free.text) - {"\ufffd"})) + "~ never said"
    assert decoder.generate("hi", max_new_tokens=60, stop=characters).text == free.text


def test_an_empty_stop_string_is_refused() -> None:
    """Every text contains it."""
    with pytest.raises(UsageError, match="stop"):
        plain().generate("hi", max_new_tokens=5, stop=["x", ""])
