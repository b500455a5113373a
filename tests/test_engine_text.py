"""Text in and out: templates, start tokens, streaming without broken characters."""

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.text import TextStream, encode_chat, encode_prompt, has_template, is_templated
from profiles.errors import UsageError
from tiny import VOCAB, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def with_template() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def pieces(tokenizer: PreTrainedTokenizerFast, chunks: list[list[int]]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(chunk) for chunk in chunks), stream.finish()]


def random_chunks(rng: random.Random, ids: list[int]) -> list[list[int]]:
    chunks = []
    while ids:
        n = rng.randint(1, 5)
        chunks.append(ids[:n])
        ids = ids[n:]
    return chunks


@pytest.mark.parametrize("seed", range(5))
def test_streamed_pieces_are_whole_characters_and_add_up(seed: int) -> None:
    """However the rounds cut it, no piece has half a character, and together they are the text."""
    tokenizer, text = tiny_tokenizer(), "aé日本 🙂\nßé🙂🙂x"
    ids = tokenizer.encode(text)
    found = pieces(tokenizer, random_chunks(random.Random(seed), ids))
    assert "".join(found) == text
    assert "\ufffd" not in "".join(found)


@pytest.mark.parametrize("seed", range(20))
def test_streamed_noise_adds_up_to_the_decoded_whole(seed: int) -> None:
    """Random bytes, special tokens and ids without a token: the pieces add up all the same."""
    tokenizer, rng = tiny_tokenizer(), random.Random(seed)
    ids = [rng.randrange(VOCAB) for _ in range(40)]
    found = pieces(tokenizer, random_chunks(rng, ids))
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=True)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of Llama's kind: spaces begin words and the first one is dropped."""
    vocabulary = {"<s>": 0, "</s>": 1, "▁hello": 2, "▁world": 3, "!": 4, "▁": 5, "<unk>": 6}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    "ids", [[2, 3, 4], [2, 1, 3], [0, 2, 0, 1, 3, 1, 3], [5, 2, 3], [5, 5, 3], [1, 1, 2, 3]]
)
def test_spaces_between_words_survive_streaming(ids: list[int]) -> None:
    """Also after a special token, whose own text is left out, a word keeps its space."""
    tokenizer = word_tokenizer()
    found = pieces(tokenizer, [[token] for token in ids])
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    """A text cut inside a character: what is left is shown as the whole decoding shows it."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a🙂")[:-1]
    stream = TextStream(tokenizer)
    assert stream.push(ids) in ("", "a")
    whole = tokenizer.decode(ids)
    assert whole.endswith("\ufffd")
    assert pieces(tokenizer, [ids])[-1].endswith("\ufffd")
    assert "".join(pieces(tokenizer, [ids])) == whole


def test_b20_a_template_is_applied_once() -> None:
    """A text gets it, a text that begins like a chat keeps its own, and `raw` gets none."""
    tokenizer = with_template()
    assert has_template(tokenizer) and not has_template(tiny_tokenizer())
    templated = tokenizer.encode("<s>hi:")
    assert encode_prompt("hi", tokenizer) == templated
    assert encode_prompt([{"role": "user", "content": "hi"}], tokenizer) == templated
    assert is_templated("<s>hi:", tokenizer)
    assert encode_prompt("<s>hi:", tokenizer) == templated
    assert encode_prompt("hi", tokenizer, raw=True) == tokenizer.encode("hi")
    assert encode_prompt("hi", tiny_tokenizer()) == tokenizer.encode("hi")
    assert templated.count(tokenizer.bos_token_id) == 1


def test_b20_a_doubled_start_token_is_dropped() -> None:
    """One start token is enough, wherever it came from."""
    tokenizer = with_template()
    tokenizer.chat_template = "<s>" + TEMPLATE
    assert encode_prompt("hi", tokenizer) == tokenizer.encode("<s>hi:")
    assert encode_prompt("<s><s>hi", tokenizer) == tokenizer.encode("<s>hi")


def test_token_ids_are_taken_as_they_are() -> None:
    """No template, no start token."""
    assert encode_prompt([5, 1, 1, 7], with_template()) == [5, 1, 1, 7]


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user"}], [3.5], [None]])
def test_prompts_of_other_kinds_are_refused(prompt: object) -> None:
    """One sentence that says what a prompt is."""
    with pytest.raises(UsageError, match="a prompt"):
        encode_prompt(prompt, with_template())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "batch",
    [
        ["one", "another one", "a third one, longer than both"],
        [[5, 6], [7]],
        [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]],
        torch.tensor([[5, 6], [7, 8]]),
        torch.tensor([5, 6]),
        {"input_ids": [5, 6]},
    ],
)
def test_b21_several_prompts_at_once_are_refused_in_words(batch: Any) -> None:
    """A prompt is one; a batch is not taken for a conversation, nor does it fail on its type."""
    with pytest.raises(UsageError, match="a prompt must be .*(one at a time|give one of these)"):
        encode_prompt(batch, with_template())


def test_a_template_that_refuses_says_why() -> None:
    """The template's own message reaches the user."""
    tokenizer = with_template()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        encode_chat([{"role": "user", "content": "hi"}], tokenizer)
    with pytest.raises(UsageError, match="roles must alternate"):
        encode_prompt("hi", tokenizer)
