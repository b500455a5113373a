"""Requests to a server on this machine, and streamed completions as tokens with their times."""

import http.client
import json
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from engine.timing import TimedText

from .process import ServerError

HEALTH_S = 5.0
ANSWER_S = 300.0


class Client:
    """Talks to one server, a connection for each request, so that it can be put to sleep."""

    def __init__(self, port: int) -> None:
        self._port = port

    def is_healthy(self) -> bool:
        """Tell whether it says on `/health` that it can answer."""
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=HEALTH_S)
            with closing(connection):
                connection.request("GET", "/health")
                with connection.getresponse() as response:
                    return response.status == 200
        return False

    def get(self, path: str) -> str:
        """Return a page.

        Raises:
            ServerError: There is no answer, or another one than 200.
        """
        return b"".join(self._lines("GET", path)).decode(errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """Yield the lines of the answer to a JSON body as they come; raises as `get`."""
        return self._lines("POST", path, json.dumps(body))

    def _lines(self, method: str, path: str, body: str | None = None) -> Iterator[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        headers = {"Content-Type": "application/json"}
        try:
            with closing(connection):
                connection.request(method, path, body, headers)
                with connection.getresponse() as response:
                    if response.status != 200:
                        raise ServerError(f"it answered {response.status}: {response.read(300)!r}")
                    yield from response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"no answer ({error!r})") from error


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def streamed_tokens(lines: Iterable[bytes]) -> Iterator[list[int]]:
    """Yield the token ids of every piece of a streamed completion.

    Raises:
        ServerError: The stream holds an error, or no token ids.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        piece = json.loads(data)
        if "error" in piece:
            raise ServerError(f"it answered {piece['error']}")
        for choice in piece["choices"]:
            if choice.get("token_ids") is None:
                raise ServerError(
                    "it sends no token ids; take a version that knows return_token_ids"
                )
            yield choice["token_ids"]


def timed_stream(started: float, pieces: Iterable[Sequence[int]]) -> TimedText:
    """Read a stream of token ids to its end, with the times of the first and the last ones."""
    tokens: list[int] = []
    first = last = started
    n_first = 0
    for piece in pieces:
        if not piece:
            continue
        last = time.perf_counter()
        if not tokens:
            first, n_first = last, len(piece)
        tokens += piece
    return TimedText(last - started, last - first, tuple(tokens), n_first)
