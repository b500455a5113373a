"""Parts of a profile in words, each a line. Knows nothing of terminals or pages."""

from profiles import BatchRange, Device, GuardSettings, Profile, is_sealed

from .findings import judged_evidence, tree_in_words


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
        ("batch size", "1; larger ones are below" if profile.batch_schedule else "1"),
        ("data", data),
        ("tree", tree_in_words(profile.tree)),
        *((f"batch {each.label()}", batch_label(each)) for each in profile.batch_schedule),
    ]


def batch_label(each: BatchRange) -> str:
    """Return what a range of batches runs and why, in words."""
    what = "plain" if each.tree.is_plain else tree_in_words(each.tree)
    return f"{what}. {each.reason}"


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
        ("job", job_label(profile)),
        ("re-check", recheck_label(profile)),
        ("file", None if is_sealed(profile) else "edited since it was written: not trusted"),
    )
    return [(key, value) for key, value in rows if value is not None]


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
    in_use = [row for row in profile.probe if row.verdict in ("kept", "chosen")]
    used = (in_use or profile.probe)[-1]
    right = f"right on {100 * used.agreement:.1f} % of {used.n_tokens} tokens"
    if was_corrected(profile):
        return f"{right}, read otherwise than its config says"
    return f"{right}, read as its config says"


def was_corrected(profile: Profile) -> bool:
    """Tell whether an EAGLE-3 head is read otherwise than its config says."""
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


def job_label(profile: Profile) -> str | None:
    """Return where the time of the tuning job went, in words."""
    job = profile.job
    if job is None:
        return None
    steps = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in job.seconds.items())
    text = f"took {job.took_s / 60:.1f} min, {job.planned_s / 60:.1f} were planned: {steps}"
    return text if job.cut is None else f"{text}; {job.cut}"


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
