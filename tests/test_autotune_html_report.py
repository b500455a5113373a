"""The report as a page: whole, self-contained, escaped, and without anybody's text."""

import re
import stat
import warnings
from pathlib import Path

import pytest

import toy_measurements
import toy_profiles
from autotune.report.page import page, sections, write_report
from autotune.texts import KeptText, load_texts, save_texts
from profiles import Measurements
from profiles.errors import SpectuneError

HERE = Path("toy.yaml")
SCRIPT = "<script>alert('x')</script>"
TITLES = {
    "Where the time goes, and the proof": [
        "Where the time of a round goes",
        "The proof: toy/head, D4",
    ],
    "What a round costs": ["Verifying nodes", "Drafting with toy/head", "Whole rounds"],
    "What the draft guesses, and what the search found": [
        "Acceptance of toy/head by depth and rank",
        "Speedup of toy/head over depth and width",
        "Predicted against measured speedup",
        "The search's history",
    ],
    "Where the time of the job went": ["Steps of the tuning job"],
}
JOB = {"planned_s": 240.0, "seconds": {"trace": 60.0, "search": 180.0}}


@pytest.fixture(scope="module")
def full_page() -> str:
    return page(toy_profiles.profile({"job": JOB}), toy_measurements.measurements(), HERE)


def test_the_page_says_first_what_to_do_then_how_sure_and_how(full_page: str) -> None:
    body = full_page.partition("<body>")[2]
    order = [
        "Speculate: 1.79x plain decoding",
        "plain decoding took 1.79 times as long",
        "at least 1.70 times with 95 % confidence",
        "spectune run toy.yaml --prompt TEXT",
        "What the figure stands on",
    ]
    places = [body.index(words) for words in order]
    assert places == sorted(places)


def test_the_four_points_of_the_checklist_are_answered() -> None:
    html = page(toy_profiles.profile(), None, HERE)
    rows = dict(re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', html))
    assert rows["baseline"].startswith("plain decoding on this engine, same dtype, same threads")
    assert rows["batch size"] == "1"
    assert rows["data"].startswith("code: 32 prompts to tune on, 32 held out")
    assert "depth 4, width 3, top-k 3, 10 nodes" in rows["tree"]


def test_every_picture_is_drawn_with_its_words_and_units() -> None:
    found = sections(toy_profiles.profile({"job": JOB}), toy_measurements.measurements())
    assert [title for title, _ in found] == list(TITLES)
    for title, pictures in found:
        for picture, start in zip(pictures, TITLES[title], strict=True):
            assert picture.title.startswith(start)
            assert picture.png.startswith(b"\x89PNG")
            assert picture.alt and picture.caption.endswith(".")
    captions = " ".join(picture.caption for _, pictures in found for picture in pictures)
    assert (
        "16.4 ms" in captions
        and "4.0 min" in captions
        and "plain tokens" in captions
        and "%" in captions
    )


def test_the_page_needs_nothing_but_itself(full_page: str) -> None:
    assert not re.findall(r"(?:src|href)=\"(?!data:)", full_page)
    assert all(word not in full_page for word in ("url(", "<script", "@import", "http://"))
    n_described = len(re.findall(r"<img [^>]*alt=\"[^\"]+\"", full_page))
    assert n_described == full_page.count("<img ") == 10


def test_whatever_is_missing_only_its_picture_is_left_out() -> None:
    profile = toy_profiles.profile()
    assert page(profile, None, HERE).count("<img ") == 1  # the round, from the cost model
    assert page(profile, Measurements(), HERE).count("<img ") == 1
    bare = toy_profiles.profile({"cost_model": None, "search": None, "noise": None, "probe": []})
    assert page(bare, None, HERE).count("<img ") == 0


@pytest.mark.parametrize("measured", [True, False])
def test_a_plain_profile_says_so_and_shows_the_rival(measured: bool) -> None:
    profile = toy_profiles.profile(toy_profiles.PLAIN_CHANGES)
    figures = toy_measurements.measurements("lookup") if measured else None
    html = page(profile, figures, HERE)
    assert "Decode plainly" in html and profile.reason in html
    assert "D2 W1 K1 N2" in html


def test_one_point_of_everything_is_drawn_without_complaint() -> None:
    full = toy_measurements.measurements()
    kinds = Measurements.model_fields.keys() - {"schema_version"}
    few = {name: getattr(full, name)[:1] for name in kinds} | {"latency": full.latency[1:2]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert page(toy_profiles.profile(), Measurements(**few), HERE).count("<img ") >= 3


def test_names_from_models_and_prompts_are_escaped() -> None:
    changes = {
        "name": SCRIPT,
        "target.id": SCRIPT,
        "draft.id": f"$x^{{{SCRIPT}$",  # matplotlib would read dollars as mathematics
        "domain.name": SCRIPT,
        "device.name": SCRIPT,
        "reason": SCRIPT,
        "evidence.baseline": SCRIPT,
    }
    profile = toy_profiles.profile(changes)
    text = KeptText("tune", SCRIPT, f"{SCRIPT}</pre>", f"{SCRIPT}{{{{ 7 * 7 }}}}", [1], [2])
    figures = toy_measurements.measurements(str(changes["draft.id"]))
    html = page(profile, figures, Path(f"{SCRIPT}.yaml"), [text])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") > 8
    assert "{{ 7 * 7 }}" in html
    assert html.count("<pre>") == html.count("</pre>") == 2


def test_a_page_with_text_is_private_and_one_without_is_not(tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    text = KeptText("holdout", "a.0", "the prompt", "the answer", [1], [2])
    write_report(toy_profiles.profile(), None, HERE, out)
    assert stat.S_IMODE(out.stat().st_mode) != 0o600
    assert "the prompt" not in out.read_text("utf-8")
    write_report(toy_profiles.profile(), None, HERE, out, [text])
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert "the prompt" in out.read_text("utf-8") and "the answer" in out.read_text("utf-8")


def test_kept_texts_return_as_written_and_are_private(tmp_path: Path) -> None:
    texts = [
        KeptText("tune", "a.0", "x\u2028y\n", "é<", [1, 2], [3]),
        KeptText("a", "b", "", "", [], []),
    ]
    path = tmp_path / "toy.texts.jsonl"
    path.touch(0o644)
    save_texts(texts, path)
    assert load_texts(path) == texts
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(SpectuneError, match="does not exist: texts are kept by"):
        load_texts(tmp_path / "none.jsonl")
    for damaged in ('{"split": "tune"}\n', "{", "[1]", "\u00e9".encode("latin1")):
        path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
        with pytest.raises(SpectuneError, match="is damaged"):
            load_texts(path)
