"""Where a text ends: at the token where plain decoding ends, at every offset inside a round."""

import random

import pytest
import torch
from torch import Tensor

from engine.decode import Request, decode
from engine.draft import Draft
from engine.lookup import LookupDraft
from engine.model_draft import ModelDraft
from engine.sampling import Sampler
from engine.stopping import StopRules
from engine.target import Target
from engine.tree import ROOT_ONLY, DraftTree
from profiles import PLAIN, TreeConfig
from profiles.errors import UsageError
from tiny import VOCAB, tiny_model, tiny_tokenizer, twin_with_noise
from toy_drafts import ScriptedDraft

MODEL = tiny_model("llama", 0, num_hidden_layers=2)
TARGET = Target(MODEL)
PROMPT = [5, 17, 90, 5, 17]
TOKENIZER = tiny_tokenizer()
DEPTH = 5
TREES = {
    "chain": TreeConfig.chain(DEPTH),
    "tree": TreeConfig(depth=DEPTH, width=2, top_k=3, nodes=20),
}
DRAFTS: dict[str, Draft] = {
    "twin": ModelDraft(MODEL, VOCAB),
    "hostile": ModelDraft(tiny_model("neox", 3, num_hidden_layers=1), VOCAB),
    "noisy": ModelDraft(twin_with_noise(MODEL, 0.1), VOCAB),
    "lookup": LookupDraft(1, 3),
}


def run(
    rules: StopRules,
    draft: Draft | None = None,
    tree: TreeConfig = PLAIN,
    prompt: list[int] | None = None,
    target: Target = TARGET,
) -> Request:
    request = Request(target, draft, PROMPT if prompt is None else prompt, Sampler(), rules)
    chunks = list(decode(request, lambda _: tree))
    assert [token for chunk in chunks for token in chunk] == request.generated
    return request


FREE = run(StopRules(40)).generated


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", DRAFTS)
def test_b01_eos_ends_the_text_at_every_offset_of_a_chunk(name: str, shape: str) -> None:
    """Whichever produced token is declared EOS, the text ends at its first occurrence, and the
    same ids come out; a list of two EOS ids ends at the first of either."""
    for k in range(2 * DEPTH + 4):
        first = FREE.index(FREE[k])
        request = run(StopRules(24, eos_ids=[FREE[k]]), DRAFTS[name], TREES[shape])
        assert request.generated == FREE[: first + 1]
        assert request.stop_reason == "eos"
        later = FREE[k + 2]
        both = min(first, FREE.index(later))
        request = run(StopRules(24, eos_ids=[later, FREE[k]]), DRAFTS[name], TREES[shape])
        assert request.generated == FREE[: both + 1]


