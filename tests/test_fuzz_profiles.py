"""Profiles, measurements and described pairs, edited at random: used as they are, or refused."""

import gzip
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import profiles
import toy_measurements
import toy_profiles
import toy_what_if
from autotune.report.page import page
from engine.decoder import SpeculativeDecoder
from engine.pair import LoadedTarget, load_target
from fuzzing import (
    cases,
    check_message,
    edited,
    leaves,
    mangled,
    run,
    used_or_refused,
    within,
)
from pairs import save_noisy_copy, save_target, speculating_profile
from profiles import ENGINES, Profile, load, load_measurements, measurements_path, validated
from profiles.errors import SpectuneError
from profiles.pair_numbers import load_numbers

NUMBERS_FILE = Path(__file__).parent.parent / "examples" / "what_if" / "t4_qwen3_1.7b.yaml"


def attempt(read: Callable[[Path], Any], path: Path) -> Any:
    """Return what a file says; None where it is refused, in a sentence."""
    try:
        with within():
            return read(path)
    except SpectuneError as error:
        check_message(str(error))
        return None


def as_yaml(document: Any) -> bytes:
    """Return a document as anybody's YAML, not ours."""
    return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")


def check_nothing_changed(document: dict[str, Any], profile: Profile) -> None:
    """Check that every leaf of a document stands in the profile, figures to six digits."""
    read = dict(leaves(json.loads(profile.model_dump_json())))
    for path, wanted in leaves(document):
        in_tree = "tree" in path[:-1]  # a plain one is 0 throughout, whatever a file says
        if path[-1] in ("created", "date") or wanted is None or in_tree:
            continue
        found = read[path]
        if isinstance(wanted, str | bool):
            assert (found, type(found)) == (wanted, type(wanted)), path
        else:
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-14), path


@cases(few=90, many=4000)
def test_an_edited_profile_is_used_as_it_is_or_refused(n_cases: int, tmp_path: Path) -> None:
    path, data = tmp_path / "toy.yaml", toy_profiles.data()
    profiles.save_measurements(
        toy_measurements.measurements(), tmp_path / "toy-code-epyc.measurements.json.gz"
    )
    commands = [
        *(["show", path], ["show", path, "--json"], ["check", path], ["what-if", path]),
        *(["check", path, "--json"], ["what-if", path, "--json"], ["show", tmp_path]),
        *(["export", path, "--to", engine] for engine in ENGINES),
    ]

    @given(edited(data), st.sampled_from(commands))
    def check(document: dict[str, Any], command: list[object]) -> None:
        path.write_bytes(as_yaml(document))
        profile = attempt(load, path)
        used_or_refused(command)
        if profile is not None:
            check_nothing_changed(document, profile)
            profiles.save(profile, path)
            assert load(path) == profile

    run(check, n_cases)


