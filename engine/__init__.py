"""The decoder: targets, drafts, rounds that draft and verify, and their timing.

Names are loaded when first used, so that importing the package stays cheap.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoder import Generation, SpeculativeDecoder
    from .pair import load_draft, load_target

_HOME = {
    "Generation": "decoder",
    "SpeculativeDecoder": "decoder",
    "load_draft": "pair",
    "load_target": "pair",
}

__all__ = ["Generation", "SpeculativeDecoder", "load_draft", "load_target"]


def _check_sibling(name: str) -> None:
    """Refuse to run beside somebody else's package of the same name."""
    # `autotune` has the like: before it has run, no sibling is known to be ours to import it from.
    spec = find_spec(name)
    origin = Path(spec.origin or "") if spec else Path()
    if origin.parent.parent != Path(__file__).parent.parent:
        raise ImportError(
            f"spectune's `engine` needs its own `{name}`, but Python finds {origin} first; rename "
            "that file, or run Python with -P"
        )


_check_sibling("profiles")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that are there or can be loaded, so that `pydoc` and `help` show them."""
    return sorted({*globals(), *__all__})
