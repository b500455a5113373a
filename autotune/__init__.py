"""The tuner: finds the fastest draft tree for a device, a pair and a domain, and proves it.

Names are loaded when first used, so that importing the package stays cheap.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .job import Models
    from .pipeline import tune
    from .settings import Settings

_HOME = {"Models": "job", "Settings": "settings", "tune": "pipeline"}

__all__ = ["Models", "Settings", "tune"]


def _check_siblings() -> None:
    """Refuse to run beside somebody else's packages of the same names."""
    # `engine` has the like: before it has run, no sibling is known to be ours to import it from.
    for name in ("engine", "profiles"):
        spec = find_spec(name)
        origin = Path(spec.origin or "") if spec else Path()
        if origin.parent.parent != Path(__file__).parent.parent:
            raise ImportError(
                f"spectune's `autotune` needs its own `{name}`, but Python finds {origin} first; "
                "rename that file, or run Python with -P"
            )


_check_siblings()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that are there or can be loaded, so that `pydoc` and `help` show them."""
    return sorted({*globals(), *__all__})
