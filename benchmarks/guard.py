"""Is speculation never below plain decoding, whatever the traffic? The promise, on the clock.

A profile tuned on `code` serves streams of other domains, of random tokens, and a mix that
switches domain every few requests: with its guard, and with the guard off and a deep tree. Forced
text, request by request next to plain decoding. On the mix, adaptive drafting stands beside the
best fixed tree. Every finished stream is kept in `--folder` and not run twice.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from common import DOMAINS, conditions, parser, publish, say, table

from autotune import Models, Settings, tune
from autotune.calibrating import calibrate
from autotune.progress import OnTerminal
from autotune.sample import read_prompts, render
from engine.adaptive_replay import AdaptiveReplay
from engine.decoder import SpeculativeDecoder
from engine.forced import run_forced
from engine.pair import LoadedTarget, draft_of, load_target
from engine.trace import Trace, record
from profiles import GREEDY, Calibration, Profile, Serving, TreeConfig, load
from profiles.prices import Prices

NAMES = ("code", "chat", "math", "rewrite", "atypical")
DEEP = TreeConfig.from_eagle(total_token=60, depth=7, top_k=10)
"""The deep tree people start from: what speculation loses where nothing watches over it."""

SWITCH_EVERY = 3
"""Requests after which the mix changes its domain."""

PROMISED, ALLOWED = 0.99, 0.98
"""What the interval must reach, and what the ratio itself must."""

Floats = npt.NDArray[np.float64]
Decoders = Callable[[], dict[str, SpeculativeDecoder]]


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        n_tokens, n_new: Tokens of a stream, and of a request.
        n_deep: Requests of a stream that are decoded with the deep tree, too.
        n_again: Times that the worst request is decoded again.
    """

    n_tokens: int
    n_new: int
    n_deep: int
    n_again: int


FULL, QUICK = Size(2000, 128, 6, 9), Size(96, 24, 1, 2)
TINY_JOB = Settings.quick(
    n_tune=4, n_holdout=8, n_replay=4, n_race=2, max_new_tokens=16, n_trials=3, n_probe_rounds=3
)


@dataclass
class Stream:
    """Seconds of one stream, request by request and by side, and what the guard did.

    Attributes:
        n_tokens: Tokens of every request.
        seconds: Seconds of every request, by side.
        guard: The guard's statistics.
    """

    n_tokens: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    guard: dict[str, Any] = field(default_factory=dict)

    def ratio(self, side: str, over: str = "plain") -> tuple[float, float, float]:
        """Return how much faster a side is, with the 95 % interval of a bootstrap by request."""
        ours = np.array(self.seconds[side])
        others = np.array(self.seconds[over])[: len(ours)]
        rows = np.random.default_rng(0).integers(len(ours), size=(2000, len(ours)))
        low, high = np.quantile(others[rows].sum(1) / ours[rows].sum(1), [0.025, 0.975])
        return float(others.sum() / ours.sum()), float(low), float(high)

    def lost(self) -> Floats:
        """Return what every request lost, in plain tokens' time."""
        plain, ours = np.array(self.seconds["plain"]), np.array(self.seconds["guarded"])
        lost: Floats = (ours - plain) / (plain / np.array(self.n_tokens))
        return lost


def main() -> None:
    """Measure the streams that are not there yet, and print."""
    options = parser(__doc__)
    options.add_argument("--profile", type=Path, help="default: tuned on code, in the folder")
    options.add_argument("--target", default="demo")
    options.add_argument("--draft", action="append", help="default: lookup and demo")
    options.add_argument("--folder", type=Path, help="default: out/guard")
    arguments = options.parse_args()
    name = "guard-quick" if arguments.quick else "guard"
    folder = arguments.folder or Path("out") / name
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    profile = load(arguments.profile or tuned(arguments, folder / "code.yaml"))
    loaded = load_target(profile.target.id, dtype=profile.target.dtype or "auto")
    size = QUICK if arguments.quick else FULL
    streams, again = measure(loaded, profile, size, arguments.seed, folder)
    show(streams, again, profile, loaded, size, as_json=arguments.json)


def tuned(arguments: argparse.Namespace, path: Path) -> Path:
    """Return the profile tuned on code, made if it is not there."""
    if not path.exists():
        models = Models(arguments.target, arguments.draft or ["lookup", "demo"])
        settings = TINY_JOB if arguments.quick else Settings()
        tune(models, DOMAINS / "code.jsonl", path, settings=settings, progress=OnTerminal())
    return path


