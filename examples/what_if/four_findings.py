"""The article's T4 in four questions: `python examples/what_if/four_findings.py`."""

from pathlib import Path

from autotune.what_if import what_if
from autotune.what_if.basis import basis_of_numbers

HERE = Path(__file__).parent
SMALL = basis_of_numbers(HERE / "t4_qwen3_1.7b.yaml")
LARGE = basis_of_numbers(HERE / "t4_qwen3_4b.yaml")


def main() -> None:
    """Print the four findings as tables."""
    print("1. Verifying is nearly free up to a knee")
    wide = {"width": 100, "top_k": 10, "acceptance": "code"}
    frame = what_if(SMALL, wide, sweep={"nodes": [10, 59, 191, 255, 383, 511]}).to_frame()
    print(frame[["nodes", "verify_ms", "plain_ms"]].round(1).to_string(index=False))

    print("2. Depth is a trap where little is accepted")
    frame = what_if(SMALL, {"acceptance": "atypical"}, sweep={"depth": range(11)}).to_frame()
    print(
        frame[["depth", "tau", "break_even_tau", "decode_speedup"]].round(2).to_string(index=False)
    )

    print("3. A larger target with a larger head brings no leap")
    for basis in (SMALL, LARGE):
        row = what_if(basis, sweep={"acceptance": ["code", "chat"]}).to_frame()
        print(basis.name, *row["decode_speedup"].round(2))

    print("4. What is gained falls with the batch")
    frame = what_if(SMALL, {"acceptance": "code"}, sweep={"batch": [1, 2, 4, 8, 16]}).to_frame()
    print(frame[["batch", "tokens_per_s", "decode_speedup"]].round(2).to_string(index=False))


if __name__ == "__main__":
    main()
