"""The sample: how prompts become token ids, and how they are split."""

import random
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest

from autotune.sample import Message, Prompt, PromptFile, Sample, Skipped, build_sample, render
from autotune.sample.duplicates import group_near_duplicates
from profiles.errors import SpectuneError, UsageError

BOS, EOS = "<s>", "</s>"


class ToyTokenizer:
    """One token per word; adds a start token to every text, and an end token if asked to."""

    bos_token: str | None = BOS
    eos_token = EOS
    bos_token_id, eos_token_id = 1, 2

    def __init__(self, chat_template: str | None = None, adds_eos: bool = False) -> None:
        self.chat_template = chat_template
        self.adds_eos = adds_eos
        self.vocabulary = {BOS: 1, EOS: 2}

    def words_to_ids(self, text: str) -> list[int]:
        words = text.replace(BOS, f" {BOS} ").replace(EOS, f" {EOS} ").split()
        return [self.vocabulary.setdefault(word, len(self.vocabulary) + 1) for word in words]

    def encode(self, text: str) -> list[int]:
        return [1, *self.words_to_ids(text), *([2] if self.adds_eos else [])]

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        assert add_generation_prompt and tokenize
        return self.words_to_ids(
            BOS + "".join(f" {m['role']}: {m['content']}" for m in messages) + " assistant:"
        )

    def decode(self, ids: list[int]) -> str:
        words = {index: word for word, index in self.vocabulary.items()}
        return " ".join(words[index] for index in ids)


def ask(*texts: str, line: int = 0) -> Prompt:
    return Prompt(tuple((Message("user", text),) for text in texts), line)


def shown(
    prompt: Prompt, tokenizer: ToyTokenizer, answers: tuple[str, ...] = (), raw: bool = False
) -> str:
    return tokenizer.decode(render(prompt, answers, tokenizer, raw=raw))


# render


def test_b20_the_chat_template_is_applied_and_only_if_there_is_one() -> None:
    assert shown(ask("hi"), ToyTokenizer("chat")) == "<s> user: hi assistant:"
    assert shown(ask("hi"), ToyTokenizer()) == "<s> hi"
    assert shown(ask("hi"), ToyTokenizer("chat"), raw=True) == "<s> hi"


def test_later_turns_carry_the_answers_so_far() -> None:
    prompt = ask("a", "b", "c")
    tokenizer = ToyTokenizer("chat")
    assert shown(prompt, tokenizer) == "<s> user: a assistant:"
    assert (
        shown(prompt, tokenizer, ("A", "B"))
        == "<s> user: a assistant: A user: b assistant: B user: c assistant:"
    )
    assert shown(prompt, ToyTokenizer(), ("A",)) == "<s> a A b"
    with pytest.raises(ValueError, match="Turn 3 does not exist"):
        render(prompt, ["A", "B", "C"], tokenizer)


@pytest.mark.parametrize("template", [None, "chat"])
def test_b20_the_start_token_is_never_doubled(template: str | None) -> None:
    for text in ("<s> user: hi assistant:", " <s> hi", "<s> <s> hi"):
        ids = render(ask(text), [], ToyTokenizer(template))
        assert ids.count(1) == 1, text
        assert ids[0] == 1


def test_a_template_that_doubles_the_start_token_is_mended() -> None:
    class Doubling(ToyTokenizer):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return [1, *super().apply_chat_template(*args, **kwargs)]

    assert shown(ask("hi"), Doubling("chat")) == "<s> user: hi assistant:"


@pytest.mark.parametrize("opening", ["<s>", "<|im_start|>user", "[INST]", "<|user|>"])
def test_b20_a_templated_prompt_is_taken_as_it_is(opening: str) -> None:
    assert "user:" not in shown(ask(f"{opening} hi"), ToyTokenizer("chat"))
    sample = build(ask(f"{opening} hi"), ask("something else"), tokenizer=ToyTokenizer("chat"))
    assert sample.n_templated_already == 1
    assert "1 carried one already" in sample.summary()


def test_a_tokenizer_without_a_start_token_adds_none() -> None:
    class NoStart(ToyTokenizer):
        bos_token = None
        bos_token_id = None  # type: ignore[assignment]

        def encode(self, text: str) -> list[int]:
            return self.words_to_ids(text)

    assert shown(ask("hi hi hi"), NoStart()) == "hi hi hi"