def measure(
    loaded: LoadedTarget, profile: Profile, size: Size, seed: int, folder: Path
) -> tuple[dict[str, Stream], list[float]]:
    """Return every stream, and what the worst request of all lost when it was decoded again.

    Texts are recorded when a stream first needs them.
    """
    texts: dict[str, list[Trace]] = {}

    def text(name: str) -> list[Trace]:
        if name not in texts:
            say(f"Recording {name}.")
            texts[name] = recorded(loaded, name, size, seed)
        return texts[name]

    draft = draft_of(profile.draft, loaded).draft
    tree, serving = served(profile)
    fixed = Serving(serving.cost_model, serving.guard)

    def decoder(tree: TreeConfig, serving: Serving | None) -> SpeculativeDecoder:
        return SpeculativeDecoder(loaded, draft, tree, profile.sampling, serving)

    def sides() -> dict[str, SpeculativeDecoder]:
        plain = SpeculativeDecoder(loaded, sampling=profile.sampling)
        return {"plain": plain, "guarded": decoder(tree, serving), "deep": decoder(DEEP, None)}

    def sides_of_mix() -> dict[str, SpeculativeDecoder]:
        calibration = serving.calibration or calibrated(loaded, draft, tree, fixed, text("code"))
        adaptive = Serving(fixed.cost_model, fixed.guard, calibration)
        trees = dict.fromkeys([tree, *(a.tree for a in profile.alternatives)])
        others = {f"fixed {one.label()}": decoder(one, fixed) for one in trees}
        return sides() | {"adaptive": decoder(tree, adaptive)} | others

    requests: dict[str, tuple[Callable[[], list[Trace]], Decoders]] = {
        **{name: (lambda name=name: text(name), sides) for name in (*NAMES, "random")},
        "mix": (lambda: mixed([text(name) for name in (*NAMES, "random")], size), sides_of_mix),
    }
    streams = {}
    for name, (traces, decoders) in requests.items():
        path = folder / f"{name}.json"
        key = {"profile": profile.name, "created": str(profile.created), "seed": seed}
        key |= {"size": asdict(replace(size, n_again=0)), "threads": torch.get_num_threads()}
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("key") != key:
            said = traces()
            say(f"Decoding {name}: {len(said)} requests.")
            kept = {"key": key, "stream": asdict(decode_stream(decoders(), said, size))}
            path.write_text(json.dumps(kept))
        streams[name] = Stream(**kept["stream"])
    worst = max(streams, key=lambda name: streams[name].lost().max())
    trace = requests[worst][0]()[streams[worst].lost().argmax()]
    say(f"Decoding the worst request, of {worst}, {size.n_again} times again.")
    plain = SpeculativeDecoder(loaded, sampling=profile.sampling)
    again = lost_again(plain, lambda: decoder(tree, serving), trace, size.n_again)
    return streams, again


def served(profile: Profile) -> tuple[TreeConfig, Serving]:
    """Return the tree and how it is served; of a plain profile, those of its best rival."""
    if profile.decision == "speculate":
        return profile.tree, profile.serving
    tree = profile.alternatives[0].tree if profile.alternatives else TreeConfig.chain(2)
    speculating = profile.model_copy(update={"decision": "speculate"})
    return tree, speculating.serving


def recorded(loaded: LoadedTarget, name: str, size: Size, seed: int) -> list[Trace]:
    """Return the target's own greedy answers, or random tokens, as many as a stream needs."""
    traces: list[Trace] = []
    rng = random.Random(seed)
    prompts = read_prompts(DOMAINS / f"{'chat' if name == 'random' else name}.jsonl").records
    for i, prompt in enumerate(prompts):
        if sum(len(trace.generated) for trace in traces) >= size.n_tokens:
            break
        ids = render(prompt, [], loaded.tokenizer)
        if name == "random":
            said = [rng.randrange(loaded.target.vocab_size) for _ in range(size.n_new)]
            ids = [rng.randrange(loaded.target.vocab_size) for _ in ids]
            traces.append(Trace(str(i), ids, said))
            continue
        traces.append(
            record(
                loaded.target,
                prompt.id,
                ids,
                max_new_tokens=size.n_new,
                eos_ids=loaded.eos_ids,
                sampling=GREEDY,
                seed=seed,
                index=i,
            )
        )
    return traces


def mixed(texts: Sequence[Sequence[Trace]], size: Size) -> list[Trace]:
    """Return a stream that changes its domain every few requests."""
    mix: list[Trace] = []
    for start in range(0, max(map(len, texts)), SWITCH_EVERY):
        for domain in texts:
            mix += domain[start : start + SWITCH_EVERY]
            if sum(len(trace.generated) for trace in mix) >= size.n_tokens:
                return mix
    return mix


def calibrated(
    loaded: LoadedTarget, draft: Any, tree: TreeConfig, fixed: Serving, texts: Sequence[Trace]
) -> Calibration:
    """Return a calibration where the profile has none, to see what adaptive would have done."""
    shape = {"width": max(tree.width, 2), "top_k": max(tree.top_k, 2)}
    depth = max(tree.depth, 6)
    limits = TreeConfig(depth=depth, nodes=depth, **shape)
    limits = TreeConfig(depth=depth, nodes=min(64, limits.pool), **shape)
    replay = AdaptiveReplay(loaded.target, draft, texts, limits)
    on_cpu = loaded.target.device.type == "cpu"
    return calibrate(replay, limits, Prices(fixed.cost_model), texts, on_cpu)[0]