def test_b01_eos_on_an_accepted_node_ends_the_text_there() -> None:
    """A chain that knows the text, and each token of a chunk in turn is EOS: the round that
    accepted it is the last one, and what it accepted after it is forgotten."""
    n_prompt = len(PROMPT)
    draft = ScriptedDraft(lambda tokens, tree: chain(FREE[len(tokens) - n_prompt :][: tree.depth]))
    for k in range(1, 2 * DEPTH):
        end = FREE.index(FREE[k])
        request = run(StopRules(24, eos_ids=[FREE[k]]), draft, TREES["chain"])
        assert request.generated == FREE[: end + 1]
        stats = request.stats
        assert stats.n_rounds == -(-end // (DEPTH + 1))
        assert stats.n_round_tokens == end  # what was cut off is not counted as accepted
        assert sum(stats.accepted_by_depth) <= end


def chain(tokens: list[int]) -> DraftTree:
    return DraftTree(tokens, list(range(len(tokens)))) if tokens else ROOT_ONLY


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("n_prompt", [1, 5])
def test_b03_the_budget_is_exact(name: str, n_prompt: int) -> None:
    """1, 2, depth and its neighbours and 37 tokens: exactly so many, the same ones as plain."""
    prompt = PROMPT[:n_prompt]
    free = run(StopRules(40), prompt=prompt).generated
    for budget in (1, 2, 3, DEPTH, DEPTH + 1, DEPTH + 2, 37):
        for tree in TREES.values():
            request = run(StopRules(budget), DRAFTS[name], tree, prompt)
            assert request.generated == free[:budget]
            assert request.stop_reason == "length"
            assert request.stats.n_round_tokens == budget - 1


@pytest.mark.parametrize("budget", [0, -1])
def test_b03_a_budget_of_nothing_is_refused(budget: int) -> None:
    """One sentence that names the option."""
    with pytest.raises(UsageError, match="max_new_tokens must be at least 1"):
        run(StopRules(budget))


def test_b03_an_empty_prompt_is_refused() -> None:
    """One sentence, no shape error."""
    with pytest.raises(UsageError, match="at least one token"):
        run(StopRules(3), prompt=[])


def test_b03_a_text_may_fill_the_context_but_not_exceed_it() -> None:
    """The last position is used, also with drafts; one token more is refused."""
    small = Target(tiny_model("llama", 0, num_hidden_layers=1, max_position_embeddings=20))
    plain = run(StopRules(15), target=small).generated
    for draft in DRAFTS.values():
        assert run(StopRules(15), draft, TREES["tree"], target=small).generated == plain
    with pytest.raises(UsageError, match="20 positions, but are 5 [+] 16"):
        run(StopRules(16), target=small)


def test_b03_the_first_token_may_be_the_last() -> None:
    """EOS from the prefill ends the text before any round."""
    request = run(StopRules(20, eos_ids=[FREE[0]]), DRAFTS["twin"], TREES["tree"])
    assert request.generated == FREE[:1]
    assert request.stats.n_rounds == 0


@pytest.mark.parametrize("name", DRAFTS)
def test_stop_strings_end_at_the_token_that_completes_one(name: str) -> None:
    """At every place of the text, for strings of one to four tokens, alone or with others."""
    rng = random.Random(0)
    for _ in range(12):
        start = rng.randrange(1, 20)
        stop = TOKENIZER.decode(FREE[start : start + rng.randint(1, 4)])
        if not stop or "\ufffd" in stop:
            continue
        end = next(i for i in range(1, 41) if stop in TOKENIZER.decode(FREE[:i]))
        rules = StopRules(40, stop_strings=[stop, "never"], tokenizer=TOKENIZER)
        request = run(rules, DRAFTS[name], TREES["tree"])
        assert request.generated == FREE[:end]
        assert request.stop_reason == "stop"


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    """Neither the prompt nor the seam between prompt and answer can end the text."""
    seam = TOKENIZER.decode([PROMPT[-1], FREE[0]])
    quoted = TOKENIZER.decode(PROMPT[1:3])
    rules = StopRules(6, stop_strings=[seam, quoted], tokenizer=TOKENIZER)
    assert run(rules, DRAFTS["twin"], TREES["chain"]).generated == FREE[:6]


@pytest.mark.parametrize("stop", ["é", "日", "🙂", "x🙂", "日本"])
def test_a_stop_string_of_split_characters_is_found(stop: str) -> None:
    """A character that the tokenizer splits over several tokens still ends the text."""
    text = TOKENIZER.encode("aßb x🙂é日本, x日本é🙂")
    rules = StopRules(100, stop_strings=[stop], tokenizer=TOKENIZER)
    ends = [i for i in range(1, len(text) + 1) if stop in TOKENIZER.decode(text[:i])]
    reasons = [rules.reason(text[:i], 0, torch.zeros(1, VOCAB)) for i in range(1, len(text) + 1)]
    assert reasons.index("stop") + 1 == ends[0]


def test_criteria_of_transformers_are_asked_once_per_token() -> None:
    """A stateful criterion sees every prefix once, in order, and ends the text when it says so."""
    seen: list[int] = []

    def after_seven(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape == (1, VOCAB)
        seen.append(input_ids.shape[1])
        return torch.tensor([len(seen) == 7])

    request = run(StopRules(30, criteria=[after_seven]), DRAFTS["noisy"], TREES["tree"])
    assert request.generated == FREE[:7]
    assert request.stop_reason == "criterion"
    assert seen == [len(PROMPT) + i for i in range(1, 8)]


def test_a_stop_string_beyond_the_tokenizer_is_refused() -> None:
    """One sentence with the string: no token of the target can ever spell it."""
    with pytest.raises(UsageError, match="stop string"):
        StopRules(5, stop_strings=["\x00\x01"], tokenizer=TOKENIZER)
