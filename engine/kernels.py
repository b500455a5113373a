"""Our own kernels for a CPU, compiled once for the machine they run on; see `kernels.cpp`.

They need a C++ compiler with OpenMP. Where there is none, or with `SPECTUNE_KERNELS=0`, everything
runs without them, slower. Knows matrices and rows of a cache; nothing of models or drafts.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .cache import RowLayout
from .demo import cache_folder

_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILERS = ("g++", "c++", "clang++")
_OPTIONS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-Wno-psabi"),
    *("-shared", "-fPIC"),
)
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_TILED_STEP = 32
"""Matrix tiles multiply weights whose sizes are multiples of this."""

_MOST_ROWS = 16
"""Without matrix tiles, more rows at once are faster in torch."""

HEAD_DIM_STEP = 16
"""Heads attend only where their size is a multiple of this."""

_LINEAR = (*[ctypes.c_void_p] * 2, ctypes.c_float, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 5)
_LAYER = (*[ctypes.c_void_p] * 8, *[ctypes.c_int64] * 2, ctypes.c_void_p, *[ctypes.c_int] * 2)
_NORM = (*[ctypes.c_void_p] * 2, ctypes.c_float, ctypes.c_void_p, *[ctypes.c_int] * 2)

_log = logging.getLogger(__name__)


class Kernels:
    """The kernels of one dtype; made by `kernels_for`.

    All tensors are of that dtype, on the CPU and, unless said otherwise, contiguous. Every sum is
    taken in the same order however many rows there are, so that a row's result is the same to the
    bit alone or among others.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        name = _DTYPES[dtype]
        self._linear = getattr(library, f"linear_{name}")
        self._linear.argtypes, self._linear.restype = _LINEAR, None
        self._layer = getattr(library, f"layer_{name}")
        self._layer.argtypes, self._layer.restype = _LAYER, None
        self._normalise = getattr(library, f"normalise_{name}")
        self._normalise.argtypes, self._normalise.restype = _NORM, None
        self._tiles = dtype == torch.bfloat16 and bool(library.multiplies_tiles())

    def most_rows(self, shape: Sequence[int]) -> int:
        """Return up to how many rows a product with a weight [out, in] is fastest here."""
        tiled = self._tiles and all(size % _TILED_STEP == 0 for size in shape)
        return sys.maxsize if tiled else _MOST_ROWS

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Return f(norm(x) W^T + b) + residual, [n, out or out / 2].

        Args:
            x: [n, in].
            weight: [out, in].
            bias: [out].
            norm: Weights [in] and epsilon of an RMS norm; none if None.
            residual: Of the shape of the result.
            gated: f(y) is silu(first half of y) * second half; else it is y.
        """
        n, n_rows = x.shape[0], weight.shape[0]
        x = x.contiguous()
        y = x.new_empty(n, n_rows // 2 if gated else n_rows)
        scale, eps = norm if norm is not None else (None, 0.0)
        self._linear(
            x.data_ptr(),
            None if scale is None else scale.data_ptr(),
            eps,
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            y.data_ptr(),
            n,
            weight.shape[1],
            n_rows,
            gated,
            torch.get_num_threads(),
        )
        return y

    def normalised(self, x: Tensor, norm: tuple[Tensor, float]) -> Tensor:
        """Return the RMS norm of x [n, size], given its weights [size] and epsilon."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self._normalise(x.data_ptr(), norm[0].data_ptr(), norm[1], y.data_ptr(), *x.shape)
        return y

    def layer(
        self,
        weights: "LayerWeights",
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        texts: "Texts",
        residual: Tensor | None = None,
    ) -> Tensor:
        """Run a decoder layer over n new tokens and write their keys and values: [n, size].

        Args:
            weights: Of the layer.
            x: What goes into it, [n, size in].
            rotary: Cosines and sines, n x head_dim of each, the first half of the sines negated.
            keys: [n_texts, n_kv_heads, length, head_dim], a view of the cache with a row for each
                text, long enough for its new tokens.
            values: As `keys`, with the same strides.
            texts: How the tokens belong to texts.
            residual: What the attention's output is added to, [n, size]; x if None.
        """
        residual = x if residual is None else residual
        y = torch.empty_like(residual)
        self._layer(
            weights.address,
            texts.address,
            x.data_ptr(),
            residual.data_ptr(),
            rotary[0].data_ptr(),
            rotary[1].data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            y.data_ptr(),
            x.shape[0],
            torch.get_num_threads(),
        )
        return y


