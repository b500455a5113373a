"""The right profile of a folder, or one sentence for each that does not fit."""

from pathlib import Path
from typing import Any

import pytest

import profiles
from profiles import GREEDY, SpectuneError, find
from toy_profiles import PLAIN_CHANGES, SHA_B, profile


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Return a folder with profiles of two domains, and a file that is none."""
    for name, changes in {
        "code-old": {"created": "2026-11-01T09:00:00Z"},
        "code-new": {"created": "2026-11-20T09:00:00Z"},
        "chat": {"domain.name": "chat"} | PLAIN_CHANGES,
    }.items():
        put(tmp_path, name, changes)
    (tmp_path / "notes.yaml").write_text("just: notes\n")
    (tmp_path / "README.md").write_text("not looked at")
    return tmp_path


def put(folder: Path, name: str, changes: dict[str, Any]) -> profiles.Profile:
    made = profile({"name": name} | changes)
    profiles.save(made, folder / f"{name}.yaml")
    return made


def test_the_newest_of_those_that_fit_is_taken(shelf: Path) -> None:
    known = profile()
    found = find(shelf, target="toy/target", device=known.device, domain="code")
    assert found.name == "code-new"


def test_a_plain_profile_fits_like_any_other(shelf: Path) -> None:
    assert find(shelf, domain="chat").decision == "plain"


def test_a_record_of_the_target_is_compared_by_weights_not_by_name(shelf: Path) -> None:
    known = profile().target
    elsewhere = known.model_copy(update={"id": "/another/folder"})
    assert find(shelf, target=elsewhere, domain="code").name == "code-new"
    other = known.model_copy(update={"sha256": SHA_B})
    with pytest.raises(SpectuneError, match=r"code-new.yaml: target.sha256: 'a+.* in the profile"):
        find(shelf, target=other, domain="code")


def test_every_candidate_gets_one_sentence(shelf: Path) -> None:
    with pytest.raises(SpectuneError) as refusal:
        find(shelf, target="toy/other", domain="code")
    head, *reasons = str(refusal.value).splitlines()
    assert head.startswith(f"no profile in {shelf} fits")
    assert len(reasons) == 4
    for name, reason in zip(("chat", "code-new", "code-old", "notes"), reasons, strict=True):
        assert f"{name}.yaml" in reason
    assert "toy/target in the profile, toy/other wanted" in reasons[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device.threads": 1}, "device.threads: 2 in the profile, 1 here"),
        ({"device.memory_gib": 30.0}, "device.memory_gib: 23.5 in the profile, 30.0 here"),
        ({"device.name": None}, "unknown here"),
    ],
)
def test_another_device_does_not_fit(shelf: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpectuneError, match=words):
        find(shelf, device=profile(changes).device, domain="code")
    noted = profile({"device.torch": "9.9"}).device  # a library's version is only noted
    assert find(shelf, device=noted, domain="code").name == "code-new"


def test_another_sampling_does_not_fit(shelf: Path) -> None:
    with pytest.raises(SpectuneError, match="sampling.temperature: 0.7 in the profile, 0.0 here"):
        find(shelf, domain="code", sampling=GREEDY)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"domain.name": "math"}, "domain fit: code .*, math "),
        ({"target.id": "toy/second"}, "target fit"),
        ({"device.name": "Other CPU"}, "device fit"),
        ({"sampling.temperature": 0.0}, "sampling fit"),
    ],
)
def test_profiles_for_different_purposes_are_not_chosen_between(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    put(tmp_path, "one", {})
    put(tmp_path, "two", changes)
    with pytest.raises(SpectuneError, match=f"profiles of more than one {what}.*is wanted"):
        find(tmp_path)


def test_a_folder_without_profiles_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpectuneError, match="holds none"):
        find(tmp_path)
    with pytest.raises(SpectuneError, match="cannot be listed"):
        find(tmp_path / "missing")
