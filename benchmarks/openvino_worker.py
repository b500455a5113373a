"""Decode with OpenVINO GenAI for `peers.py`: one JSON line in, one JSON line out.

Run by the Python of OpenVINO's own environment; uses nothing of spectune.

    python openvino_worker.py MODEL_FOLDER PRECISION THREADS DRAFT_TOKENS MAX_MATCH

`PRECISION` is bf16, f16 or f32; `DRAFT_TOKENS` 0 is plain decoding, otherwise prompt lookup
drafts as many.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


class FirstTokens(openvino_genai.StreamerBase):
    """Notes when the first tokens came, and how many."""

    def __init__(self) -> None:
        super().__init__()
        self.at: float | None = None
        self.n_tokens = 0

    def write(self, token: int | list[int]) -> Any:
        """Take one token or several."""
        if self.at is None:
            self.at = time.perf_counter()
            self.n_tokens = len(token) if isinstance(token, list) else 1
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Take note of the end."""


def main() -> None:
    """Load the pipeline, say so, and answer line by line."""
    folder, precision = sys.argv[1:3]
    threads, n_draft, max_match = map(int, sys.argv[3:6])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print goes to the log
    options: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
    }
    if n_draft:
        options["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(folder, "CPU", **options)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = request["n"], True
        if n_draft:
            config.num_assistant_tokens, config.max_ngram_size = n_draft, max_match
        ids = np.array([request["prompt"]], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        clock = FirstTokens()
        started = time.perf_counter()
        tokens = list(pipeline.generate(inputs, config, clock).tokens[0])
        ended = time.perf_counter()
        first = ended if clock.at is None else clock.at
        answer = {
            "total_s": ended - started,
            "decode_s": ended - first,
            "tokens": [int(token) for token in tokens],
            "n_first": clock.n_tokens,
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
