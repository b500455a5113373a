"""Which conventions an EAGLE-3 head was trained with: its config's, or a neighbour's?

Projects number the target's layers differently, and the base of the rotary angles in a config is
not always the one of the training. Both faults only cost acceptance, so nobody notices; here the
usual readings are compared on the target's own text, token by token.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from engine.eagle3_draft import Eagle3Draft
from engine.loaded_draft import LoadedDraft
from engine.probing import first_choices_right
from engine.target import Target
from engine.trace import Trace
from profiles import ProbedValue
from profiles.errors import SpectuneError

from .job import Job
from .progress import Silent

N_TOKENS = 2000
"""Tokens looked at, where the answers have as many."""

FAR = 512
"""Position from which a wrong rotary base shows; half of the tokens lie beyond where they can."""

ALPHA = 0.01
"""Chance, over all readings of a convention, of preferring one that is no better."""

MIN_AGREEMENT = 0.05
"""Below this the head and the target do not belong together."""

MIN_TOKENS = 100
"""Fewer say too little to refuse a head for."""

SOUND_AGREEMENT = 0.5
"""From here on a head is sound even where one token makes up most of a monotonous text."""

USUAL_BASE = 10_000.0

Verdict = Literal["kept", "chosen", "undecided", "rejected"]


def probe_drafts(
    job: Job, traces: Sequence[Trace], progress: Silent
) -> tuple[Job, dict[str, tuple[ProbedValue, ...]]]:
    """Settle the conventions of the job's EAGLE-3 heads on recorded answers.

    Returns:
        The job, its heads fed and rotated as they are best understood, and what was looked at,
        by draft.

    Raises:
        SpectuneError: A head agrees with the target under no reading.
    """
    heads = {
        name: draft.head
        for name, draft in job.drafts.items()
        if isinstance(draft.head.draft, Eagle3Draft)
    }
    if not heads:
        return job, {}
    drafts, tables = dict(job.drafts), {}
    ground = _Ground(job.loaded.target, traces, choose_roots(traces), progress)
    settled: dict[int, _Probed] = {}  # a hybrid shares its head with the head itself
    for name, head in heads.items():
        key = id(head.draft)
        if key not in settled:
            settled[key] = _probe(head, ground)
            _check_agreement(name, settled[key][1], ground)
            for message in _corrections(name, settled[key][1]):
                progress.say(message)
        probed, tables[name] = settled[key]
        drafts[name] = job.drafts[name].with_head(probed)
    return replace(job, drafts=drafts), tables


@dataclass(frozen=True)
class _Ground:
    """What all readings are judged on: recorded texts and places in them."""

    target: Target
    traces: Sequence[Trace]
    roots: Sequence[Sequence[int]]
    progress: Silent

    def constant_guess(self) -> float:
        """Return how often the most frequent of the wanted tokens is right."""
        pairs = zip(self.traces, self.roots, strict=True)
        wanted = Counter(trace.tokens[root + 1] for trace, places in pairs for root in places)
        return max(wanted.values()) / wanted.total()


def choose_roots(traces: Sequence[Trace]) -> list[list[int]]:
    """Return for every trace the positions whose next token is to be guessed.

    Only answers count: prompts are not the target's words, and a later turn repeats the earlier
    ones. Of many tokens `N_TOKENS` are taken, evenly, half of them beyond `FAR` if possible.
    """
    places = [
        (index, root)
        for index, trace in enumerate(traces)
        for root in range(len(trace.prompt), len(trace.tokens) - 1)
    ]
    near = [place for place in places if place[1] < FAR]
    far = [place for place in places if place[1] >= FAR]
    n_far = min(len(far), max(N_TOKENS // 2, N_TOKENS - len(near)))
    roots: list[list[int]] = [[] for _ in traces]
    for index, root in _evenly(near, N_TOKENS - n_far) + _evenly(far, n_far):
        roots[index].append(root)
    return roots


def _evenly(places: list[tuple[int, int]], n: int) -> list[tuple[int, int]]:
    return places if n >= len(places) else [places[i * len(places) // n] for i in range(n)]


def layer_readings(layers: Sequence[int], n_layers: int) -> list[tuple[int, ...]]:
    """Return layer ids as loaded, one later and one earlier, if the target has them."""
    shifted = [tuple(layer + shift for layer in layers) for shift in (0, 1, -1)]
    return [ids for ids in shifted if all(0 <= layer < n_layers for layer in ids)]


def base_readings(rope: Mapping[str, Any], target_config: Any) -> list[float]:
    """Return the base as loaded, the usual one and the target's, each once.

    Only the loaded one for rope types that scale angles by more than the base.
    """
    bases = [rope["rope_theta"]]
    if rope["rope_type"] == "default":
        bases += [USUAL_BASE, _target_base(target_config)]
    return list(dict.fromkeys(float(base) for base in bases if base))


def _target_base(config: Any) -> float | None:
    """Return the target's own base; where kinds of layers differ, that of full attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope).get("rope_theta")  # type: ignore[no-any-return]