def test_an_end_token_behind_the_prompt_is_removed_unless_the_text_has_it() -> None:
    assert shown(ask("hi"), ToyTokenizer(adds_eos=True)) == "<s> hi"
    assert shown(ask("hi </s>"), ToyTokenizer()) == "<s> hi </s>"


def test_a_template_may_return_a_mapping() -> None:
    class Encoding(dict[str, Any]):
        pass

    class Wrapping(ToyTokenizer):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
            return Encoding(input_ids=super().apply_chat_template(*args, **kwargs))

    assert shown(ask("hi"), Wrapping("chat")) == "<s> user: hi assistant:"


# build_sample

WORDS = [
    *("river", "window", "copper", "garden", "market", "silver", "planet", "engine", "letter"),
    *("forest", "winter", "bridge", "button", "candle", "doctor", "island", "jacket", "kitchen"),
    *("ladder", "mirror", "needle", "orange", "pepper", "rabbit", "saddle", "tunnel", "velvet"),
]


def different(n_prompts: int, seed: int = 0) -> list[Prompt]:
    """Return prompts of eight random words, no two near-duplicates."""
    rng = random.Random(seed)
    return [ask(" ".join(rng.sample(WORDS, 8)), line=line + 1) for line in range(n_prompts)]


def build(*prompts: Prompt, tokenizer: Any = None, **settings: Any) -> Sample:
    file = PromptFile(list(prompts), settings.pop("skipped", []))
    defaults = {"seed": 0, "n_tune": 8, "n_holdout": 8, "max_prompt_tokens": 100}
    return build_sample(file, tokenizer or ToyTokenizer(), **{**defaults, **settings})


def ids_of(sample: Sample) -> tuple[list[str], list[str]]:
    return [prompt.id for prompt in sample.tune], [prompt.id for prompt in sample.holdout]


def test_the_asked_numbers_are_used_and_the_sides_are_disjoint() -> None:
    sample = build(*different(100), n_tune=12, n_holdout=20)
    tune, holdout = ids_of(sample)
    assert (len(tune), len(holdout)) == (12, 20)
    assert len({*tune, *holdout}) == 32
    assert sample.n_groups == 32


def test_the_split_is_decided_by_the_seed_and_not_by_the_order_of_the_file() -> None:
    prompts = different(60)
    sample = build(*prompts)
    shuffled = random.Random(1).sample(prompts, len(prompts))
    by_length = sorted(prompts, key=lambda prompt: len(prompt.turns[0][0].content))
    for other in (build(*prompts), build(*shuffled), build(*by_length)):
        assert ids_of(other) == ids_of(sample)
        assert other.fingerprint == sample.fingerprint
    reseeded = build(*prompts, seed=1)
    assert ids_of(reseeded) != ids_of(sample)
    assert reseeded.fingerprint != sample.fingerprint
    one = prompts[0]
    assert build(one, seed=0).fingerprint != build(one, seed=1).fingerprint


def test_the_fingerprint_changes_with_any_used_prompt() -> None:
    prompts = [ask(*prompt.turns[0][0].content.split()[:2]) for prompt in different(16)]
    fingerprints = {build(*prompts).fingerprint, build(*prompts, seed=5).fingerprint}
    fingerprints.add(build(*prompts, tokenizer=ToyTokenizer("chat")).fingerprint)
    first, second = (turn[0].content for turn in prompts[3].turns)
    for changed in (ask(first + "x", second), ask(first, second + "x"), ask(first)):
        fingerprints.add(build(*prompts[:3], changed, *prompts[4:]).fingerprint)
    assert len(fingerprints) == 6


def test_the_number_of_tokens_in_the_fingerprint_is_that_of_the_sample() -> None:
    sample = build(*different(40))
    assert sample.mean_prompt_tokens == 9  # eight words and a start token
    assert all(prompt.token_ids[0] == 1 for prompt in sample.tune)


def test_near_duplicates_never_stand_on_both_sides() -> None:
    prompts = []
    for index, prompt in enumerate(different(15)):
        text = prompt.turns[0][0].content
        prompts += [ask(text), ask(text.upper()), ask(text + "!")][: index % 3 + 1]
    for seed in range(20):
        sample = build(*prompts, seed=seed, n_tune=15, n_holdout=15)
        tune, holdout = ({prompt.group for prompt in s} for s in (sample.tune, sample.holdout))
        assert not tune & holdout
        assert sample.n_groups == 15
        assert len(sample.tune) + len(sample.holdout) >= 28
        assert "near-duplicates make them 15 groups, each kept on one side" in sample.summary()


