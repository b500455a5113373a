"""Turn prompts into the sample a tuning run works on: token ids, split into tune and holdout.

Tokenizer objects are passed in and used through ``apply_chat_template``, ``encode`` and their
``bos_token`` / ``eos_token`` attributes. This module knows nothing about files, models or devices.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from engine.text import encode_chat, has_template, is_templated
from profiles.errors import SpectuneError, UsageError

from ..settings import Settings
from .duplicates import group_near_duplicates
from .prompts import Prompt, PromptFile, Skipped, describe_skipped
from .records import Message

# A large file is thinned, by seed, before it is tokenised and compared; this many times the
# prompts asked for leave enough to choose from when some are near-duplicates.
_OVERSAMPLE = 4


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt of the sample; its later turns are built by ``render`` once there are answers."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    """The first turn, ready for the target: ``render(prompt, [], tokenizer)``."""
    group: int
    """Near-duplicates share it."""

    @property
    def id(self) -> str:
        """The prompt's content hash."""
        return self.prompt.id

    @property
    def n_turns(self) -> int:
        """How many answers the target gives in this conversation."""
        return len(self.prompt.turns)


@dataclass(frozen=True)
class Sample:
    """Prompts to tune on and prompts to judge on, near-duplicates never on both sides."""

    tune: tuple[SamplePrompt, ...]
    holdout: tuple[SamplePrompt, ...]
    fingerprint: str
    """SHA-256 over the seed, the token ids and all turns of both sides, in order."""
    template: Literal["chat", "none"]
    """Whether the tokenizer's chat template was applied."""
    skipped: tuple[Skipped, ...]
    """Records that were not readable, too long, or refused by the chat template."""
    n_read: int
    """Records found in the file, skipped ones and duplicates included."""
    n_duplicates: int
    """Exact copies of another prompt, left out."""
    n_templated_already: int
    """Used prompts that carried a template or start token and were taken as they are."""
    n_wanted: int
    unit: str
    """What ``skipped`` counts: "line" or "record"."""

    @property
    def n_groups(self) -> int:
        """Groups of near-duplicates among the used prompts; all different: one each."""
        return len({prompt.group for prompt in (*self.tune, *self.holdout)})

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean length of the first turn, in tokens."""
        lengths = [len(prompt.token_ids) for prompt in (*self.tune, *self.holdout)]
        return sum(lengths) / len(lengths)

    def summary(self, *, is_split: bool = True) -> str:
        """Say in a few lines what was read, used, skipped and grouped, and why.

        Args:
            is_split: Whether prompts were to be held out; otherwise the sides are not named.
        """
        n_used = len(self.tune) + len(self.holdout)
        template = "chat template applied" if self.template == "chat" else "no chat template"
        if self.n_templated_already:
            template += f" ({self.n_templated_already} carried one already)"
        sides = f": {len(self.tune)} to tune on and {len(self.holdout)} held out" * is_split
        lines = [
            f"Read {self.n_read} prompts, use {n_used}{sides}, {self.mean_prompt_tokens:.0f} "
            f"tokens on average, {template}."
        ]
        notes: list[str] = []
        if n_used < self.n_wanted:
            notes.append(f"{self.n_wanted} were asked for, the file gives no more")
        if self.n_duplicates:
            notes.append(f"{self.n_duplicates} exact copies left out")
        if self.n_groups < n_used and is_split:
            notes.append(
                f"near-duplicates make them {self.n_groups} groups, each kept on one side"
            )
        if self.skipped:
            examples = describe_skipped(self.skipped, self.unit)
            notes.append(f"{len(self.skipped)} skipped ({examples})")
        if notes:
            lines.append("; ".join(notes) + ".")
        return "\n".join(lines)


def build_sample(
    prompts: PromptFile,
    tokenizer: Any,
    *,
    seed: int,
    n_tune: int,
    n_holdout: int,
    max_prompt_tokens: int,
    raw: bool = False,
) -> Sample:
    """Tokenise prompts and split them, independently of their order in the file.

    If the file has fewer prompts than asked for, both sides shrink in proportion. Groups of
    near-duplicates stay on one side, so that a side may get still fewer; with one group only,
    the holdout is empty.

    Args:
        prompts: What ``read_prompts`` returned.
        tokenizer: The target's tokenizer.
        seed: Decides which prompts are used and on which side.
        n_tune: Prompts to tune on.
        n_holdout: Prompts to hold out.
        max_prompt_tokens: Prompts whose first turn is longer are skipped, never cut.
        raw: Leave the chat template away even if the tokenizer has one.

    Raises:
        UsageError: A count is out of range.
        SpectuneError: No prompt fits.
    """
    for name, value, low in (
        ("n_tune", n_tune, 1),
        ("n_holdout", n_holdout, 0),
        ("max_prompt_tokens", max_prompt_tokens, 1),
    ):
        if value < low:
            raise UsageError(f"{name} must be at least {low}, not {value}; choose a larger one.")
    # Reversed, so that of equal prompts the first one stays, with its line.
    distinct = {prompt.id: prompt for prompt in reversed(prompts.records)}
    order = sorted(distinct.values(), key=lambda prompt: _seeded_hash(seed, prompt.id))
    candidates, refused = _tokenise(
        order, tokenizer, raw, max_prompt_tokens, limit=_OVERSAMPLE * (n_tune + n_holdout)
    )
    if not candidates:
        reasons = describe_skipped(refused, prompts.unit)
        raise SpectuneError(
            f"No prompt can be used ({reasons}); mend or shorten them, or raise max_prompt_tokens."
        )
    tune, holdout = _split(candidates, n_tune, n_holdout)
    return Sample(
        tune=tune,
        holdout=holdout,
        fingerprint=_fingerprint(seed, tune, holdout),
        template="chat" if not raw and has_template(tokenizer) else "none",
        skipped=(*prompts.skipped, *refused),
        n_read=len(prompts.records) + len(prompts.skipped),
        n_duplicates=len(prompts.records) - len(distinct),
        n_templated_already=sum(
            is_templated(prompt.prompt.turns[0][0].content, tokenizer)
            for prompt in (*tune, *holdout)
        ),
        n_wanted=n_tune + n_holdout,
        unit=prompts.unit,
    )


def first_of(sample: Sample, settings: Settings) -> Sample:
    """Return the sample with no more prompts on each side than the settings ask for."""
    tune, holdout = sample.tune[: settings.n_tune], sample.holdout[: settings.n_holdout]
    fingerprint = _fingerprint(settings.seed, tune, holdout)
    return replace(sample, tune=tune, holdout=holdout, fingerprint=fingerprint)


def render(
    prompt: Prompt, answers: Sequence[str], tokenizer: Any, *, raw: bool = False
) -> list[int]:
    """Return the token ids of turn ``len(answers)``, given the answers to the turns before.

    With the chat template if the tokenizer has one, otherwise the texts themselves with a blank
    line between them. A prompt that begins with a start token or a chat opening is taken as it
    is. The ids have at most one start token, and no end token the tokenizer put behind the text.

    Raises:
        ValueError: There is no such turn, or the chat template refuses the conversation.
    """
    if len(answers) >= len(prompt.turns):
        raise ValueError(f"Turn {len(answers)} does not exist: there are {len(prompt.turns)}.")
    messages: list[Message] = []
    for turn, answer in zip_longest(prompt.turns[: len(answers) + 1], answers):
        messages += turn
        if answer is not None:
            messages.append(Message("assistant", answer))
    return encode_chat([message._asdict() for message in messages], tokenizer, raw=raw)


def _seeded_hash(seed: int, prompt_id: str) -> str:
    return hashlib.sha256(f"{seed}:{prompt_id}".encode()).hexdigest()


class _Candidate(NamedTuple):
    prompt: Prompt
    token_ids: tuple[int, ...]


def _tokenise(
    prompts: Iterable[Prompt], tokenizer: Any, raw: bool, max_prompt_tokens: int, limit: int
) -> tuple[list[_Candidate], list[Skipped]]:
    """Take prompts in order until ``limit`` of them fit; say why others did not."""
    candidates: list[_Candidate] = []
    refused: list[Skipped] = []
    for prompt in prompts:
        if len(candidates) == limit:
            break
        try:
            ids = render(prompt, [], tokenizer, raw=raw)
        except ValueError as error:
            refused.append(Skipped(prompt.line, f"the chat template refuses it: {error}"))
            continue
        if not ids:
            refused.append(Skipped(prompt.line, "it has no tokens"))
        elif len(ids) > max_prompt_tokens:
            reason = f"{len(ids)} tokens are more than max_prompt_tokens = {max_prompt_tokens}"
            refused.append(Skipped(prompt.line, reason))
        else:
            candidates.append(_Candidate(prompt, tuple(ids)))
    return candidates, sorted(refused)


def _split(
    candidates: list[_Candidate], n_tune: int, n_holdout: int
) -> tuple[tuple[SamplePrompt, ...], tuple[SamplePrompt, ...]]:
    """Use as many different prompts as possible, and give whole groups to the needier side."""
    n_used = min(n_tune + n_holdout, len(candidates))
    used = _most_varied(candidates)[:n_used]
    wanted_holdout = n_used * n_holdout // (n_tune + n_holdout)
    wanted = {"tune": n_used - wanted_holdout, "holdout": wanted_holdout}
    missing = dict(wanted)
    sides: dict[int, str] = {}
    # Large groups first: the small ones then even out the sides.
    for group, size in Counter(prompt.group for prompt in used).most_common():
        sides[group] = max(missing, key=lambda side: missing[side] / max(1, wanted[side]))
        missing[sides[group]] -= size
    tune, holdout = (
        tuple(prompt for prompt in used if sides[prompt.group] == side)[: wanted[side]]
        for side in wanted
    )
    return tune, holdout


def _most_varied(candidates: list[_Candidate]) -> list[SamplePrompt]:
    """Put the second prompt of a group behind the first of every other, and so on.

    The test on the holdout takes its prompts for independent, which near-duplicates are not.
    """
    groups = group_near_duplicates([_user_text(prompt) for prompt, _ in candidates])
    n_before: Counter[int] = Counter()
    ranks: list[int] = []
    for group in groups:
        ranks.append(n_before[group])
        n_before[group] += 1
    by_rank = sorted(range(len(candidates)), key=lambda index: ranks[index])
    return [SamplePrompt(*candidates[index], groups[index]) for index in by_rank]


def _user_text(prompt: Prompt) -> str:
    """Return what the user says: a shared system message makes no two prompts alike."""
    return "\n".join(m.content for turn in prompt.turns for m in turn if m.role == "user")


def _fingerprint(seed: int, *sides: Iterable[SamplePrompt]) -> str:
    content = [[(prompt.id, prompt.token_ids) for prompt in side] for side in sides]
    return hashlib.sha256(json.dumps([seed, content]).encode()).hexdigest()
