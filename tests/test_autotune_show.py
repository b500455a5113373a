"""`spectune show`: one profile, two, or a folder; broken ones are told, nothing is markup."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import toy_measurements
import toy_profiles
from autotune.commands.cli import main
from autotune.report.differences import differences
from autotune.report.listing import age
from profiles import save, save_measurements

Show = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main(["show", *map(str, arguments)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        done = capsys.readouterr()
        return code, done.out, done.err

    return run


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Return a profile with its measurements beside it."""
    profile = toy_profiles.profile()
    save_measurements(toy_measurements.measurements(), tmp_path / str(profile.measurements))
    save(profile, tmp_path / "toy.yaml")
    return tmp_path / "toy.yaml"


def test_one_profile_says_first_what_to_do_and_then_the_substance(show: Show, toy: Path) -> None:
    code, out, err = show(toy)
    assert (code, err) == (0, "")
    order = [
        "Speculate: 1.79x plain decoding",
        "at least 1.70 times with 95 % confidence",
        f"    spectune run {toy} --prompt TEXT\n",
        "baseline",
        "batch size",
        "data",
        "D4 W3 K3 N10: depth 4, width 3, top-k 3, 10 nodes",
        "Holdout of code",
        "A round of D4 W3 K3 N10, by the cost model",
        "Acceptance of toy/head by depth and rank",
        "Trees measured on tune prompts",
    ]
    places = [out.index(words) for words in order]
    assert places == sorted(places)
    assert "2, stopped" in out  # the chain that was given up


def test_a_profile_without_its_measurements_is_shown_alone(show: Show, toy: Path) -> None:
    path = toy.with_name("toy-code-epyc.measurements.json.gz")
    for content in (b"damaged", None):
        path.write_bytes(content) if content else path.unlink()
        code, out, err = show(toy)
        assert code == 0
        assert "Speculate" in out and "Trees measured" not in out
        assert err.startswith("spectune: showing the profile alone, since ")


def test_the_job_later_looks_and_edits_are_told(show: Show, tmp_path: Path) -> None:
    recheck = {"date": "2026-12-24", "spectune": "0.1.0", "prompts": 8, "max_new_tokens": 64}
    recheck |= {"low": 0.97, "high": 1.31, "confidence": 0.95, "verdict": "inconclusive"}
    job = {"planned_s": 240.0, "seconds": {"trace": 60.0, "search": 240.0}}
    profile = toy_profiles.profile({"measurements": None, "rechecks": [recheck], "job": job})
    save(profile, tmp_path / "toy.yaml")
    out = show(tmp_path / "toy.yaml")[1]
    assert "inconclusive on 2026-12-24: at least 0.97x, at most 1.31x" in out
    assert "took 5.0 min, 4.0 were planned: trace 60 s, search 240 s" in out
    assert "edited" not in out
    save(profile.model_copy(update={"reason": "It is so."}), tmp_path / "toy.yaml")
    assert "edited since it was written: not trusted" in show(tmp_path / "toy.yaml")[1]


def test_names_are_neither_markup_nor_control_characters(show: Show, tmp_path: Path) -> None:
    name = "[red]x[/bold] \x1b[2J:smile:"
    changes = {"measurements": None, "domain.name": name, "target.id": name, "reason": name}
    path = tmp_path / "odd.yaml"
    save(toy_profiles.profile(changes | toy_profiles.PLAIN_CHANGES), path)
    for arguments in ([path], [tmp_path], [path, path]):
        code, out, _ = show(*arguments)
        assert code == 0
        assert "\x1b[2J" not in out
    assert "[red]x[/bold] \ufffd[2J:smile:" in show(path)[1]


