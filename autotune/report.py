"""What people read in a terminal: a profile and its measurements as tables."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiles import (
    Device,
    Evidence,
    GuardSettings,
    Measurements,
    ProbedValue,
    Profile,
    is_sealed,
)

from .figure_tables import acceptance_table, round_table, trials_table
from .findings import (
    certainty,
    commands,
    draft_name,
    headline,
    judged_evidence,
    subject_of,
    tree_in_words,
)


class LiteralConsole(Console):
    """A console for texts from files: no markup, and no control character reaches the terminal."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as it is, with what cannot be printed replaced."""
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
        return super().render_str(shown, **options)


def print_profile(
    profile: Profile, measurements: Measurements | None, path: Path, console: Console
) -> None:
    """Print what a profile and its measurements say, what to do first.

    Args:
        profile: The profile.
        measurements: The figures behind it, if they are there.
        path: Where the profile lies, for the commands that are shown.
        console: Where to print; nothing is taken as markup.
    """
    console.print(Text(headline(profile), style="bold"))
    console.print(certainty(profile))
    console.print()
    console.print(_listed(commands(path)))
    console.print()
    console.print(_listed([*checklist(profile), *circumstances(profile)]))
    if _was_corrected(profile):
        console.print(probe_table(profile))
    if profile.evidence or profile.alternatives:
        console.print(evidence_table(profile))
    subject = subject_of(profile, measurements)
    for table in (
        round_table(profile, subject),
        acceptance_table(measurements, subject),
        trials_table(measurements),
    ):
        if table is not None:
            console.print(table)


def checklist(profile: Profile) -> list[tuple[str, str]]:
    """Return baseline, batch size, data and tree: without these a speedup says nothing."""
    domain = profile.domain
    data = (
        f"{domain.name}: {domain.n_tune} prompts to tune on, {domain.n_holdout} held out, "
        f"{domain.mean_prompt_tokens:.0f} tokens each, {domain.max_new_tokens} new ones"
        + (f", template: {domain.template}" if domain.template else "")
    )
    return [
        ("baseline", plain_label(profile)),
        ("batch size", "1"),
        ("data", data),
        ("tree", tree_in_words(profile.tree)),
    ]


def circumstances(profile: Profile) -> list[tuple[str, str]]:
    """Return what else the result depends on, and how well it is known."""
    rows = (
        ("target", f"{profile.target.id} ({profile.target.dtype})"),
        ("draft", draft_label(profile)),
        ("serving", serving_label(profile)),
        ("probe", probe_label(profile)),
        ("sampling", sampling_label(profile)),
        ("device", device_label(profile.device)),
        ("machine", noise_label(profile)),
        ("cost model", error_label(profile)),
        ("search", search_label(profile)),
        ("re-check", recheck_label(profile)),
        ("file", None if is_sealed(profile) else "edited since it was written: not trusted"),
    )
    return [(key, value) for key, value in rows if value is not None]


def _listed(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, value)
    return table


def evidence_table(profile: Profile) -> Table:
    """Return the holdout's figures: the chosen tree first, then its rivals."""
    table = Table(title=f"Holdout of {profile.domain.name}, plain decoding = 1", box=SIMPLE)
    for column in ("draft", "tree"):
        table.add_column(column, overflow="fold")
    for column in ("tau", "even", "decode", "total", "at least", "worst"):
        table.add_column(column, justify="right")
    if profile.evidence:
        cells = draft_name(profile), profile.tree.label(), *evidence_cells(profile.evidence)
        table.add_row(*cells, style="bold")
    for rival in profile.alternatives:
        table.add_row(rival.draft, rival.tree.label(), *evidence_cells(rival.evidence))
    return table


def evidence_cells(evidence: Evidence) -> list[str]:
    """Return tau, break-even tau, and the speedups: decoding, end to end, at least, worst."""
    speedup = evidence.speedup
    return [
        f"{evidence.tau:.2f}",
        f"{evidence.break_even_tau:.2f}",
        f"{evidence.decode_speedup:.2f}x",
        f"{speedup.ratio:.2f}x",
        f"{speedup.low:.2f}x",
        f"{speedup.worst_prompt:.2f}x",
    ]


def plain_label(profile: Profile) -> str:
    """Return the speed of the baseline, in words."""
    evidence = judged_evidence(profile)
    if evidence is None:
        return "plain decoding on this engine; no tree was judged against it on the holdout"
    text = f"{evidence.baseline}; {evidence.plain_tokens_per_s:.1f} tokens/s"
    over_generate = evidence.plain_over_transformers_generate
    if over_generate is not None:
        text += f", {over_generate:.2f}x transformers' generate"
    return text