_Probed = tuple[LoadedDraft, tuple[ProbedValue, ...]]


def _probe(loaded: LoadedDraft, ground: _Ground) -> _Probed:
    """Settle the layers under the loaded base, then the base with these layers."""
    draft = loaded.draft
    assert isinstance(draft, Eagle3Draft)  # noqa: S101 - the caller has looked
    layers = layer_readings(draft.feature_layers, ground.target.n_layers)
    draft, rows = _settle(draft, "feature_layers", layers, ground)
    bases = base_readings(draft.head.config.rope, ground.target.config)
    if len(bases) > 1:
        draft, more = _settle(draft, "rope_theta", bases, ground)
        rows += more
    base = float(draft.head.config.rope["rope_theta"])
    used = {"feature_layers": draft.feature_layers, "rope_theta": base}
    return LoadedDraft(draft, loaded.ref.model_copy(update=used)), tuple(rows)


def _settle(
    draft: Eagle3Draft,
    what: Literal["feature_layers", "rope_theta"],
    values: Sequence[Any],
    ground: _Ground,
) -> tuple[Eagle3Draft, list[ProbedValue]]:
    """Compare readings of one convention; return the head under the one to use, and the table."""
    variants = [draft.variant(**{what: value}) for value in values]
    title = f"Probing {what.replace('_', ' ')}"
    with ground.progress.step(title, len(ground.traces)) as tick:
        right = first_choices_right(ground.target, variants, ground.traces, ground.roots, tick)
    decision = decide(right)
    rows = [
        ProbedValue(
            what=what,
            value=value,
            agreement=float(right[i].mean()),
            n_tokens=right.shape[1],
            p_value=decision.p_values[i],
            verdict=decision.verdicts[i],
        )
        for i, value in enumerate(values)
    ]
    return variants[decision.used], rows


@dataclass(frozen=True)
class Decision:
    """Which reading is used, and how sure that is.

    Attributes:
        used: Its index.
        p_values: Of every reading against the one used, and of the one used against the first;
            corrected for the number of readings. None for the first against itself.
        verdicts: In words.
    """

    used: int
    p_values: tuple[float | None, ...]
    verdicts: tuple[Verdict, ...]


def decide(right: NDArray[np.bool_]) -> Decision:
    """Keep the first reading unless another is proved better on the same tokens.

    Args:
        right: Bool [n_readings, n_tokens], where each reading's first choice was right.
    """
    n_others = len(right) - 1
    n_right = right.sum(axis=1)

    def p_value(i: int, j: int) -> float:
        return min(1.0, n_others * mcnemar(right[i], right[j]))

    better = [i for i in range(len(right)) if n_right[i] > n_right[0] and p_value(i, 0) < ALPHA]
    used = max(better, key=lambda i: n_right[i], default=0)
    p_values: list[float | None] = []
    verdicts: list[Verdict] = []
    for i in range(len(right)):
        if i == used:
            p_values.append(None if i == 0 else p_value(i, 0))
            verdicts.append("kept" if i == 0 else "chosen")
            continue
        p = p_value(i, used)
        p_values.append(p)
        verdicts.append("rejected" if n_right[i] < n_right[used] and p < ALPHA else "undecided")
    return Decision(used, tuple(p_values), tuple(verdicts))


def mcnemar(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    Under the hypothesis that both are right equally often, each token on which only one of them
    is right falls to either with probability 1/2.
    """
    n_first = int((first & ~second).sum())
    n_second = int((second & ~first).sum())
    if n_first + n_second == 0:
        return 1.0
    return float(stats.binomtest(n_first, n_first + n_second).pvalue)


def _corrections(name: str, table: Sequence[ProbedValue]) -> Iterator[str]:
    """Say in a sentence each where a head is not read as its config says."""
    for row in table:
        if row.verdict == "chosen":
            own = next(other for other in table if other.what == row.what)
            yield (
                f"{name} is right on {100 * row.agreement:.1f} % of {row.n_tokens} tokens with "
                f"{row.what} {row.value}, but on {100 * own.agreement:.1f} % with the "
                f"{own.value} of its config, so it is used with the former."
            )


def _check_agreement(name: str, table: Sequence[ProbedValue], ground: _Ground) -> None:
    """Refuse a head that guesses no better than blindly, whatever the reading."""
    best = max(table, key=lambda row: row.agreement)
    blind = ground.constant_guess()
    is_sound = best.agreement >= MIN_AGREEMENT and best.agreement > min(blind, SOUND_AGREEMENT)
    if is_sound or best.n_tokens < MIN_TOKENS:
        return
    raise SpectuneError(
        f"a head must guess more of the target's tokens than a constant would, and at least "
        f"{100 * MIN_AGREEMENT:.0f} %, but {name} guesses {100 * best.agreement:.1f} % of "
        f"{best.n_tokens} and a constant {100 * blind:.1f} %; it may be made for another target, "
        "read the wrong layers or join them in the wrong order, or have the wrong norm flags in "
        "its config.json, so correct that or leave this draft out"
    )
