"""Where texts from files and models meet a terminal: they are shown, never obeyed."""

import json
import sys
import unicodedata
from typing import Any

from rich.console import Console
from rich.text import Text


class LiteralConsole(Console):
    """A console without markup, and no control character reaches the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as it is, with what cannot be printed replaced."""
        return super().render_str(printable(text), **options)


def printable(text: str) -> str:
    """Return a text with every character that cannot be printed replaced, line breaks excepted."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def shown(answer: str) -> str:
    """Return an answer as stdout may have it: whole, but on a terminal it is never obeyed.

    There control characters are replaced, line breaks and tabs excepted.
    """
    if not sys.stdout.isatty():
        return answer
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in answer
    )


def print_json(document: Any) -> None:
    """Print a document on one line; what cannot be printed is escaped, as JSON lets one."""
    text = json.dumps(document, ensure_ascii=False)
    print("".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text))


def tell(text: str) -> None:
    """Print a message on stderr."""
    sys.stderr.write(f"{printable(text)}\n")


def print_whatever_comes() -> None:
    """Let stdout escape what its encoding cannot write, as stderr does, instead of failing."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