def test_the_second_of_a_group_is_used_only_when_all_groups_are() -> None:
    copies = [ask(f"Add {number} and {2 * number}, please.") for number in range(500, 560)]
    sample = build(*copies, *different(60), n_tune=16, n_holdout=16)
    assert sample.n_groups == 32


def test_one_group_alone_leaves_the_holdout_empty() -> None:
    sample = build(*(ask(f"Add {number} and {2 * number}, please.") for number in range(30)))
    assert len(sample.tune) == 8
    assert sample.holdout == ()
    assert "8 to tune on and 0 held out" in sample.summary()
    assert "near-duplicates make them 1 groups" in sample.summary()


def test_too_few_prompts_are_split_in_proportion_and_it_is_said() -> None:
    sample = build(*different(10))
    assert (len(sample.tune), len(sample.holdout)) == (5, 5)
    assert "16 were asked for, the file gives no more" in sample.summary()
    sample = build(*different(9), n_tune=5, n_holdout=10)
    assert (len(sample.tune), len(sample.holdout)) == (3, 6)
    sample = build(*different(1))
    assert (len(sample.tune), len(sample.holdout)) == (1, 0)
    assert "asked for" not in build(*different(16)).summary()


def test_exact_copies_count_once() -> None:
    prompts = different(6)
    sample = build(*prompts, *prompts, *prompts)
    assert len({*sample.tune, *sample.holdout}) == 6
    assert sample.n_duplicates == 12
    assert "Read 18 prompts, use 6" in sample.summary()
    assert "12 exact copies left out" in sample.summary()
    long = "word " * 100
    copies = build(*prompts, ask(long, line=20), ask(long, line=30))
    assert [line for line, _ in copies.skipped] == [20]  # the first of equal prompts is named


def test_long_prompts_are_skipped_never_cut() -> None:
    long = ask("word " * 100, line=77)
    sample = build(*different(6), long, skipped=[Skipped(3, "'prompt' is null")])
    assert long.id not in {*ids_of(sample)[0], *ids_of(sample)[1]}
    assert sample.skipped == (
        Skipped(3, "'prompt' is null"),
        Skipped(77, "101 tokens are more than max_prompt_tokens = 100"),
    )
    assert "Read 8 prompts, use 6" in sample.summary()
    assert "2 skipped (line 3: 'prompt' is null; line 77: 101 tokens" in sample.summary()
    assert len(build(ask("word " * 99)).tune) == 1


def test_nothing_that_fits_is_an_error_with_the_reasons() -> None:
    with pytest.raises(SpectuneError, match=r"No prompt can be used \(line 4: 51 tokens are more"):
        build(ask("word " * 50, line=4), max_prompt_tokens=50)


@pytest.mark.parametrize("setting", [{"n_tune": 0}, {"n_holdout": -1}, {"max_prompt_tokens": 0}])
def test_counts_out_of_range_are_wrong_usage(setting: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(setting))} must be at least"):
        build(*different(4), **setting)


def test_no_holdout_is_allowed() -> None:
    sample = build(*different(40), n_tune=10, n_holdout=0)
    assert (len(sample.tune), len(sample.holdout)) == (10, 0)


def test_b20_the_template_is_stated() -> None:
    prompts = different(4)
    assert build(*prompts).template == "none"
    assert "no chat template" in build(*prompts).summary()
    chat = build(*prompts, tokenizer=ToyTokenizer("chat"))
    assert chat.template == "chat"
    assert "chat template applied." in chat.summary()
    assert build(*prompts, tokenizer=ToyTokenizer("chat"), raw=True).template == "none"


def test_a_large_file_is_not_tokenised_in_full() -> None:
    class Counting(ToyTokenizer):
        n_calls = 0

        def encode(self, text: str) -> list[int]:
            self.n_calls += 1
            return super().encode(text)

    tokenizer = Counting()
    build(*different(3000), tokenizer=tokenizer)
    assert tokenizer.n_calls <= 100


# Near-duplicates

