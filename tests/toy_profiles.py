"""A complete profile in the form people see, and small edits of it for tests."""

from pathlib import Path
from typing import Any

import yaml

import profiles

SHA_A, SHA_B, SHA_C = "a" * 64, "0b" * 32, "1" * 64

YAML = f"""\
schema_version: 1
name: toy-code-epyc
created: 2026-11-30T09:00:00Z
spectune: 0.1.0
target: {{id: toy/target, revision: main, sha256: {SHA_A}, dtype: bfloat16, parameters: 1000}}
draft: {{kind: eagle3, id: toy/head, sha256: {SHA_B}, parameters: 100}}
device: {{kind: cpu, name: AMD EPYC, count: 2, memory_gib: 23.5, threads: 2, kernels: own,
  torch: 2.13.0, transformers: 5.24.0}}
domain: {{name: code, sample_sha256: '{SHA_C}', n_tune: 32, n_holdout: 32,
  mean_prompt_tokens: 141.5, max_new_tokens: 128}}
sampling: {{temperature: 0.7, top_k: 20, top_p: 0.9}}
decision: speculate
reason: The lower bound of the speedup on 32 unseen prompts is 1.7.
tree: {{depth: 4, width: 3, top_k: 3, nodes: 10}}
adaptive: false
evidence:
  baseline: plain decoding on this engine, same dtype, same threads
  speedup: {{ratio: 1.79, low: 1.7, confidence: 0.95, worst_prompt: 1.12, prompts: 32}}
  decode_speedup: 1.87
  tau: 2.9
  break_even_tau: 1.55
  plain_tokens_per_s: 61.0
  plain_over_transformers_generate: 1.7
alternatives:
- draft: lookup
  tree: {{depth: 2, width: 1, top_k: 1, nodes: 2}}
  evidence:
    baseline: plain decoding on this engine, same dtype, same threads
    speedup: {{ratio: 0.98, low: 0.9, confidence: 0.95, worst_prompt: 0.8, prompts: 32}}
    decode_speedup: 1.0
    tau: 1.5
    break_even_tau: 1.5
    plain_tokens_per_s: 61.0
probe:
- {{what: feature_layers, value: [2, 4, 5], agreement: 0.61, n_tokens: 2000, verdict: kept}}
- {{what: feature_layers, value: [3, 5, 6], agreement: 0.2, n_tokens: 2000, p_value: 0.0,
  verdict: rejected}}
- {{what: rope_theta, value: 10000.0, agreement: 0.61, n_tokens: 2000, verdict: kept}}
guard: {{allowance_tokens: 8.0, tax: 0.006, min_new_tokens: 3}}
calibration:
  limits: {{depth: 2, width: 2, top_k: 2, nodes: 6}}
  tokens_per_pass: 1.6
  depths:
  - {{score: [-4.0, -1.0, 0.0], probability: [0.01, 0.3, 0.9], hit: 0.7}}
  - {{score: [-5.0, 0.0], probability: [0.0, 0.8], hit: 0.6}}
noise: {{spread: 0.01, drift: -0.02}}
cost_model:
  reference_ms: 16.4
  tables:
  - name: verify
    at: {{context: 512}}
    x: [1, 8, 16]
    relative: [1.0, 1.2, 1.9]
  heldout_error: {{median: 0.02, p90: 0.05}}
  valid: {{nodes: [1, 64], context: [32, 1024]}}
search:
  predicted: 2400
  measured: 9
  sampler: TPE
  seed: 0
  storage: study.db
  runners_up:
  - draft: lookup
    tree: {{depth: 3, width: 3, top_k: 3, nodes: 8}}
    speedup: 1.75
measurements: toy-code-epyc.measurements.json.gz
"""

PLAIN_CHANGES: dict[str, Any] = {"decision": "plain", "tree": {"depth": 0}, "evidence": None}


def data(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the profile as plain data, with `{"dotted.key": value}` changes made."""
    result: dict[str, Any] = yaml.load(YAML, yaml.SafeLoader)
    result["created"] = "2026-11-30T09:00:00Z"
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = result
        for name in parents:
            place = place[name]
        place[last] = value
    return result


def profile(changes: dict[str, Any] | None = None) -> profiles.Profile:
    """Build the profile with changes made, as if it had been written so."""
    return profiles.sealed(profiles.validated(profiles.Profile, data(changes), "toy"))


def write(folder: Path, text: str = YAML) -> Path:
    """Write the YAML text into a folder."""
    path = folder / "toy.yaml"
    path.write_text(text, encoding="utf-8")
    return path
