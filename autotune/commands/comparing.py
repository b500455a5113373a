"""`run --compare`: the same prompts decoded plainly and with a profile, interleaved."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from engine.decoder import Generation, SpeculativeDecoder

from ..console import LiteralConsole


def compare_decoders(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], options: dict[str, Any]
) -> dict[str, Any]:
    """Decode every prompt on both sides, in alternating order.

    Each side decodes freely; whether the token ids are equal is part of the result.

    Args:
        decoder: The decoder of a profile.
        prompts: Token ids, at least one prompt.
        options: Options of `SpeculativeDecoder.generate`.

    Returns:
        Tokens per second of both sides, their ratio, tau, and how many prompts gave equal ids.
    """
    plain = SpeculativeDecoder(decoder.loaded, sampling=decoder.sampling)
    results: dict[SpeculativeDecoder, list[Generation]] = {plain: [], decoder: []}
    for side in results:  # warm-up
        side.generate(prompts[0], **options)
    for index, prompt in enumerate(prompts):
        order = (plain, decoder) if index % 2 == 0 else (decoder, plain)
        for side in order:
            results[side].append(side.generate(prompt, **options | {"index": index}))
    plain_speed, speed = (_tokens_per_s(results[side]) for side in (plain, decoder))
    n_rounds = sum(r.stats.n_rounds for r in results[decoder])
    n_round_tokens = sum(r.stats.n_round_tokens for r in results[decoder])
    pairs = zip(results[plain], results[decoder], strict=True)
    return {
        "prompts": len(prompts),
        "tree": decoder.tree.label(),
        "plain_tokens_per_s": plain_speed,
        "tokens_per_s": speed,
        "speedup": speed / plain_speed,
        "tau": n_round_tokens / n_rounds if n_rounds else 1.0,
        "equal_token_ids": sum(a.token_ids == b.token_ids for a, b in pairs),
    }


def print_comparison(figures: dict[str, Any]) -> None:
    """Print the figures of `compare_decoders` as a table."""
    table = Table(title=f"{figures['prompts']} prompts, batch 1, interleaved")
    for column in ("", "tokens/s", "speedup", "tau"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("plain", f"{figures['plain_tokens_per_s']:.1f}", "1.00x", "1.00")
    table.add_row(
        figures["tree"],
        f"{figures['tokens_per_s']:.1f}",
        f"{figures['speedup']:.2f}x",
        f"{figures['tau']:.2f}",
    )
    console = LiteralConsole()
    console.print(table)
    console.print(
        f"Token ids equal on {figures['equal_token_ids']} of {figures['prompts']} prompts."
    )


def _tokens_per_s(results: Sequence[Generation]) -> float:
    return sum(len(r.token_ids) for r in results) / sum(r.stats.total_s for r in results)
