"""What a job leaves to read beside its profile, and what it may not lose for it."""

import json
import stat
from pathlib import Path

import pytest

import autotune.report.page
from autotune import Models, Settings, tune
from autotune.commands.cli import main
from autotune.progress import Silent
from autotune.report.job_report import report_path
from autotune.texts import load_texts, texts_path
from pairs import save_target, write_prompts
from profiles import load

TINY = Settings(
    n_tune=2,
    n_holdout=8,
    n_race=2,
    max_new_tokens=10,
    n_trials=2,
    n_probe_rounds=1,
    max_nodes=4,
    max_lookup_depth=3,
)


class Listening(Silent):
    """Keeps what a job says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("reporting")
    save_target(base / "target")
    write_prompts(base / "prompts.jsonl")
    return base


def run_job(base: Path, out: Path, *, keep_text: bool = False) -> list[str]:
    progress = Listening()
    models = Models(str(base / "target"), dtype="float32", device="cpu")
    prompts = base / "prompts.jsonl"
    tune(models, prompts, out, settings=TINY, keep_text=keep_text, progress=progress)
    return progress.said


def test_the_report_is_made_again_from_the_files_alone(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.yaml"
    said = run_job(base, out)
    assert f"Report: {report_path(out)}" in said
    written = report_path(out).read_text("utf-8")
    assert written.count("<img ") >= 5
    assert main(["show", str(out), "--html", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text("utf-8") == written
    assert not texts_path(out).exists()


def test_text_is_kept_when_asked_for_and_goes_with_its_job(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])
    out = tmp_path / "x.yaml"
    run_job(base, out, keep_text=True)
    texts = load_texts(texts_path(out))
    assert [text.split for text in texts] == ["tune"] * 2 + ["holdout"] * 8
    records = [json.loads(line) for line in (base / "prompts.jsonl").read_text().splitlines()]
    prompts = {record["turns"][0] for record in records}
    assert all(any(prompt in text.prompt for prompt in prompts) for text in texts)
    assert all(len(text.answer_ids) == 10 for text in texts)
    for path in (texts_path(out), report_path(out)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    page = report_path(out).read_text("utf-8")
    assert sum(prompt in page for prompt in prompts) > 0
    # A page is only given text again when that is asked for.
    again = tmp_path / "again.html"
    assert main(["show", str(out), "--html", str(again)]) == 0
    assert not any(prompt in again.read_text("utf-8") for prompt in prompts)
    assert main(["show", str(out), "--html", str(again), "--keep-text"]) == 0
    assert again.read_text("utf-8") == page
    # The next job under this name keeps none: nothing of the old one stays.
    run_job(base, out)
    assert not texts_path(out).exists()
    assert not any(prompt in report_path(out).read_text("utf-8") for prompt in prompts)
    capsys.readouterr()


@pytest.mark.parametrize("error", [RuntimeError("no canvas"), KeyboardInterrupt("no canvas")])
def test_a_report_that_cannot_be_drawn_loses_no_profile(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(autotune.report.page, "sections", fail)
    out = tmp_path / "x.yaml"
    report_path(out).write_text("of an older job")
    said = run_job(base, out)
    assert load(out).reason
    assert not report_path(out).exists()
    (warning,) = (line for line in said if "report could not be made" in line)
    assert "no canvas" in warning and f"spectune show {out} --html" in warning
