"""What comes from files, models and command lines is data: never run, followed, shown or kept
further than was asked for."""

import ast
import json
import logging
import os
import re
import shlex
import stat
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autotune.report.page
import engine.demo
import toy_profiles
import toy_what_if
from autotune import Models, Settings, tune
from autotune.commands.cli import main, parser
from autotune.console import print_json
from autotune.report.job_report import report_path
from autotune.study_files import without_password
from autotune.texts import texts_path
from engine.hub import is_hub_id
from engine.pair import load_draft, load_target
from fuzzing import cases, run
from pairs import read, save_target, write_prompts
from profiles import Profile, load, save, validated
from profiles.errors import SpectuneError

ROOT = Path(__file__).parent.parent
PACKAGES = ("autotune", "engine", "profiles")
FILES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
SCRIPT = "<script>alert('x')</script>"


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls in a file by what is called, such as `torch.load`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keywords(call: ast.Call) -> dict[str, str]:
    return {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg}


# --- loaders ------------------------------------------------------------------------------------


NEVER = re.compile(
    r"(c?[Pp]ickle|dill|cloudpickle|marshal|shelve|joblib)\.\w*load"
    r"|yaml\.(load|load_all|full_load|unsafe_load|unsafe_load_all|full_load_all)$"
    r"|(np|numpy)\.load$|pandas\.read_pickle$|os\.(system|popen)$|(eval|exec|compile|__import__)$"
)


def test_no_loader_that_runs_what_it_loads_is_called() -> None:
    found = [
        (path.name, call.lineno, name)
        for path in FILES
        for name, call in calls(path)
        if NEVER.match(name)
    ]
    assert not found


def test_weights_are_loaded_as_weights_only() -> None:
    loads = [c for path in FILES for name, c in calls(path) if name == "torch.load"]
    assert len(loads) >= 3
    assert all(keywords(call).get("weights_only") == "True" for call in loads)


