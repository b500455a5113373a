"""The Hugging Face hub: what its ids look like and where their files lie on this machine.

Must not know what the files hold.
"""

import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from profiles.errors import SpectuneError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TIMEOUT_S = 2.0
_WANTED = (
    *("*.json", "*.safetensors", "pytorch_model*.bin"),
    *("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "*.jinja"),
)
"""Weights, configs and tokenizers of models and heads."""
_UNWANTED = ("*/*", "consolidated*")
"""Copies of the weights in other formats."""


@dataclass(frozen=True)
class Snapshot:
    """One commit of a hub repository on this machine.

    Attributes:
        folder: Where its files lie; those that were asked for, not all.
        offline: The hub does not answer, so nothing can be added.
    """

    folder: Path
    offline: bool

    @property
    def commit(self) -> str:
        """The commit's hash, by which the cache names the folder."""
        return self.folder.name


def is_hub_id(name: str) -> bool:
    """Tell whether a name has the form of a hub id, `org/name`."""
    return _ID.fullmatch(name) is not None and not name.endswith(".gguf")


def find_snapshot(hub_id: str) -> Snapshot:
    """Resolve a hub id to one commit, so that all its files come from the same.

    Raises:
        SpectuneError: The hub does not know the id, or does not answer and the cache has none.
    """
    from huggingface_hub import hf_hub_download

    offline = not hub_answers()
    try:
        config = Path(hf_hub_download(hub_id, "config.json", local_files_only=offline))
    except (OSError, ValueError) as error:
        if offline:
            raise SpectuneError(
                f"a model must be a local path or a hub id, but {hub_id} is neither here nor in "
                "the Hugging Face cache, and the hub does not answer; connect to the network, or "
                "download it elsewhere and pass its folder"
            ) from error
        raise SpectuneError(
            f"a hub id must name a full model or a head that this account may read, but for "
            f"{hub_id} the hub says '{reason(error)}'; check the id, or log in with "
            "`hf auth login`"
        ) from error
    return Snapshot(config.parent, offline)


def download_snapshot(hub_id: str) -> Path:
    """Return a local folder with the weights, config and tokenizer of a hub id.

    Where the hub does not answer, it holds what was downloaded before.

    Raises:
        SpectuneError: As `find_snapshot`, or the download stops.
    """
    from huggingface_hub import snapshot_download

    found = find_snapshot(hub_id)
    if found.offline:
        return found.folder
    try:
        folder = snapshot_download(
            hub_id,
            revision=found.commit,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    except Exception as error:  # the libraries that transfer files share no narrower class
        raise SpectuneError(
            f"the files of a draft must arrive whole, but the download of {hub_id} stopped with "
            f"'{reason(error)}'; run again to resume it, or pass the folder of a copy"
        ) from error
    return Path(folder)


def hub_answers() -> bool:
    """Ask the hub once: transformers itself would retry for half a minute when offline."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True  # an answer, whatever it says
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # there, but with certificates of its own
    except OSError:
        return False
    return True


def reason(error: Exception) -> str:
    """Return the first sentence of another library's message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[a-z)'`\]])\. ", text, maxsplit=1)[0].rstrip(". ")[:200]
