"""Where an answer is approximate or extrapolated, in sentences."""

from collections.abc import Iterator

from profiles import CostModelSummary, TreeConfig

from .acceptance import Tau
from .basis import Basis, DraftBasis
from .pricing import Conditions
from .scenario import Scenario


def caveats(
    basis: Basis, draft: DraftBasis, tree: TreeConfig, tau: Tau, conditions: Conditions
) -> Iterator[str]:
    """Yield what a reader must know before believing an answer."""
    scenario = conditions.scenario
    if basis.prefill_ms is None and basis.prompt_tokens and not tree.is_plain:
        yield "the prompt's time is read off the verify passes: it was not measured"
    yield from _batch_caveats(draft.costs, scenario.batch)
    yield from _context_caveats(draft.costs, conditions.context, scenario)
    if tree.is_plain:
        return
    if not tau.is_replayed:
        yield "tau is approximate, from acceptance tables" + _error_text(tau)
    elif scenario.output_length is not None and scenario.output_length < tree.depth + 1:
        yield "the answer is shorter than the tree is deep"
    # A measured batch corrects the price of passes that are wider than any measured one.
    rows = 1 if _is_measured(draft.costs, scenario.batch) else scenario.batch
    yield from _size_caveats(draft.costs, tree, tau, rows)
    n_depths = len(next(iter(draft.acceptance.values())).rates)
    if not tau.is_replayed and tree.depth > n_depths:
        yield f"extrapolated: acceptance below depth {n_depths} repeats the last one that is known"


def _error_text(tau: Tau) -> str:
    if tau.error is None:
        return ", of unknown error"
    median, p90 = 100 * tau.error.median, 100 * tau.error.p90
    return f", which miss replayed trees by {median:.1f} % (median) and {p90:.1f} % (90 of 100)"


def _context_caveats(costs: CostModelSummary, context: float, scenario: Scenario) -> Iterator[str]:
    if scenario.context is None and scenario.output_length is None:
        return
    if "context" not in costs.valid:
        yield "costs are taken for the same at every context: none was measured"
        return
    low, high = costs.valid["context"]
    if not low <= context <= high:
        measured = f"{low:.0f} to {high:.0f}"
        yield f"extrapolated: a context of {context:.0f} is outside the {measured} measured"


def _is_measured(costs: CostModelSummary, batch: int) -> bool:
    return "batch" in costs.valid and batch <= costs.valid["batch"][1]


def _batch_caveats(costs: CostModelSummary, batch: int) -> Iterator[str]:
    sizes = next((table.x for table in costs.tables if table.name == "batch_round"), ())
    if batch == 1 or batch in sizes:
        return
    if _is_measured(costs, batch):
        yield f"a batch of {batch} lies between those measured"
    elif sizes:
        yield f"extrapolated: a batch of {batch} is above the {sizes[-1]:.0f} measured"
    else:
        yield "a batch is priced as one wider pass: batches were not measured"


def _size_caveats(
    costs: CostModelSummary, tree: TreeConfig, tau: Tau, batch: int
) -> Iterator[str]:
    n_tokens = batch * (tree.nodes + 1)
    most = costs.valid["nodes"][1] + 1 if "nodes" in costs.valid else 1.0
    if n_tokens > most:
        yield f"extrapolated: a verify pass of {n_tokens} tokens is above the {most:.0f} measured"
    widest = max((t.x[-1] for t in costs.tables if t.name == "level"), default=0.0)
    if tree.depth > 1 and widest and batch * tree.width > widest:
        level = f"a level of {batch * tree.width} nodes"
        yield f"extrapolated: {level} is above the {widest:.0f} fitted"
    longest = max((t.x[-1] for t in costs.tables if t.name == "extend"), default=0.0)
    if longest and batch * tau.value > longest:
        yield f"extrapolated: an extend pass takes more than the {longest:.0f} tokens fitted"
