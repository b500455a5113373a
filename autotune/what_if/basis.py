"""What a what-if question starts from: a profile with its measurements, or numbers alone.

Both become the same thing here: cost tables, tokens per round of any tree, sizes, and defaults.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from profiles import (
    CostModelSummary,
    CostTable,
    Measurements,
    PricedDraft,
    Profile,
    TreeConfig,
    draft_name,
    load,
    load_measurements_of,
)
from profiles.datasheets import DataSheet, find_sheet
from profiles.errors import SpectuneError, UsageError
from profiles.io import PathLike
from profiles.pair_numbers import PairNumbers, load_numbers
from profiles.prices import Prices

from .acceptance import TauTable, rates_of, rates_of_rows

FAR = 1e6
"""Nodes up to which a draft described by two numbers is taken to be linear."""

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class DraftBasis:
    """One draft of the pair.

    Attributes:
        name: As in the measurements file.
        costs: The fitted price of a round with it.
        acceptance: Tokens per round by domain; the first is the default.
        round_times: Relative time of the rounds of trees that were replayed.
        parameters: Its weights; None if it has none or they are not known.
        is_model_free: Whether it proposes without a network.
    """

    name: str
    costs: CostModelSummary
    acceptance: Mapping[str, TauTable]
    round_times: Mapping[TreeConfig, float]
    parameters: int | None
    is_model_free: bool

    @cached_property
    def prices(self) -> Prices:
        """The cost tables as functions."""
        return Prices(self.costs)

    @cached_property
    def replayed_sizes(self) -> tuple[list[TreeConfig], NDArray[np.float64]]:
        """The trees that were replayed, and the logarithms of their four numbers."""
        trees = [tree for tree in self.round_times if not tree.is_plain]
        sizes = [[tree.depth, tree.width, tree.top_k, tree.nodes] for tree in trees]
        return trees, np.log(np.array(sizes, dtype=float).reshape(-1, 4))


@dataclass(frozen=True)
class Basis:
    """Everything a question starts from.

    Attributes:
        name: Of the profile, or of the pair described.
        drafts: By name; the first is the default.
        tree: What the profile runs.
        shape: Gives width, top-k and nodes where only the depth is asked for.
        prompt_tokens, output_length: Lengths behind the end-to-end speedup.
        target_parameters: Weights of the target, or None.
        prefill_ms: Time of the target's pass over a prompt of `prompt_tokens`, or None.
        dtype: Type the weights are computed in.
        overhead: Part of a target pass that is neither memory nor compute, in reference passes.
        sheet: The device's data sheet, if it has one.
        assumptions: What is assumed, in sentences.
    """

    name: str
    drafts: Mapping[str, DraftBasis]
    tree: TreeConfig
    shape: TreeConfig
    prompt_tokens: float
    output_length: int
    target_parameters: int | None
    dtype: str
    prefill_ms: float | None = None
    overhead: float = 0.0
    sheet: DataSheet | None = None
    assumptions: tuple[str, ...] = ()

    def draft(self, name: str | None) -> DraftBasis:
        """Return a draft by name, or the default.

        Raises:
            UsageError: There is no such draft.
        """
        if name is None:
            return next(iter(self.drafts.values()))
        if name not in self.drafts:
            known = ", ".join(self.drafts)
            raise UsageError(f"draft must be one of {known}, but is {name!r}: choose one of these")
        return self.drafts[name]


def basis_of_profile(path: PathLike) -> Basis:
    """Read a profile and the measurements beside it.

    Raises:
        SpectuneError: A file cannot be read, or the profile has no cost model.
    """
    profile, measured = _read(path)
    if profile.cost_model is None:
        raise SpectuneError(f"{os.fspath(path)} must hold a cost model, but has none: tune again.")
    priced = _priced_drafts(profile, measured)
    return Basis(
        name=profile.name,
        drafts={p.draft: _draft_basis(p, profile.domain.name, measured) for p in priced},
        tree=profile.tree,
        shape=_shape(profile, measured, priced[0].draft),
        prompt_tokens=profile.domain.mean_prompt_tokens,
        output_length=profile.domain.max_new_tokens,
        target_parameters=profile.target.parameters,
        dtype=profile.target.dtype or "float32",
        prefill_ms=_prefill_ms(profile),
        sheet=find_sheet(profile.device.name),
    )


def basis_of_numbers(path: PathLike) -> Basis:
    """Read a device and pair described by numbers alone.

    Raises:
        SpectuneError: The file cannot be read or breaks a rule.
    """
    numbers = load_numbers(path)
    target, draft = numbers.target, numbers.draft
    sheet = find_sheet(numbers.device)
    if numbers.device and sheet is None:
        raise SpectuneError(
            f"{os.fspath(path)}: $.device is {numbers.device!r}: it must be a device with a data "
            "sheet; correct it or remove it."
        )
    basis = DraftBasis(
        name=draft.name,
        costs=_costs(numbers),
        acceptance={
            domain: TauTable(rates_of_rows(rows), {})
            for domain, rows in numbers.acceptance.items()
        },
        round_times={},
        parameters=draft.parameters,
        is_model_free=False,
    )
    return Basis(
        name=numbers.name,
        drafts={draft.name: basis},
        tree=numbers.tree,
        shape=numbers.tree,
        prompt_tokens=numbers.prompt_tokens,
        output_length=numbers.output_tokens,
        target_parameters=target.parameters,
        dtype=target.dtype,
        prefill_ms=target.prefill_ms,
        overhead=target.overhead_ms / target.passes[0].ms,
        sheet=sheet,
        assumptions=tuple(f"assumed: {key}: {why}" for key, why in numbers.assumed.items()),
    )


def acceptance_of(path: PathLike, draft: str) -> TauTable:
    """Return the acceptance of a draft in another profile's domain.

    Raises:
        SpectuneError: The profile cannot be read or has no such draft.
    """
    profile, measured = _read(path)
    known = [table.draft for table in measured.acceptance]
    if draft not in known:
        raise UsageError(
            f"acceptance must come from a profile that knows the draft {draft!r}, but "
            f"{os.fspath(path)} knows {', '.join(known) or 'none'}: choose another"
        )
    return _tau_table(draft, measured)


def _read(path: PathLike) -> tuple[Profile, Measurements]:
    profile = load(path)
    return profile, load_measurements_of(profile, path) or Measurements()


def _priced_drafts(profile: Profile, measured: Measurements) -> list[PricedDraft]:
    """Return the drafts that can be priced, the profile's own first."""
    others = [priced for priced in measured.drafts if priced.ref != profile.draft]
    own = next((p.draft for p in measured.drafts if p.ref == profile.draft), None)
    assert profile.cost_model is not None  # noqa: S101 - basis_of_profile has looked
    first = PricedDraft(
        draft=own or draft_name(profile.draft), ref=profile.draft, costs=profile.cost_model
    )
    return [first, *others]


