"""What people read: profiles and comparisons as tables."""

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from profiles import Evidence, ProbedValue, Profile, TreeConfig


def print_profile(profile: Profile, console: Console) -> None:
    """Print what a profile says, in a screenful."""
    device, domain = profile.device, profile.domain
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in (
        ("profile", profile.name),
        ("decision", f"[bold]{profile.decision}[/bold]: {profile.reason}"),
        ("target", f"{profile.target.id} ({profile.target.dtype})"),
        ("draft", draft_label(profile)),
        ("probe", probe_label(profile)),
        ("tree", profile.tree.label()),
        ("device", f"{device.name}, {device.threads} threads, torch {device.torch}"),
        (
            "domain",
            f"{domain.name}: {domain.n_tune} prompts to tune on, {domain.n_holdout} held out, "
            f"{domain.mean_prompt_tokens:.0f} tokens each, {domain.max_new_tokens} new ones",
        ),
        ("sampling", sampling_label(profile)),
        ("batch", "1"),
        ("plain", plain_label(profile)),
        ("machine", noise_label(profile)),
    ):
        if value is not None:
            facts.add_row(key, value)
    console.print(facts, highlight=False)
    if _was_corrected(profile):
        console.print(probe_table(profile), highlight=False)
    if profile.evidence or profile.alternatives:
        console.print(evidence_table(profile), highlight=False)


def evidence_table(profile: Profile) -> Table:
    """Return the holdout's figures: the chosen tree first, then its rivals."""
    table = Table(title=f"Holdout of {profile.domain.name}, plain decoding = 1", box=SIMPLE)
    for column in ("draft", "tree"):
        table.add_column(column, overflow="fold")
    for column in ("tau", "even", "decode", "total", "at least", "worst"):
        table.add_column(column, justify="right")
    if profile.evidence:
        draft = profile.draft.id or profile.draft.kind
        table.add_row(*_cells(draft, profile.tree, profile.evidence), style="bold")
    for rival in profile.alternatives:
        table.add_row(*_cells(rival.draft, rival.tree, rival.evidence))
    return table


def _cells(draft: str, tree: TreeConfig, evidence: Evidence) -> list[str]:
    speedup = evidence.speedup
    return [
        draft,
        tree.label(),
        f"{evidence.tau:.2f}",
        f"{evidence.break_even_tau:.2f}",
        f"{evidence.decode_speedup:.2f}x",
        f"{speedup.ratio:.2f}x",
        f"{speedup.low:.2f}x",
        f"{speedup.worst_prompt:.2f}x",
    ]


def plain_label(profile: Profile) -> str | None:
    """Return the speed of the baseline, in words."""
    judged = [profile.evidence, *(rival.evidence for rival in profile.alternatives)]
    evidence = next((e for e in judged if e is not None), None)
    if evidence is None:
        return None
    text = f"{evidence.plain_tokens_per_s:.1f} tokens/s"
    over_generate = evidence.plain_over_transformers_generate
    if over_generate is not None:
        text += f", {over_generate:.2f}x transformers' generate"
    return text


def draft_label(profile: Profile) -> str:
    """Return the draft in words."""
    draft = profile.draft
    if draft.kind == "lookup":
        return f"lookup (matches of {draft.min_match} to {draft.max_match} tokens)"
    if draft.parameters is None:
        return draft.kind
    return f"{draft.id} ({draft.kind}, {draft.parameters / 1e6:.1f}M parameters)"


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
    spread, drift = 100 * profile.noise.spread, 100 * profile.noise.drift
    return f"a fixed pass varied by {spread:.0f} % and drifted by {drift:+.0f} %"


def sampling_label(profile: Profile) -> str:
    """Return how tokens are drawn, in words."""
    sampling = profile.sampling
    if sampling.is_greedy:
        return "greedy"
    return f"temperature {sampling.temperature}, top-k {sampling.top_k}, top-p {sampling.top_p}"
