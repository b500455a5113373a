"""What-if answers as a pandas DataFrame: `python examples/what_if_frame.py tuned.yaml`."""

import sys

from autotune.what_if import what_if


def main(profile: str) -> None:
    """Print the fastest depth for a batch of one to eight requests, and what to mind."""
    answers = what_if(profile, sweep={"depth": "0:8", "batch": [1, 2, 4, 8]})
    frame = answers.to_frame()
    best = frame.loc[frame.groupby("batch")["decode_speedup"].idxmax()]
    columns = ["batch", "depth", "nodes", "tau", "break_even_tau", "decode_speedup"]
    print(best[columns].round(2).to_string(index=False))
    for note in sorted(set(frame["flags"].explode().dropna())):
        print("-", note)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
