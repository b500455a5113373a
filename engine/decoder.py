"""The decoder people use: text in, text out, driven by a profile."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles import (
    GREEDY,
    PLAIN,
    Profile,
    Sampling,
    Serving,
    TreeConfig,
    load,
)
from profiles.errors import UsageError
from profiles.prices import Prices

from .adaptive import Shaper
from .batch import BatchObserver, TreeOfBatch, decode_many
from .decode import DecodeStats, Request, decode
from .devices import device_like
from .draft import Draft, fresh, remember
from .guard import Guard, GuardStats
from .memory import room_for
from .pair import LoadedTarget, draft_of, load_target
from .sampling import LogitsProcessor, Sampler, request_seed
from .stopping import StoppingCriterion, StopRules
from .text import TextStream, encode_prompt
from .trace import Trace
from .trust import UntrustedProfileWarning, check_engine, facts, fatal_mismatches, why_untrusted

Prompt = str | Sequence[dict[str, str]] | Sequence[int]
"""A user's text, a list of chat messages, or token ids taken as they are."""


@dataclass(frozen=True)
class Generation:
    """What was generated for one prompt.

    Attributes:
        token_ids: The new tokens, the end token included where it was reached.
        text: Their text, without special tokens.
        finish_reason: `eos`, `stop` (a stop string), `criterion` or `length`.
        stats: Counts and seconds.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: DecodeStats


class SpeculativeDecoder:
    """Decodes prompts with a draft tree, or plainly; the text is the same either way.

    Args:
        loaded: The target, as `load_target` returns it.
        draft: The draft, such as `load_draft("lookup", loaded).draft`; None for plain decoding.
        tree: The tree of every round; adaptive drafting has its own limits.
        sampling: Temperature, top-k and top-p; greedy by default.
        serving: How the tree is served: guarded, and perhaps adaptive; by default neither.
        raw: Leave out the chat template where a request does not say.
        tree_of_batch: Chooses the tree by the number of prompts in flight, of `generate_many`;
            always `tree` if None.

    All requests of a decoder share its guard: what one teaches about the traffic holds for the
    next, and what may be lost is counted over all of them. Decoders are not for several threads.
    """

    def __init__(
        self,
        loaded: LoadedTarget,
        draft: Draft | None = None,
        tree: TreeConfig = PLAIN,
        sampling: Sampling = GREEDY,
        serving: Serving | None = None,
        *,
        raw: bool = False,
        tree_of_batch: TreeOfBatch | None = None,
    ) -> None:
        self._guard: Guard | None = None
        self._shaper: Shaper | None = None
        self._largest = tree
        if serving is not None and draft is not None:
            prices = Prices(serving.cost_model)
            if serving.calibration is not None:
                on_cpu = loaded.target.device.type == "cpu"
                self._shaper = Shaper(serving.calibration, prices, stops_early=on_cpu)
                self._largest = self._shaper.limits
                self._largest.check_vocabulary(draft.max_top_k)
            self._guard = Guard(self._largest, prices, serving.guard)
        if draft is not None:
            tree.check_vocabulary(draft.max_top_k)
        elif not tree.is_plain:
            raise UsageError(f"the tree {tree.label()} needs a draft, but there is none; pass one")
        self.loaded = loaded
        self.draft = None if draft is None else fresh(draft)
        self.tree = tree
        self.sampling = sampling
        self.raw = raw
        self.tree_of_batch = tree_of_batch or (lambda n_rows: tree)

    @classmethod
    def from_profile(
        cls,
        profile: Profile | str | Path,
        *,
        loaded: LoadedTarget | None = None,
        device: str | None = None,
        sampling: Sampling | None = None,
        trust: bool = False,
        trust_remote_code: bool = False,
    ) -> "SpeculativeDecoder":
        """Return the decoder a profile describes.

        A profile made on another device, for other weights or another sampling proves nothing
        here: it is decoded plainly, without loading the draft, and a warning names what differs.

        Args:
            profile: The profile or its file.
            loaded: The target, if it is loaded already.
            device: Device to decode on; the kind the profile was made on by default.
            sampling: Sampling to decode with; the profile's by default.
            trust: Use the profile's tree in spite of differences.
            trust_remote_code: Let the target's checkpoint run its own Python code.

        Raises:
            SpectuneError: The profile was made on another engine, or it or its models cannot be
                loaded.
        """
        if not isinstance(profile, Profile):
            profile = load(profile)
        check_engine(profile)
        if loaded is None:
            loaded = load_target(
                profile.target.id,
                dtype=profile.target.dtype or "auto",
                device=device or device_like(profile.device.kind, profile.device.name),
                trust_remote_code=trust_remote_code,
            )
        sampling = sampling or profile.sampling
        raw = profile.domain.template == "none"  # prompts are built as those that were measured
        if profile.decision == "plain":
            return cls(loaded, sampling=sampling, raw=raw)
        fatal = fatal_mismatches(profile, facts(loaded, profile.draft, sampling))
        if not fatal or trust:
            draft = draft_of(profile.draft, loaded)
            fatal = fatal_mismatches(profile, facts(loaded, draft.ref, sampling))
            if not fatal or trust:
                return cls(
                    loaded,
                    draft.draft,
                    profile.tree,
                    sampling,
                    profile.serving,
                    raw=raw,
                    tree_of_batch=profile.tree_of_batch,
                )
        warnings.warn(why_untrusted(profile, fatal), UntrustedProfileWarning, stacklevel=2)
        return cls(loaded, sampling=sampling, raw=raw)

    def request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        seed: int = 0,
        index: int = 0,
        stop: str | Sequence[str] = (),
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriterion] = (),
        raw: bool | None = None,
        forced: list[int] | None = None,
    ) -> Request:
        """Return a request ready to be decoded; the arguments are those of `generate`.

        Args:
            forced: Token ids that are emitted instead of those drawn, for timing; they end it.
        """
        ids = encode_prompt(prompt, self.loaded.tokenizer, raw=self.raw if raw is None else raw)
        n_new = max_new_tokens if forced is None else len(forced)
        return Request(
            self.loaded.target,
            self._draft_for(len(ids), n_new),
            ids,
            Sampler(self.sampling, request_seed(seed, index), logits_processors),
            StopRules(
                max_new_tokens,
                self.loaded.eos_ids,
                [stop] if isinstance(stop, str) else stop,
                stopping_criteria,
                self.loaded.tokenizer,
                self.loaded.target.device,
            ),
            forced,
            self._shaper,
        )

    def _draft_for(self, n_prompt: int, n_new: int) -> Draft | None:
        """Return the draft where it can pay and its rounds fit the memory, else None.

        Raises:
            SpectuneError: Not even plain decoding fits.
        """
        target = self.loaded.target
        n_tokens = min(n_prompt + n_new, target.max_positions or n_prompt + n_new)
        room = room_for(target, self.draft, n_tokens)
        if self._guard is not None:
            settings = self._guard.settings
            if n_new < settings.min_new_tokens or n_prompt > (settings.max_context or n_prompt):
                return None
        return self.draft if room.fits(self._largest) else None

    def rows_that_fit(self, n_tokens: int) -> int:
        """Return how many texts of that many tokens the memory holds at a time, at least one."""
        return room_for(self.loaded.target, self.draft, n_tokens).rows(self._largest)

    @property
    def stats(self) -> GuardStats | None:
        """What the guard has seen and done since the decoder was made; None without a guard."""
        return None if self._guard is None else self._guard.stats

    def run(self, request: Request) -> Iterator[list[int]]:
        """Decode a request, yielding token ids as they come."""
        if self._guard is None:
            yield from decode(request, lambda _: self.tree)
        else:
            guard = self._guard.request()
            yield from decode(request, guard.tree, guard.settle)
        if not request.is_forced and self.draft is not None:
            remember(self.draft, request.generated)

    def remember(self, conversation: Sequence[Trace]) -> None:
        """Let the draft look back at answers as if they had been decoded here.

        Forced text is not remembered of itself: it is decoded again and again, and a draft that
        has seen it before is right for a reason that serving does not know.
        """
        for trace in conversation if self.draft is not None else ():
            remember(self.draft, trace.generated)

    def forget(self) -> None:
        """Let the draft forget all earlier answers."""
        self.draft = None if self.draft is None else fresh(self.draft)

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Generate the answer to one prompt.

        Args:
            prompt: Text (the chat template is applied), chat messages, or token ids.
            **options: `max_new_tokens` (256), `seed` (0) and `index` (0, the prompt's place in a
                list; together they fix the noise of sampling), `stop` (a string or strings that
                end the text), `logits_processors` and `stopping_criteria` of transformers, `raw`
                (no chat template; as the profile's prompts were built if left out).

        Raises:
            UsageError: The prompt is empty or does not fit the context.
        """
        request = self.request(prompt, **options)
        for _ in self.run(request):
            pass
        return self.result(request)

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int = 8,
        each: Callable[[int], Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Generate the answers to several prompts, some of them at a time.

        Every answer is what `generate(prompt, index=place in the list, **options)` gives, whatever
        its neighbours are. How rounds with several rows in flight draft is the schedule's matter,
        not the guard's. Answers are remembered, by drafts that do so, when all are there.

        Args:
            prompts: See `generate`.
            batch_size: Most prompts in flight, fewer where memory does not hold so many; one
                that has ended makes room for the next.
            each: Further options of the prompt at a place in the list, for example logits
                processors with a state of their own.
            **options: Options of all prompts; see `generate`.

        Raises:
            UsageError: A prompt is empty or does not fit the context, or `batch_size` is below 1.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, but is {batch_size}")
        requests = [
            self.request(prompt, **options | {"index": i} | dict(each(i) if each else {}))
            for i, prompt in enumerate(prompts)
        ]
        if min(batch_size, len(requests)) == 1:  # guarded, and as adaptive as the profile
            for request in requests:
                for _ in self.run(request):
                    pass
                request.release()
        else:
            self.run_many(requests, batch_size)
        return [self.result(request) for request in requests]

    def run_many(
        self,
        requests: Sequence[Request],
        batch_size: int,
        observe: BatchObserver | None = None,
    ) -> None:
        """Decode requests to their ends, at most `batch_size` at a time."""
        target = self.loaded.target
        min_left = 0 if self._guard is None else self._guard.settings.min_new_tokens
        longest = max((len(r.tokens) + r.budget_left for r in requests), default=0)
        batch_size = min(batch_size, self.rows_that_fit(longest))
        for _ in decode_many(target, requests, batch_size, self.tree_of_batch, observe, min_left):
            pass
        for request in requests:
            if not request.is_forced and self.draft is not None:
                remember(self.draft, request.generated)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Yield the text of the answer piece by piece; see `generate` for the options."""
        request = self.request(prompt, **options)
        stream = TextStream(self.loaded.tokenizer)
        for token_ids in self.run(request):
            if text := stream.push(token_ids):
                yield text
        if text := stream.finish():
            yield text

    def result(self, request: Request) -> Generation:
        """Return what a finished request generated."""
        text = self.loaded.tokenizer.decode(request.generated, skip_special_tokens=True)
        return Generation(request.generated, text, request.stop_reason or "", request.stats)
