"""What the fuzz tests share: hostile values, edits of a document, and what every input must give.

An input is used or refused. Used, nothing of it may be silently changed; refused, one sentence
says why. A traceback, a warning or a hang is a fault, and so is a control character that would
reach the terminal.
"""

import copy
import io
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from autotune.commands.cli import main

LIMIT_S = 20
"""No input may keep us longer."""

TEXTS = (
    *("", " ", "0", "1e3", "nan", "yes", "null", "\t", "x" * 5000, "a\nb", "\r", "\x1b[31m"),
    *("../../etc/passwd", "/dev/zero", "~", "~nobody/x", ".", "..", "/", "a\0b", "-", "--json"),
    *("<script>alert(1)</script>", "\"'><img src=x>", "{{ 7 * 7 }}", "{braces}", "%s%n", "$a_$"),
    *("[/red]", "[bold]", "$\\frac{a$", "\u202e", "\u2028", "\ufeff", "\ud800", "\udcff"),
    *("é", "日本", "🙂", "٣", "0x1f", "1_000", "1:30", "!!python/object:os.system", "&a", "*a"),
)
NUMBERS = (
    *(0, 1, -1, 2, 7, 64, 10**6, 2**31, 2**63, 10**17, -(10**17), 10**30, 0.0, -0.0, 0.5, 1.0),
    *(1e-320, 1e-30, 1e-9, 1.0000001, 0.9999999, 1e9, 1e30, 1e308, -1e308),
    *(float("inf"), float("-inf"), float("nan")),
)
NESTED = ([], {}, [[]], [None], {"a": 1}, [1] * 50, ["a", 1, None], {"": ""}, {"a": {"b": []}})

scalars = st.one_of(
    st.sampled_from([None, True, False]),
    st.sampled_from(TEXTS),
    st.sampled_from(NUMBERS),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=12),
)
values = st.one_of(scalars, st.sampled_from(NESTED).map(copy.deepcopy))

Path = tuple[str | int, ...]


def cases(few: int, many: int) -> pytest.MarkDecorator:
    """Make a test of `n_cases` two: a short one, and a long one that is marked soak."""
    return pytest.mark.parametrize(
        "n_cases",
        [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.soak)],
    )


def run(check: Callable[[], None], n_cases: int) -> None:
    """Run a check with so many cases, always the same ones, so that a failure can be repeated."""
    settings(
        max_examples=n_cases,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )(check)()


@contextmanager
def within(seconds: float = LIMIT_S) -> Iterator[None]:
    """Fail where the block takes longer."""

    def stop(*_: object) -> None:
        raise AssertionError(f"still not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Done(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


def command(*arguments: object) -> Done:
    """Run a command line in this process, on streams that encode strictly, as real ones do."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict") for _ in range(2))
    err.reconfigure(errors="backslashreplace")
    with within(), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Done(code, *texts)


def used_or_refused(arguments: Sequence[object]) -> Done:
    """Run a command line and check that it did something or said in a sentence why not."""
    done = command(*arguments)
    assert done.code in (0, 1, 2), done
    if done.code:
        check_message(done.err)
    elif "--json" in arguments and "--help" not in arguments:
        json.loads(done.out, parse_constant=_no_number)
    check_printable(done.out)
    check_printable(done.err)
    return done


def _no_number(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def check_message(message: str) -> None:
    """Check that a refusal says something, and not too much."""
    assert message.strip(), "refused without a word"
    assert "Traceback" not in message, message
    assert len(message) < 8000, f"{len(message)} characters: {message[:300]}"


def check_printable(text: str) -> None:
    """Check that a text does nothing to a terminal but fill it."""
    strange = {c for c in text if not c.isprintable()} - {"\n", "\t"}
    assert not strange, f"control characters {strange} in {text[:300]!r}"


def leaves(document: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield everything that is no mapping and no list, with where it stands."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from leaves(value, (*path, key))
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from leaves(value, (*path, i))
    else:
        yield path, document


def places(document: Any, path: Path = ()) -> Iterator[Path]:
    """Yield where anything stands, the root excepted."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def like(value: Any) -> st.SearchStrategy[Any]:
    """Return values of the same type, most of which a schema takes."""
    if isinstance(value, bool) or value is None:
        return st.booleans()
    if isinstance(value, int):
        near = [value - 1, value + 1, value * 2, value // 2, 0, 1, value * 1000]
        return st.one_of(st.sampled_from(near), st.integers(0, 100))
    if isinstance(value, float):
        near = [value * factor for factor in (0.5, 0.99, 1.01, 2.0, 1e3, 1e6, 1e-6)]
        return st.one_of(st.sampled_from([*near, 0.0, 1.0]), st.floats(1e-14, 1e14))
    if isinstance(value, str):
        return st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))
    if isinstance(value, list):
        return st.sampled_from([value[:1], value[:-1], value * 2, value[::-1], []])
    return st.just({})


@st.composite
def edited(draw: st.DrawFn, document: Any, most: int = 3) -> Any:
    """Draw a copy of a document with one to `most` places changed, removed, doubled or added.

    Half of the changes keep the type, so that many documents are still accepted.
    """
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(list(places(document)) or [()]))
        if not path:
            return document
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        match draw(st.sampled_from(("like", "like", "like", "like", "change", "remove", "add"))):
            case "like":
                holder[path[-1]] = copy.deepcopy(draw(like(holder[path[-1]])))
            case "change":
                holder[path[-1]] = draw(values)
            case "remove":
                del holder[path[-1]]
            case "add" if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[path[-1]]))
            case _ if isinstance(holder, dict):
                holder[draw(st.sampled_from(("x", "", "__class__", "depth", "a b")))] = draw(
                    values
                )
    return document


PIECES = (
    *(
        "\t",
        "&a ",
        "*a",
        "!!python/object/apply:os.system [id]",
        "? ",
        "- ",
        "---",
        "...",
        "{",
        "}",
    ),
    *("%YAML 1.2\n", "\0", "\u2028", "[", "]", "'", '"', "|", ">", "#", ": ", "<<: *a", "0x1f"),
    *("1:30", "no", "1_1", "9" * 400, "1" * 30000 + "x", "_" * 3000, "[" * 200, "\n", "  ", ","),
    *("\r\n", "\ufeff", "\x85", "\\", "\\ud800", "NaN", "-Infinity", "null", "=", "é", "\x1b[2J"),
)


@st.composite
def mangled(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a copy of a file with pieces cut out, doubled, moved or put in."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from((0, 1, 2, 7, 40, 10**6))))
        piece = draw(
            st.one_of(
                st.just(b""),
                st.sampled_from(PIECES).map(lambda text: text.encode("utf-8", "surrogatepass")),
                st.binary(max_size=6),
                st.just(data[start:end] * 2),
            )
        )
        data = data[:start] + piece + data[end:]
    return data
