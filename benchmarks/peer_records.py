"""Raw runs of `peers.py`, kept by domain so that an interrupted run can go on."""

import hashlib
import json
from pathlib import Path
from typing import Any

from autotune.bench.contest import Runs
from engine.timing import TimedText
from profiles import atomic_write


class PeerRecords:
    """The runs of every finished domain, in one JSON file.

    Args:
        path: The file.
        settings: Everything the runs depend on; a file made with other settings starts anew.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self._key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self._domains: dict[str, Any] = {}
        if path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["settings"] == self._key:
                self._domains = data["domains"]

    def get(self, domain: str) -> Runs | None:
        """Return the runs of a finished domain."""
        if domain not in self._domains:
            return None
        return {
            name: [TimedText(total, decode, tuple(ids), n) for total, decode, ids, n in done]
            for name, done in self._domains[domain].items()
        }

    def put(self, domain: str, runs: Runs) -> None:
        """Keep the runs of a domain."""
        self._domains[domain] = {
            name: [[r.total_s, r.decode_s, list(r.token_ids), r.n_first] for r in done]
            for name, done in runs.items()
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        document = {"settings": self._key, "domains": self._domains}
        atomic_write(self._path, json.dumps(document))