def test_two_profiles_are_compared_field_by_field(show: Show, toy: Path) -> None:
    other = toy.with_name("other.yaml")
    changes = {"tree.nodes": 5, "draft.rope_theta": 10000.0, "domain.name": "math"}
    save(toy_profiles.profile(changes | {"search.runners_up": []}), other)
    code, out, _ = show(toy, other)
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert code == 0
    assert rows["tree.nodes"].split()[1:] == ["10", "5", "-50", "%"]
    assert rows["domain.name"].split()[1:] == ["code", "math"]
    assert "tree.depth" not in rows
    assert "fields differ" in rows["search.runners_up"]
    document = json.loads(show(toy, other, "--json")[1])
    assert {"field": "draft.rope_theta", "a": None, "b": 10000.0} in document["differences"]
    assert (document["a"], document["b"]) == (str(toy), str(other))
    assert "say the same" in show(toy, toy)[1]
    assert json.loads(show(toy, toy, "--json")[1])["differences"] == []


def test_differences_come_in_the_order_of_the_schema() -> None:
    first = toy_profiles.profile()
    second = toy_profiles.profile({"name": "b", "tree.nodes": 4, "noise.spread": 0.5})
    fields = [difference.field for difference in differences(first, second)]
    assert fields == ["name", "tree.nodes", "noise.spread"]
    (spread,) = (d for d in differences(first, second) if d.field == "noise.spread")
    assert spread.change == pytest.approx(49)


def test_a_folder_is_listed_with_broken_files_and_their_reason(show: Show, toy: Path) -> None:
    folder = toy.parent
    save(toy_profiles.profile(toy_profiles.PLAIN_CHANGES), folder / "plain.yaml")
    (folder / "broken.yaml").write_text("schema_version: 1\nname: x\n")
    (folder / "list.yml").write_text("- a\n")
    (folder / "notes.txt").write_text("no profile at all")
    (folder / "sub.yaml").mkdir()
    code, out, _ = show(folder)
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "toy/target + toy/head" in rows["toy.yaml"]
    assert all(
        word in rows["toy.yaml"] for word in ("AMD EPYC", "code", "D4 W3", "1.79x", "1.70x")
    )
    assert "plain" in rows["plain.yaml"] and "1.79x" not in rows["plain.yaml"]
    assert "is no profile: " in rows["broken.yaml"] and "is no profile: " in rows["list.yml"]
    assert "notes.txt" not in out and "sub.yaml" not in out
    document = json.loads(show(folder, "--json")[1])
    assert [row["file"] for row in document["profiles"]] == ["plain.yaml", "toy.yaml"]
    assert [row["speedup"] for row in document["profiles"]] == [1.0, 1.79]
    assert [row["file"] for row in document["broken"]] == ["broken.yaml", "list.yml"]


def test_one_profile_as_json_is_the_profile(show: Show, toy: Path) -> None:
    document = json.loads(show(toy, "--json")[1])
    assert document["evidence"]["speedup"]["ratio"] == 1.79
    assert document["tree"] == {"depth": 4, "width": 3, "top_k": 3, "nodes": 10}


def test_wrong_usage_is_told_in_one_sentence(show: Show, toy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    page = tmp_path / "x.html"
    for arguments, words, code in (
        ([toy, toy, toy], "given 3; name two", 2),
        ([toy, tmp_path], "is a folder; name a file", 2),
        ([tmp_path / "empty"], "holds no profile", 1),
        ([tmp_path / "none.yaml"], "does not exist", 1),
        ([toy, "--keep-text"], "give --html FILE with it", 2),
        ([toy, toy, "--html", page], "name one file", 2),
        ([tmp_path, "--html", page], "name one file", 2),
        ([toy, "--html", page, "--json"], "give one of them", 2),
        ([toy, "--html", page, "--keep-text"], "texts are kept by", 1),
        ([], "PROFILE", 2),
    ):
        done = show(*arguments)
        assert done[0] == code
        assert done[1] == ""
        assert words in done[2] and "Traceback" not in done[2]
    assert not page.exists()


def test_ages_are_told_in_their_largest_unit() -> None:
    spans = (timedelta(seconds=5), timedelta(minutes=3), timedelta(hours=5), timedelta(days=40))
    assert [age(span) for span in spans] == ["now", "3 min", "5 h", "40 d"]
