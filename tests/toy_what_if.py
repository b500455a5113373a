"""A profile with measurements whose tokens per round and round times are known by formula."""

from pathlib import Path
from typing import Any

import profiles
import toy_profiles
from autotune.space import SearchSpace
from autotune.what_if.acceptance import rates_of, static_tau
from profiles import (
    Acceptance,
    CostModelSummary,
    CostTable,
    DraftRef,
    ErrorSummary,
    Measurements,
    PricedDraft,
    Score,
    TreeConfig,
)
from profiles.prices import Prices

ACCEPTANCE = Acceptance(
    draft="toy/head",
    tried=[1000, 500, 250],
    accepted=[[400, 100, 50, 20], [200, 50, 25, 10], [100, 25, 12, 5]],
)
LOOKUP = Acceptance(draft="lookup", tried=[400, 300], accepted=[[300], [240]])


def costs(**changes: Any) -> CostModelSummary:
    """Return a cost model: 20 ms a plain token, a knee at 16 nodes."""
    fields: dict[str, Any] = {
        "reference_ms": 20.0,
        "tables": [
            CostTable(name="verify", x=[0.0, 8.0, 16.0, 32.0, 64.0], relative=[1, 1.1, 1.2, 2, 4]),
            CostTable(name="extend", x=[1.0, 8.0], relative=[0.1, 0.17]),
            CostTable(name="level", x=[1.0, 8.0], relative=[0.08, 0.15]),
            CostTable(name="grow", x=[1.0], relative=[0.02]),
            CostTable(name="commit", x=[1.0], relative=[0.01]),
        ],
        "heldout_error": ErrorSummary(median=0.02, p90=0.05),
        "valid": {"nodes": (1.0, 64.0), "context": (32.0, 1024.0)},
    }
    return CostModelSummary(**(fields | changes))


def scores(acceptance: Acceptance) -> list[Score]:
    """Return replayed trees whose gain is 0.9 of what the table says, to the power 1.1."""
    rates, prices, result = rates_of(acceptance), Prices(costs()), []
    for tree in SearchSpace(6, 4, 4, 64).enumerate():
        tau = 1 + 0.9 * (static_tau(rates, tree) - 1) ** 1.1
        speedup = tau / prices.round(tree, tau, tree.nodes).total
        score = Score(draft=acceptance.draft, tree=tree, tau=tau, predicted_speedup=speedup)
        result.append(score)
    return result


def write(folder: Path, name: str = "toy", **changes: Any) -> Path:
    """Write the profile `NAME.yaml` and its measurements into a folder, with changes made."""
    lookup = DraftRef(kind="lookup", min_match=1, max_match=5)
    measured = {
        "scores": [*scores(ACCEPTANCE), *scores(LOOKUP)],
        "acceptance": [ACCEPTANCE, LOOKUP],
        "drafts": [
            PricedDraft(draft="toy/head", ref=toy_profiles.profile().draft, costs=costs()),
            PricedDraft(draft="lookup", ref=lookup, costs=costs()),
        ],
    }
    path = folder / f"{name}.yaml"
    file = profiles.measurements_path(path)
    measured |= {key: changes.pop(key) for key in list(changes) if key in measured}
    profiles.save_measurements(Measurements(**measured), file)
    changes = {"cost_model": costs().model_dump(), "measurements": file.name} | changes
    changes["tree"] = changes.get("tree", {"depth": 3, "width": 3, "top_k": 3, "nodes": 8})
    profiles.save(toy_profiles.profile(changes), path)
    return path


TREE = TreeConfig(depth=3, width=3, top_k=3, nodes=8)