def _draft_basis(priced: PricedDraft, domain: str, measured: Measurements) -> DraftBasis:
    scores = [score for score in measured.scores if score.draft == priced.draft]
    return DraftBasis(
        name=priced.draft,
        costs=priced.costs,
        acceptance={domain: _tau_table(priced.draft, measured)},
        round_times={score.tree: score.tau / score.predicted_speedup for score in scores},
        parameters=priced.ref.parameters,
        is_model_free=not priced.ref.has_weights,
    )


def _tau_table(draft: str, measured: Measurements) -> TauTable:
    tables = [rates_of(table) for table in measured.acceptance if table.draft == draft]
    rates = tables[0] if tables else rates_of_rows([[0.0]])
    return TauTable(rates, {s.tree: s.tau for s in measured.scores if s.draft == draft})


def _prefill_ms(profile: Profile) -> float | None:
    """Return the baseline's time to the first token, as timed on the holdout."""
    judged = [profile.evidence, *(rival.evidence for rival in profile.alternatives)]
    times = [evidence.plain_first_token_ms for evidence in judged if evidence]
    return next((time for time in times if time is not None), None)


def _shape(profile: Profile, measured: Measurements, draft: str) -> TreeConfig:
    """Return the tree to start from; for a plain profile the one that came nearest to winning."""
    if not profile.tree.is_plain:
        return profile.tree
    if profile.alternatives:
        return profile.alternatives[0].tree
    scores = [s for s in measured.scores if s.draft == draft and not s.tree.is_plain]
    if not scores:
        return TreeConfig.chain(2)
    return max(scores, key=lambda score: score.predicted_speedup).tree


def _costs(numbers: PairNumbers) -> CostModelSummary:
    """Return described numbers as the cost model a profile would hold."""
    passes, draft = numbers.target.passes, numbers.draft
    reference = passes[0].ms
    line = [draft.step_ms / reference, (draft.step_ms + FAR * draft.node_ms) / reference]
    tables = [
        CostTable(
            name="verify",
            x=[float(p.tokens - 1) for p in passes],
            relative=[p.ms / reference for p in passes],
        ),
        CostTable(name="extend", x=[1.0, 1.0 + FAR], relative=line),
        CostTable(name="level", x=[1.0, 1.0 + FAR], relative=line),
        CostTable(name="commit", x=[1.0], relative=[numbers.round_overhead_ms / reference]),
        CostTable(name="prefill", x=[1.0], relative=[draft.prefill_ms / reference]),
    ]
    return CostModelSummary(
        reference_ms=reference,
        tables=tables,
        heldout_error=numbers.error,
        valid={"nodes": (1.0, float(passes[-1].tokens - 1))},
    )