BOILERPLATE = (
    "You work at the help desk of a shop for furniture. Answer the customer politely, in at most "
    "two paragraphs, and never promise a date of delivery. If something is unclear, ask back. "
    "Prices include taxes, returns are free within a month, and complaints go to the manager. "
    "Never mention competitors; if a question is about anything but chairs, desks or beds, say "
    "kindly that this is not what you are there for. Now comes what the customer wants to know: "
)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Add 3 and 4.", "add 1,250.75 and 9.", True),
        ("Who played Anna in the series?", "Who plays Anna in the  series?", True),
        ("Who played Anna in the series?", "Who wrote the song of the year?", False),
        ("請用三句話介紹這座城市的歷史。", "請用三句話介紹這座城市的歷史吧。", True),
        ("請用三句話介紹這座城市的歷史。", "光合作用是什麼？", False),
        ("", "", True),
        ("a", "b", False),
    ],
)
def test_likeness_of_two_texts(a: str, b: str, same: bool) -> None:
    groups = group_near_duplicates([a, "an unrelated third text", b])
    assert (groups[0] == groups[2]) is same
    assert groups[:2] == [0, 1]


def test_groups_are_closed_over_chains() -> None:
    base = "the quick brown fox jumps over the lazy dog near the old river bank"
    chain = [base + " in silver moonlight, quite happily"[:length] for length in (0, 17, 35)]
    assert group_near_duplicates([chain[0], chain[2]]) == [0, 1]
    assert group_near_duplicates([chain[0], chain[2], chain[1]]) == [0, 0, 0]


def test_groups_are_those_of_comparing_all_pairs() -> None:
    rng = random.Random(3)
    texts = []
    for _ in range(40):
        text = "".join(rng.choices("abcdefgh", k=80))
        texts.append(text)
        start = rng.randrange(60)
        texts.append(text[:start] + "".join(rng.choices("xyz", k=10)) + text[start + 10 :])
    sets = [{text[i : i + 4] for i in range(len(text) - 3)} for text in texts]
    groups = list(range(len(texts)))
    for a, b in combinations(range(len(texts)), 2):
        if len(sets[a] & sets[b]) >= 0.7 * len(sets[a] | sets[b]):
            groups = [groups[a] if group == groups[b] else group for group in groups]
    numbers: dict[int, int] = {}
    assert group_near_duplicates(texts) == [numbers.setdefault(g, len(numbers)) for g in groups]
    assert 20 < len(numbers) < 75  # neither all alike nor all different


def test_texts_of_template_alone_are_alike() -> None:
    texts = [BOILERPLATE + prompt.turns[0][0].content for prompt in different(20)]
    groups = group_near_duplicates([BOILERPLATE, *texts, BOILERPLATE[:200]])
    assert groups == [*range(21), 0]


def test_a_template_shared_by_all_makes_no_duplicates() -> None:
    texts = [BOILERPLATE + prompt.turns[0][0].content for prompt in different(30)]
    assert group_near_duplicates(texts) == list(range(30))


def test_a_shared_system_message_makes_no_duplicates() -> None:
    system = Message("system", BOILERPLATE)
    prompts = [Prompt(((system, *prompt.turns[0]),), line=prompt.line) for prompt in different(4)]
    assert build(*prompts, max_prompt_tokens=1000).n_groups == 4


# The real thing


def test_b20_a_transformers_tokenizer_gives_the_same_ids_templated_before_or_here() -> None:
    tokenizer = transformers_tokenizer(adds_bos=True)
    templated = tokenizer.apply_chat_template(
        [{"role": "user", "content": "river bridge"}], add_generation_prompt=True, tokenize=False
    )
    ids = render(ask("river bridge"), [], tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<s>", "user", "river", "bridge", "assistant")
    ]
    assert render(ask(templated), [], tokenizer) == ids
    assert tokenizer.encode(templated)[:2] == [0, 0]  # what is to be avoided


def test_a_template_that_refuses_a_conversation_skips_it_with_its_words() -> None:
    tokenizer = transformers_tokenizer(adds_bos=False)
    system = Prompt(((Message("system", "river"), Message("user", "bridge")),), line=9)
    sample = build(*different(4), system, tokenizer=tokenizer)
    assert sample.skipped == (Skipped(9, "the chat template refuses it: no system here"),)
    assert sample.template == "chat"


def transformers_tokenizer(adds_bos: bool) -> Any:
    """Return a word-level tokenizer whose template starts with BOS and refuses system roles."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<unk>", "user", "assistant", *WORDS]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        " {{ m.role }} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} assistant{% endif %}"
    )
    return tokenizer