def draft_label(profile: Profile) -> str:
    """Return the draft in words."""
    draft = profile.draft
    matches = f"matches of {draft.min_match} to {draft.max_match} tokens"
    if draft.history:
        matches += f", also in {draft.history} tokens of earlier answers"
    if draft.kind in ("lookup", "suffix"):
        return f"{draft.kind} ({matches})"
    if draft.parameters is None:
        return draft.kind
    label = f"{draft.id} ({draft.kind}, {draft.parameters / 1e6:.1f}M parameters)"
    if draft.kind != "hybrid":
        return label
    free = f"{matches} promise at least {draft.match_tau:g} tokens"
    return f"{label}; up to {draft.match_nodes} nodes without it where {free}"


def serving_label(profile: Profile) -> str | None:
    """Return how the tree is served and what it may lose, in words."""
    if profile.evidence is None:
        return None
    guard = profile.guard or GuardSettings()
    loss = f"a request may lose the time of {guard.allowance_tokens:g} plain tokens, not more"
    return f"{'tree fitted to every round' if profile.adaptive else 'fixed tree'}; {loss}"


def probe_label(profile: Profile) -> str | None:
    """Return what was found about the conventions of an EAGLE-3 head, in words."""
    if not profile.probe:
        return None
    used = next(v for v in reversed(profile.probe) if v.verdict in ("kept", "chosen"))
    right = f"right on {100 * used.agreement:.1f} % of {used.n_tokens} tokens"
    if _was_corrected(profile):
        return f"{right}, read otherwise than its config says"
    return f"{right}, read as its config says"


def probe_table(profile: Profile) -> Table:
    """Return every reading of the head's conventions that was tried."""
    table = Table(title="Readings of the head's config", box=SIMPLE)
    for column in ("what", "value"):
        table.add_column(column)
    for column in ("agreement", "tokens", "p"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row in profile.probe:
        table.add_row(*_probe_cells(row), style="bold" if row.verdict == "chosen" else None)
    return table


def _probe_cells(row: ProbedValue) -> list[str]:
    return [
        row.what.replace("_", " "),
        f"{row.value:g}" if isinstance(row.value, float) else str(list(row.value)),
        f"{100 * row.agreement:.1f} %",
        str(row.n_tokens),
        "" if row.p_value is None else f"{row.p_value:.2g}",
        row.verdict,
    ]


def _was_corrected(profile: Profile) -> bool:
    return any(row.verdict == "chosen" for row in profile.probe)


def noise_label(profile: Profile) -> str | None:
    """Return how steady the machine was, in words."""
    if profile.noise is None:
        return None
    noise = profile.noise
    told = [
        f"a fixed pass varied by {100 * noise.spread:.0f} %, drifted by {100 * noise.drift:+.0f} %"
    ]
    if noise.slowest is not None:
        told.append(f"took up to {noise.slowest:.2f} times as long during the holdout")
    if noise.remeasured or noise.left_out:
        told.append(
            f"{noise.remeasured} prompts were measured again for it, {noise.left_out} left out"
        )
    return "; ".join(told)


def sampling_label(profile: Profile) -> str:
    """Return how tokens are drawn, in words."""
    sampling = profile.sampling
    if sampling.is_greedy:
        return "greedy"
    return f"temperature {sampling.temperature}, top-k {sampling.top_k}, top-p {sampling.top_p}"


def device_label(device: Device) -> str:
    """Return the device in words."""
    parts = [device.name or device.kind or "unknown"]
    if device.kind == "cpu" and device.threads is not None:
        parts.append(f"{device.threads} thread{'s' if device.threads > 1 else ''}")
    if device.memory_gib is not None:
        parts.append(f"{device.memory_gib:.3g} GiB")
    return ", ".join([*parts, f"torch {device.torch}"])


def error_label(profile: Profile) -> str | None:
    """Return how far the cost model is off on trees left out of its fit, in words."""
    if profile.cost_model is None or profile.cost_model.heldout_error is None:
        return None
    error = profile.cost_model.heldout_error
    return (
        f"off by {100 * error.median:.1f} % (median) and {100 * error.p90:.1f} % (90th "
        "percentile) on trees left out of its fit"
    )


def search_label(profile: Profile) -> str | None:
    """Return how the tree was found, in words."""
    search = profile.search
    if search is None:
        return None
    return f"{search.predicted} trees predicted, {search.measured} measured ({search.sampler})"


def recheck_label(profile: Profile) -> str | None:
    """Return what the last later look at the profile found, in words."""
    if not profile.rechecks:
        return None
    last = profile.rechecks[-1]
    bounds = f"at least {last.low:.2f}x"
    if last.high is not None:
        bounds += f", at most {last.high:.2f}x"
    return (
        f"{last.verdict} on {last.date}: {bounds}, each at {100 * last.confidence:.3g} % "
        f"confidence, on {last.prompts} prompts"
    )