def decode_stream(
    decoders: dict[str, SpeculativeDecoder], traces: Sequence[Trace], size: Size
) -> Stream:
    """Decode a stream on all sides, request by request, the order turned round every time."""
    stream = Stream(seconds={side: [] for side in decoders})
    warm_up = SpeculativeDecoder(decoders["plain"].loaded)
    run_forced(warm_up, traces[0])
    for i, trace in enumerate(traces):
        stream.n_tokens.append(len(trace.generated))
        sides = [side for side in decoders if side != "deep" or i < size.n_deep]
        for side in sides if i % 2 == 0 else sides[::-1]:
            decoder = decoders[side]
            stream.seconds[side].append(run_forced(decoder, trace).total_s)
            decoder.remember([trace])
    stats = decoders["guarded"].stats
    assert stats is not None  # noqa: S101 - every stream is guarded
    stream.guard = asdict(stats)
    return stream


def lost_again(
    plain: SpeculativeDecoder,
    guarded: Callable[[], SpeculativeDecoder],
    trace: Trace,
    n_times: int,
) -> list[float]:
    """Return what a request loses, in plain tokens' time, decoded again and again.

    The worst of many requests is the one on which the machine paused, unless it is seen again.
    Every time with new guards, which know nothing of the traffic: the harshest case. Plain
    decoding runs before and after (A B B A), so that a drift of the machine cancels out.
    """
    lost = []
    for _ in range(n_times):
        sides = [plain, guarded(), guarded(), plain]
        before, first, second, after = [run_forced(side, trace).total_s for side in sides]
        lost.append(((first + second) / (before + after) - 1) * len(trace.generated))
    return lost


def show(
    streams: dict[str, Stream],
    again: list[float],
    profile: Profile,
    loaded: LoadedTarget,
    size: Size,
    *,
    as_json: bool,
) -> None:
    """Print the figures."""
    guarded = {name: stream.ratio("guarded") for name, stream in streams.items()}
    deep = {name: stream.ratio("deep") for name, stream in streams.items()}
    mix = streams["mix"]
    best = min(
        (s for s in mix.seconds if s.startswith("fixed")), key=lambda s: sum(mix.seconds[s])
    )
    over_fixed = mix.ratio("adaptive", best)
    worst = min(guarded, key=lambda name: guarded[name][0])
    guarded_s = sum(sum(stream.seconds["guarded"]) for stream in streams.values())
    figures = {
        "worst_speedup": guarded[worst][0],
        "worst_speedup_high": min(high for _, _, high in guarded.values()),
        "worst_speedup_guard_off": min(ratio for ratio, _, _ in deep.values()),
        "worst_speedup_guard_off_high": min(high for _, _, high in deep.values()),
        "adaptive_over_best_fixed": over_fixed[0],
        "adaptive_over_best_fixed_low": over_fixed[1],
        "adaptive_over_best_fixed_high": over_fixed[2],
        "guard_overhead": sum(s.guard["guard_s"] for s in streams.values()) / guarded_s,
        "worst_request_tokens": float(np.median(again)),
        "worst_request_low": min(again),
        "worst_request_high": max(again),
        "kept": all(r >= ALLOWED and high >= PROMISED for r, _, high in guarded.values()),
    }
    rows = []
    for name, stream in streams.items():
        stats = stream.guard
        rows.append(
            [name, len(stream.n_tokens), sum(stream.n_tokens), interval(guarded[name])]
            + [interval(deep[name]), stream.lost().max()]
            + [stats["n_leaves"], stats["n_probes"], stats["n_returns"]]
            + [stats["n_plain_rounds"] / max(1, stats["n_rounds"])]
        )
    columns = ["stream", "requests", "tokens", "with the guard", f"off, {DEEP.label()}"]
    columns += ["worst request lost", "leaves", "probes", "returns", "plain rounds"]
    how = "adaptive" if profile.adaptive else "fixed"
    title = f"Speedup over plain, 95 % interval: {profile.name}, {profile.tree.label()}, {how}"
    sides = [[side, *mix.ratio(side)] for side in mix.seconds if side not in ("plain", "deep")]
    tables = [
        table(title, columns, rows),
        table("The mix, by side", ["side", "speedup", "low", "high"], sides),
    ]
    facts = conditions(
        loaded.target.device,
        dtype=loaded.ref.dtype,
        target=loaded.ref.id,
        draft=profile.draft.id or profile.draft.kind,
        tree=profile.tree.label(),
        adaptive=profile.adaptive,
        best_fixed=best,
        worst_stream=worst,
        tokens_per_stream=size.n_tokens,
        tokens_per_request=size.n_new,
        streams={name: list(ratio) for name, ratio in guarded.items()},
        streams_guard_off={name: list(ratio) for name, ratio in deep.items()},
    )
    publish(figures, facts, tables, as_json)


def interval(ratio: tuple[float, float, float]) -> str:
    """Write a ratio with its interval."""
    return f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"


if __name__ == "__main__":
    main()
