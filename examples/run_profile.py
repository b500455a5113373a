"""Decode with a profile: `python examples/run_profile.py tuned.yaml "Repeat: one two three"`."""

import sys

from engine import SpeculativeDecoder


def main(profile: str, prompt: str) -> None:
    """Stream an answer, then print what the rounds did."""
    decoder = SpeculativeDecoder.from_profile(profile)
    for text in decoder.stream(prompt, max_new_tokens=128):
        print(text, end="", flush=True)
    answer = decoder.generate(prompt, max_new_tokens=128)
    stats = answer.stats
    print(f"\n{stats.n_round_tokens} tokens in {stats.n_rounds} rounds, {answer.finish_reason}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
