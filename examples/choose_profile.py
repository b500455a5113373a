"""Decode with the profile that fits: `python examples/choose_profile.py FOLDER TARGET DOMAIN`."""

import sys

import torch

from engine import SpeculativeDecoder
from engine.fingerprint import describe_device
from profiles import Device, SpectuneError, find


def main(folder: str, target: str, domain: str) -> None:
    """Take the profile made for this target, this machine and this domain, or say why none is."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        profile = find(
            folder, target=target, device=Device(**describe_device(kind)), domain=domain
        )
    except SpectuneError as error:
        print(error)
        return
    print(f"{profile.name}: {profile.decision}, {profile.tree.label()}. {profile.reason}")
    decoder = SpeculativeDecoder.from_profile(profile)
    print(decoder.generate("Say a word.", max_new_tokens=32).text)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
