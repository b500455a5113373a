"""What if: tokens per round and round time of any tree, elsewhere or under other conditions.

`speedup = tau / (round time / plain token time)`, from a profile's cost tables, the replayed
tokens per round beside it, and what is asked to be different. Needs neither device nor torch.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from profiles import PLAIN, TreeConfig, format_validation_error
from profiles.errors import UsageError
from profiles.io import PathLike
from profiles.prices import Prices

from .acceptance import Tau, TauTable
from .answers import TREE_KEYS, Answer, WhatIf
from .basis import Basis, DraftBasis, acceptance_of, basis_of_profile
from .caveats import caveats
from .hardware import moved_by
from .pricing import (
    Conditions,
    RoundParts,
    anchor_of,
    plain_price,
    prefill_of,
    round_parts,
)
from .scaling import moved_summary
from .scenario import Scenario, expand, parse_changes, parse_sweep

Tables = Callable[[str, str], TauTable]
"""Gives the acceptance of a draft in another profile's domain."""


def what_if(
    source: PathLike | Basis,
    changes: Mapping[str, Any] | None = None,
    *,
    sweep: Mapping[str, str | Iterable[Any]] | None = None,
) -> WhatIf:
    """Answer what a deployment would gain under other conditions.

    Args:
        source: A profile's path, or a basis: `autotune.what_if.basis.basis_of_numbers(path)` reads
            one from a file of numbers such as `examples/what_if/t4_qwen3_4b.yaml`.
        changes: Values by key, see `autotune.what_if.scenario.KEYS`; numbers, or text as on the
            command line.
        sweep: At most two keys, each with its values or a range such as "1:10" or "0.5:2:0.1".

    Returns:
        One answer for each scenario; depth 0 is plain decoding, exactly 1.

    Raises:
        SpectuneError: A file cannot be read or does not hold what is asked about.
        UsageError: A key is unknown, a value is nonsense, or a tree is impossible.
    """
    basis = source if isinstance(source, Basis) else basis_of_profile(source)
    sweeps = {key: parse_sweep(key, values) for key, values in (sweep or {}).items()}
    tables = functools.cache(acceptance_of)  # other profiles are read once
    answers, refused = [], []
    for asked in expand(parse_changes(changes or {}), sweeps):
        scenario = Scenario(**asked)  # type: ignore[arg-type]
        try:
            tree = tree_of(basis, scenario)
        except UsageError as error:
            refused.append(error)
            continue
        answers.append(_answer(basis, asked, scenario, tree, tables))
    if not answers:
        raise refused[0]
    notes = basis.assumptions
    if refused:
        notes = (*notes, f"{len(refused)} impossible trees are left out; the first: {refused[0]}")
    return WhatIf(basis.name, tuple(sweeps), answers, notes)


def tree_of(basis: Basis, scenario: Scenario) -> TreeConfig:
    """Return the tree asked for; what was not said is the profile's, as far as that is legal.

    Raises:
        UsageError: The tree is impossible.
    """
    asked = {
        key: getattr(scenario, key) for key in TREE_KEYS if getattr(scenario, key) is not None
    }
    if not asked:
        return basis.tree
    values = {key: getattr(basis.shape, key) for key in TREE_KEYS} | asked
    if values["depth"] == 0:
        return PLAIN
    if "nodes" not in asked:
        try:
            widest = TreeConfig(**values | {"nodes": values["depth"]}).pool
        except ValidationError as error:
            raise _impossible(values, error) from None
        values["nodes"] = min(max(values["nodes"], values["depth"]), widest)
    try:
        return TreeConfig(**values)
    except ValidationError as error:
        raise _impossible(values, error) from None


def _impossible(values: Mapping[str, int], error: ValidationError) -> UsageError:
    shown = ", ".join(f"{key} {value}" for key, value in values.items())
    return UsageError(
        f"the tree must be possible, but {shown} is not: {format_validation_error(error, 'tree')}"
    )


def _answer(
    basis: Basis, asked: Mapping[str, Any], scenario: Scenario, tree: TreeConfig, tables: Tables
) -> Answer:
    draft = basis.draft(scenario.draft)
    conditions = Conditions.of(basis, scenario)
    moved = moved_by(basis, draft, scenario)
    costs = moved_summary(draft.costs, moved.target, moved.draft, basis.overhead)
    prices = draft.prices if costs is draft.costs else Prices(costs)
    table, factor, is_own = _acceptance(draft, scenario, tables)
    tau = table.tau(tree, factor, replay=is_own)
    plain = plain_price(prices, conditions)
    parts = RoundParts(verify=plain)
    if not tree.is_plain:
        anchor = anchor_of(draft, tree, Conditions.of(basis, Scenario()))
        parts = round_parts(prices, tree, tau.value, anchor, conditions)
    prefill = scenario.batch * prefill_of(basis, prices, moved.target, conditions.prompt)
    n_decoded = conditions.output - 1
    total = prefill + n_decoded * parts.total / tau.value
    ms = 1e3 * prices.reference_s
    return Answer(
        asked=asked,
        draft=draft.name,
        tree=tree,
        batch=scenario.batch,
        context=conditions.context,
        output_length=conditions.output,
        tau=tau,
        round=parts.times(ms),
        plain_ms=ms * plain,
        end_to_end_speedup=(prefill + n_decoded * plain) / total,
        error=_error(draft, tree, tau),
        flags=(*moved.notes, *caveats(basis, draft, tree, tau, conditions)),
    )


def _acceptance(
    draft: DraftBasis, scenario: Scenario, tables: Tables
) -> tuple[TauTable, float, bool]:
    """Return the table to take tau from, the factor on its rates, and whether replay counts."""
    own, *others = draft.acceptance.items()
    wanted = scenario.acceptance
    if not isinstance(wanted, str):
        return own[1], wanted, True
    if wanted == own[0]:
        return own[1], 1.0, True
    if wanted in dict(others):
        return dict(others)[wanted], 1.0, True
    return tables(wanted, draft.name), 1.0, False


def _error(draft: DraftBasis, tree: TreeConfig, tau: Tau) -> float | None:
    """Return the relative error of the decode speedup that 9 of 10 trees stay below."""
    if tree.is_plain:
        return 0.0
    errors = [draft.costs.heldout_error]
    if not tau.is_replayed:
        errors.append(tau.error)
    known = [error.p90 for error in errors if error is not None]
    return math.hypot(*known) if len(known) == len(errors) else None