@cases(few=60, many=3000)
def test_a_mangled_profile_is_used_or_refused(n_cases: int, tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"

    @given(mangled(toy_profiles.YAML.encode()), st.sampled_from(["show", "check", "what-if"]))
    def check(data: bytes, command: str) -> None:
        path.write_bytes(data)
        profile = attempt(load, path)
        done = used_or_refused([command, path])
        if profile is None:
            assert done.code == 1
        else:  # what we read is what every reader of YAML reads
            check_nothing_changed(yaml.safe_load(data.decode("utf-8-sig")), profile)

    run(check, n_cases)


@cases(few=40, many=2000)
def test_edited_measurements_are_used_or_refused(n_cases: int, tmp_path: Path) -> None:
    path = toy_what_if.write(tmp_path)
    beside = measurements_path(path)
    figures = toy_measurements.measurements().model_dump(mode="json", exclude_none=True)
    figures |= json.loads(gzip.decompress(beside.read_bytes()))
    for name in ("scores", "measured", "latency"):
        figures[name] = figures.get(name, [])[:6]
    commands = [["show", path], ["show", path, "--json"], ["check", path], ["what-if", path]]
    commands += [["what-if", path, "--json", "--sweep", "depth=0:4"]]

    @given(edited(figures), st.sampled_from(commands))
    def check(document: dict[str, Any], command: list[object]) -> None:
        beside.write_bytes(gzip.compress(json.dumps(document).encode()))
        attempt(load_measurements, beside)
        used_or_refused(command)

    run(check, n_cases)


@cases(few=20, many=800)
def test_mangled_measurements_are_used_or_refused(n_cases: int, tmp_path: Path) -> None:
    path = toy_what_if.write(tmp_path)
    beside = measurements_path(path)
    packed = beside.read_bytes()
    plain = gzip.decompress(packed)[:4000]

    @given(st.one_of(mangled(packed), mangled(plain).map(gzip.compress)))
    def check(data: bytes) -> None:
        beside.write_bytes(data)
        attempt(load_measurements, beside)
        used_or_refused(["show", path])

    run(check, n_cases)


@cases(few=40, many=1500)
def test_an_edited_pair_is_used_or_refused(n_cases: int, tmp_path: Path) -> None:
    path, data = tmp_path / "pair.yaml", yaml.safe_load(NUMBERS_FILE.read_text("utf-8"))
    options = [[], ["--json"], ["--json", "--sweep", "depth=0:4"]]

    @given(edited(data), st.sampled_from(options))
    def check(document: dict[str, Any], options: list[str]) -> None:
        path.write_bytes(as_yaml(document))
        attempt(load_numbers, path)
        used_or_refused(["what-if", "--measurements", path, *options])

    run(check, n_cases)


@cases(few=6, many=200)
def test_a_page_is_made_of_everything_that_is_accepted(n_cases: int, tmp_path: Path) -> None:
    figures = toy_measurements.measurements().model_dump(mode="json", exclude_none=True)

    @given(edited(toy_profiles.data()), edited(figures))
    def check(document: dict[str, Any], other: dict[str, Any]) -> None:
        try:
            profile = validated(Profile, document, "toy")
            measured = validated(profiles.Measurements, other, "toy")
        except SpectuneError:
            return
        with within():
            assert "<script" not in page(profile, measured, tmp_path / "<script>.yaml")

    run(check, n_cases)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(
        str(save_target(tmp_path_factory.mktemp("pair") / "target")), dtype="float32", device="cpu"
    )


@cases(few=40, many=1500)
def test_whatever_profile_is_accepted_the_text_is_the_targets_own(
    n_cases: int, loaded: LoadedTarget, tmp_path: Path
) -> None:
    noisy = str(save_noisy_copy(Path(loaded.ref.id), tmp_path / "noisy"))
    adaptive = {"adaptive": True, "tree": {"depth": 2, "width": 2, "top_k": 2, "nodes": 5}}
    bases = [
        speculating_profile(loaded, draft, changes).model_dump(mode="json", exclude_none=True)
        for draft in ("lookup", "suffix", noisy, f"hybrid:{noisy}")
        for changes in ({}, adaptive)
    ]
    prompt = [70, 71, 72, 70, 71, 72, 70, 71]
    plain = {}

    @given(st.sampled_from(bases).flatmap(edited))
    def check(document: dict[str, Any]) -> None:
        try:
            profile = validated(Profile, document, "toy")
            with warnings.catch_warnings(), within():
                warnings.simplefilter("ignore")  # it may be decoded plainly, and says so
                decoder = SpeculativeDecoder.from_profile(profile, loaded=loaded, trust=True)
                found = decoder.generate(prompt, max_new_tokens=12).token_ids
        except SpectuneError as error:
            check_message(str(error))
            return
        if profile.sampling not in plain:
            own = SpeculativeDecoder(loaded, sampling=profile.sampling)
            plain[profile.sampling] = own.generate(prompt, max_new_tokens=12).token_ids
        assert found == plain[profile.sampling]

    run(check, n_cases)