def test_every_yaml_class_in_use_is_a_safe_one() -> None:
    names = {
        ast.unparse(node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(("Loader", "Dumper"))
    }
    assert {name for name in names if name.startswith("yaml.")} <= {
        *("yaml.BaseLoader", "yaml.SafeLoader", "yaml.SafeDumper"),
    }


def test_no_command_goes_through_a_shell() -> None:
    for path in FILES:
        for name, call in calls(path):
            if name.startswith("subprocess."):
                assert "shell" not in keywords(call), path


def test_code_of_a_checkpoint_is_trusted_by_a_flag_alone() -> None:
    """Nowhere is the trust written down: it is handed on from the command line, and off there."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) != "True", path
    job = ["--target", "x", "--prompts", "y"]
    for options in (
        *(["tune", *job], ["bench", *job]),
        *(["run", "x.yaml", "--prompt", "y"], ["check", "x.yaml"]),
    ):
        assert parser().parse_args(options).trust_remote_code is False
        assert parser().parse_args([*options, "--trust-remote-code"]).trust_remote_code is True


class Trap:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_weights_and_code_of_a_stranger_are_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    trap = tmp_path / "trap"
    for folder in (save_target(tmp_path / "target"), tmp_path / "head"):
        folder.mkdir(exist_ok=True)
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        torch.save({"fc.weight": Trap(mark)}, folder / "pytorch_model.bin")
    (tmp_path / "head" / "config.json").write_text("{}")
    config = tmp_path / "target" / "config.json"
    mine = json.loads(config.read_text()) | {
        "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"},
        "model_type": "mine",
    }
    trap.mkdir()
    for path in (tmp_path / "target").glob("tokenizer*"):
        (trap / path.name).write_bytes(path.read_bytes())
    (trap / "config.json").write_text(json.dumps(mine))
    (trap / "mine.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    for folder in ("target", "trap"):
        with pytest.raises(SpectuneError):
            load_target(str(tmp_path / folder), dtype="float32", device="cpu")
    good = load_target(str(save_target(tmp_path / "good")), dtype="float32", device="cpu")
    for folder in ("head", "trap"):
        with pytest.raises(SpectuneError):
            load_draft(str(tmp_path / folder), good)
    assert not mark.exists()


# --- downloads ----------------------------------------------------------------------------------


def test_what_is_downloaded_is_pinned_by_its_hash_or_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel is refused unless its SHA-256 is the known one; hub files are asked for by
    commit. Nothing else in the packages fetches anything."""
    assert re.fullmatch(r"[0-9a-f]{64}", engine.demo.WHEEL_SHA256)
    fetching = re.compile(r".*(urlopen|urlretrieve|snapshot_download|hf_hub_download)$|requests\.")
    found = {
        (path.name, name) for path in FILES for name, _ in calls(path) if fetching.match(name)
    }
    assert found == {
        ("hub.py", "urllib.request.urlopen"),  # only asks whether the hub is there
        ("hub.py", "hf_hub_download"),  # only the config, which tells the commit
        ("hub.py", "snapshot_download"),
    }
    hub = next(path for path in FILES if path.name == "hub.py")
    (download,) = (call for name, call in calls(hub) if name == "snapshot_download")
    assert keywords(download)["revision"] == "found.commit"
    other = tmp_path / "other.whl"
    other.write_bytes(b"not the wheel")
    monkeypatch.setenv("SPECTUNE_DEMO_WHEEL", str(other))
    monkeypatch.setenv("SPECTUNE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SpectuneError, match="must have sha256"):
        engine.demo.demo_target_path()
    assert not any((tmp_path / "cache").rglob("*.gguf"))


# --- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../x.gz", "/etc/passwd", "a/b.gz", "..", ".", "..\\x.gz", "C:\\x.gz", "~/x", ""],
)
def test_a_profile_names_no_file_outside_its_folder(name: str) -> None:
    with pytest.raises(SpectuneError, match="measurements"):
        validated(Profile, toy_profiles.data({"measurements": name}), "toy")


def test_the_files_that_reading_a_profile_opens_are_those_the_user_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else a profile mentions (a target's folder, a study) is only shown."""
    secret = tmp_path / "elsewhere" / "secret.yaml"
    secret.parent.mkdir()
    secret.write_text("secret")
    home = tmp_path / "home"
    home.mkdir()
    changes = {
        **dict.fromkeys(("target.id", "draft.id", "search.storage", "domain.name"), str(secret)),
        "measurements": None,
    }
    path = home / "x.yaml"
    path.write_text(profiles_yaml(changes), "utf-8")
    opened: set[str] = set()
    real = open

    def watch(file: Any, *arguments: Any, **options: Any) -> Any:
        opened.add(str(file))
        return real(file, *arguments, **options)

    monkeypatch.setattr("io.open", watch)
    monkeypatch.setattr("builtins.open", watch)
    for command in (["show", path], ["check", path], ["what-if", path], ["show", home]):
        main([str(word) for word in command])
    capsys.readouterr()
    inside = {Path(name) for name in opened if name.startswith(str(tmp_path))}
    assert inside == {path}


def profiles_yaml(changes: dict[str, Any]) -> str:
    from profiles import to_yaml

    return to_yaml(toy_profiles.profile(changes))


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b/c", "a//b", "./x", "-x/y", "~/x"])
def test_what_is_no_hub_id_is_never_asked_for(name: str) -> None:
    assert not is_hub_id(name)


# --- what is shown ------------------------------------------------------------------------------


def test_a_job_over_hostile_prompts_writes_a_page_without_their_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, the domain and the model's folder are script tags, and the texts are kept."""
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])
    target = save_target(tmp_path / "<img src=x onerror=alert(1)>")
    prompts = tmp_path / "prompts.jsonl"
    records = [{"prompt": f"{SCRIPT}{chr(97 + n) * 20}</pre>"} for n in range(12)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "x.yaml"
    settings = Settings(
        **{"n_tune": 2, "n_holdout": 8, "n_race": 2, "max_new_tokens": 8, "n_trials": 2},
        **{"n_probe_rounds": 1, "max_nodes": 3, "max_depth": 2, "max_lookup_depth": 2},
    )
    models = Models(str(target), ["lookup"], "float32", "cpu")
    tune(models, prompts, out, domain=SCRIPT, settings=settings, keep_text=True)
    page = report_path(out).read_text("utf-8")
    assert "<script" not in page and "<img src=x" not in page
    assert page.count("&lt;script&gt;") >= 6
    assert page.count("<pre>") == page.count("</pre>") == 12
    assert "default-src 'none'" in page, "and even then nothing would be run"


def test_no_control_character_of_a_profile_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07 \u202e"
    keys = ("name", "target.id", "draft.id", "domain.name", "reason", "evidence.baseline")
    path = tmp_path / "x.yaml"
    path.write_text(profiles_yaml(dict.fromkeys(keys, evil) | {"measurements": None}), "utf-8")
    for command in (["show", path], ["show", tmp_path], ["what-if", path], ["check", path]):
        main([str(word) for word in command])
    main(["what-if", str(path), "--set", f"draft={evil}"])
    main(["show", str(tmp_path / evil)])
    with pytest.raises(SystemExit):
        main(["show", "x", f"--{evil.replace(' ', '')}"])
    shown = "".join(capsys.readouterr())
    assert not {c for c in shown if not c.isprintable()} - {"\n"}


# --- secrets ------------------------------------------------------------------------------------

awkward = st.text(st.sampled_from("sécret:/@?#&=%x;"), min_size=1, max_size=12)


@cases(few=100, many=2000)
def test_no_part_of_a_password_is_shown(n_cases: int) -> None:
    @given(awkward, st.sampled_from(("postgresql", "mysql+pymysql", "redis")), st.booleans())
    def check(filling: str, scheme: str, with_options: bool) -> None:
        password = f"Q{filling}Q"
        options = f"?password={password}&ssl=1" if with_options else ""
        shown = without_password(f"{scheme}://me:{password}@host:5432/db{options}")
        assert "Q" not in shown, shown
        assert shown.startswith(f"{scheme}://")

    run(check, n_cases)


def test_a_password_is_in_no_message_no_log_and_no_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A database that cannot be reached, and one that can: neither says its password."""
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])
    caplog.set_level(logging.DEBUG)
    target = save_target(tmp_path / "target")
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    small = ("--tune-prompts", "2", "--holdout-prompts", "2", "--max-new-tokens", "8")
    small += ("--trials", "2", "--max-nodes", "3", "--dtype", "float32", "--device", "cpu")
    folder = tmp_path / "out"
    folder.mkdir()
    urls = {
        "postgresql://me:Sesame@localhost:1/db?sslpassword=Sesame": 1,
        f"sqlite:///{tmp_path}/study.db?timeout=9&check_same_thread=false&x=Sesame": None,
    }
    for url, expected in urls.items():
        arguments = ["tune", "--target", str(target), "--prompts", str(prompts), *small]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SQLite takes no such option
            code = main([*arguments, "--out", str(folder / "x.yaml"), "--storage", url])
        assert expected is None or code == expected
    shown = "".join(capsys.readouterr()) + caplog.text
    written = b"".join(read(path) for path in folder.iterdir())
    assert "Sesame" not in shown
    assert b"Sesame" not in written


# --- kept texts ---------------------------------------------------------------------------------


def test_what_was_kept_is_private_and_the_documented_command_deletes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])
    readme = (ROOT / "README.md").read_text("utf-8")
    (command,) = re.findall(r"`(rm NAME\.[^`]*)`", readme)
    target = save_target(tmp_path / "target")
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    folder = tmp_path / "out"
    folder.mkdir()
    out = folder / "x.yaml"
    settings = Settings(
        **{"n_tune": 2, "n_holdout": 2, "n_race": 2, "max_new_tokens": 8, "n_trials": 2},
        **{"n_probe_rounds": 1, "max_nodes": 3, "max_depth": 2, "max_lookup_depth": 2},
    )
    before = os.umask(0)  # whatever the user's umask would allow
    try:
        tune(
            Models(str(target), ["lookup"], "float32", "cpu"),
            prompts,
            out,
            settings=settings,
            keep_text=True,
        )
    finally:
        os.umask(before)
    said = [json.loads(line)["turns"][0].encode() for line in prompts.read_text().splitlines()]

    def holding() -> set[Path]:
        return {p for p in folder.iterdir() if any(text in read(p) for text in said)}

    assert holding() == {texts_path(out), report_path(out)}
    for path in holding():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    subprocess.run(shlex.split(command.replace("NAME", out.stem)), cwd=folder, check=True)
    assert not holding()
    assert load(out).reason


def test_a_name_with_dollar_signs_is_drawn_as_it_is(tmp_path: Path) -> None:
    """Matplotlib would take what stands between two of them for mathematics, and fail."""
    path = toy_what_if.write(tmp_path)
    profile = load(path).model_copy(update={"name": "$\\frac{a$ [/red]"})
    save(profile, path)
    picture = tmp_path / "x.png"
    swept = ["--sweep", "depth=0:2", "--plot", str(picture)]
    assert main(["what-if", str(path), *swept]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_document_is_whole_and_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"é 日本 🙂": "\x7f\x1b[31m\u202e\u200d\ud800\n\t \U000e0001"}
    print_json(document)
    printed = capsys.readouterr().out.removesuffix("\n")
    assert printed.isprintable()
    assert "é 日本 🙂" in printed
    assert json.loads(printed) == document


@pytest.mark.parametrize(
    "command",
    [
        ["what-if", "toy.yaml", "--csv", "toy.yaml"],
        ["what-if", "toy.yaml", "--sweep", "depth=1:2", "--plot", "./toy.yaml"],
        ["what-if", "toy.yaml", "--csv", "toy.measurements.json.gz"],
        ["export", "toy.yaml", "--to", "sglang", "--out", "link.yaml"],
        ["show", "toy.yaml", "--html", "toy.yaml"],
        ["tune", "--target", "x", "--prompts", "link.yaml", "--out", "toy.yaml"],
    ],
)
def test_no_result_overwrites_what_it_is_made_from(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    toy_what_if.write(tmp_path)
    (tmp_path / "link.yaml").symlink_to("toy.yaml")
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(command) == 2
    assert "must not overwrite what it is made from" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("backend", [[], ["--backend", "vllm"]])
def test_an_empty_name_of_a_profile_is_refused(
    backend: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--target", "x", "--prompts", "y.jsonl", "--out", "", *backend]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err