class Texts:
    """The texts of a pass, whose new tokens lie one after another, as `Kernels.layer` takes them.

    Args:
        layout: New tokens of every text and what its row of the cache holds before them.
        mask: bool [n_texts, n, length], who attends to whom, or [n, length] for a single text; n
            and length are those of the longest row or more. Causal if None.
    """

    def __init__(self, layout: RowLayout, mask: Tensor | None) -> None:
        mask = None if mask is None else mask.contiguous()
        numbers = ctypes.c_int * layout.n_rows
        pointer, shape = (None, (0, 0)) if mask is None else (mask.data_ptr(), mask.shape[-2:])
        counts, starts = numbers(*layout.counts), numbers(*layout.starts)
        self._held = (mask, counts, starts)
        addresses = (ctypes.addressof(counts), ctypes.addressof(starts))
        self._fields = _TextsFields(*addresses, pointer, *shape, layout.n_rows)
        self.address = ctypes.addressof(self._fields)


class _TextsFields(ctypes.Structure):
    """`Texts` of `kernels.cpp`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("counts", "starts", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_rows", "mask_width")),
        ("n", ctypes.c_int),
    )


class LayerWeights:
    """The weights of one decoder layer, as `Kernels.layer` takes them; keeps them alive.

    Args:
        norm: Weights [size in] and epsilon of the RMS norm before attention, if any.
        qkv: [(n_heads + 2 n_kv_heads) * head_dim, size in].
        qkv_bias: Its bias, if any.
        head_norm: Weights [n_heads + n_kv_heads, head_dim] and epsilon of an RMS norm of queries
            and keys, if any.
        out: [size, n_heads * head_dim].
        mlp_norm: As `norm`, before the gated part.
        gate_up: [2 * inner, size], gates first.
        down: [size, inner].
        heads: n_heads, n_kv_heads and head_dim, the last a multiple of 16.
    """

    def __init__(
        self,
        *,
        norm: tuple[Tensor, float] | None,
        qkv: Tensor,
        qkv_bias: Tensor | None,
        head_norm: tuple[Tensor, float] | None,
        out: Tensor,
        mlp_norm: tuple[Tensor, float] | None,
        gate_up: Tensor,
        down: Tensor,
        heads: tuple[int, int, int],
    ) -> None:
        scales, epsilons = zip(
            *(own or (None, 0.0) for own in (norm, head_norm, mlp_norm)), strict=True
        )
        self._held = (scales[0], qkv, qkv_bias, scales[1], out, scales[2], gate_up, down)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self._held]
        sizes = (qkv.shape[1], *heads, *reversed(down.shape))
        self._fields = _LayerFields(*pointers, *epsilons, *sizes)
        self.address = ctypes.addressof(self._fields)


class _LayerFields(ctypes.Structure):
    """`LayerWeights` of `kernels.cpp`."""

    _fields_ = (
        *((f"pointer_{i}", ctypes.c_void_p) for i in range(8)),
        *((f"eps_{i}", ctypes.c_float) for i in range(3)),
        *((f"size_{i}", ctypes.c_int) for i in range(6)),
    )


@functools.cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels for a device and dtype, None where there are none."""
    if device.type != "cpu" or dtype not in _DTYPES:
        return None
    library = _library()
    return None if library is None else Kernels(library, dtype)


def has_kernels() -> bool:
    """Whether there are kernels on this machine."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernels, compiled first if need be; None where that is impossible."""
    compiler = shlex.split(os.environ.get("CXX", ""))
    compiler = compiler or list(filter(None, map(shutil.which, _COMPILERS)))[:1]
    if not compiler or os.environ.get("SPECTUNE_KERNELS") == "0":
        return None
    try:
        return _loaded(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning(
            "the CPU kernels cannot be compiled, so passes take longer (SPECTUNE_KERNELS=0 stops "
            "the attempt): %s",
            error,
        )
        return None


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    """Load the kernels from the user's cache, or from a passing folder if that is closed to us."""
    key = hashlib.sha256(_SOURCE.read_bytes())
    key.update(" ".join([*compiler, *_OPTIONS, _cpu_features()]).encode())
    name = f"kernels-{key.hexdigest()[:16]}.so"
    path = cache_folder() / name
    if path.exists() or _is_open(path.parent):
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory(prefix="spectune-") as passing:
        _compile(compiler, Path(passing) / name)
        return ctypes.CDLL(str(Path(passing) / name))


def _is_open(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _compile(compiler: list[str], path: Path) -> None:
    """Compile beside the place and move there, so that no other process loads a part of it."""
    made = path.with_suffix(f".{os.getpid()}")
    command = [*compiler, *_OPTIONS, str(_SOURCE), "-o", str(made)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            raise OSError(f"{' '.join(compiler)} says: {done.stderr.strip()[-500:]}")
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def _cpu_features() -> str:
    """Return what `-march=native` depends on, as far as it can be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
