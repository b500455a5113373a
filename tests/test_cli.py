"""The command line: exit codes, one JSON document, and one sentence for every mistake."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub.constants
import pytest
import yaml

import engine.decoder
from autotune.commands.cli import main
from autotune.settings import Settings
from engine.decoder import Generation, SpeculativeDecoder
from engine.pair import LoadedTarget, load_target
from engine.text import TextStream
from pairs import (
    MAX_POSITIONS,
    save,
    save_noisy_copy,
    save_target,
    small_llama,
    speculating_profile,
    write_prompts,
)
from profiles import load
from profiles import save as save_profile

SMALL = (
    *("--tune-prompts", "2", "--holdout-prompts", "8", "--max-new-tokens", "10", "--trials", "2"),
    *("--max-nodes", "4", "--max-depth", "2", "--dtype", "float32", "--device", "cpu"),
)


class Done(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Return a function that runs a command line in this process."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target, a draft, prompts and two profiles that fit this machine."""
    base = tmp_path_factory.mktemp("cli")
    target = save_target(base / "target")
    save_noisy_copy(target, base / "noisy", amount=0.05)
    save(small_llama(seed=1), base / "other-ids", order=-1)
    write_prompts(base / "prompts.jsonl")
    loaded = load_target(str(target), dtype="float32", device="cpu")
    never_leaves = {"guard": {"allowance_tokens": 1e9}}  # the clock decides nothing here
    profile = speculating_profile(loaded, str(base / "noisy"), never_leaves)
    save_profile(profile, base / "fast.yaml")
    plain = {"decision": "plain", "tree": {"depth": 0}, "evidence": None}
    save_profile(speculating_profile(loaded, changes=plain), base / "plain.yaml")
    return base


def refused(done: Done, *words: str, code: int | None = None) -> None:
    """Check that a command ended with one clear sentence on stderr and nothing on stdout."""
    assert done.code != 0
    assert code is None or done.code == code
    assert done.out == ""
    assert "Traceback" not in done.err
    sentence = done.err.strip().splitlines()[-1]
    assert sentence.startswith("spectune"), done.err
    for word in words:
        assert word in sentence


def edited(base: Path, tmp_path: Path, changes: dict[str, Any], name: str = "fast.yaml") -> Path:
    """Return a profile edited by hand."""
    data = yaml.load((base / name).read_text(), yaml.SafeLoader)
    data["created"] = "2026-11-30T09:00:00Z"
    for key, value in changes.items():
        part, _, field = key.partition(".")
        if field:
            data[part][field] = value
        else:
            data[part] = value
    path = tmp_path / "edited.yaml"
    path.write_text(json.dumps(data))
    return path


# --- tune ---------------------------------------------------------------------------------------


def test_tune_writes_a_profile_and_prints_one_document(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.yaml"
    arguments = ("--target", base / "target", "--prompts", base / "prompts.jsonl", "--out", out)
    done = cli("tune", *arguments, *SMALL, "--json", "--threads", 1)
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["decision"] == load(out).decision
    assert "Plan:" in done.err
    for command in ("show", "check"):
        assert isinstance(json.loads(cli(command, out, "--json").out), dict)
        assert document["decision"] in cli(command, out).out
    assert cli("run", out, "--prompt", "abc", "--max-new-tokens", 4).code == 0


def test_a_dry_run_prints_its_plan_and_writes_nothing(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    arguments = ("--target", base / "target", "--prompts", base / "prompts.jsonl")
    dry = ("tune", *arguments, *SMALL, "--out", tmp_path / "x.yaml", "--dry-run")
    assert set(json.loads(cli(*dry, "--json").out)) == {"plan_s", "total_s"}
    assert cli(*dry).out.startswith("Plan: about ")
    assert list(tmp_path.iterdir()) == []


def test_a_half_broken_file_is_used_and_what_was_skipped_is_told(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text((base / "prompts.jsonl").read_text() + '{"prompt": "cut o')
    arguments = ("--target", base / "target", "--prompts", path, "--out", tmp_path / "x.yaml")
    done = cli("tune", *arguments, *SMALL, "--dry-run")
    assert done.code == 0
    assert "1 skipped (line 13: is not one complete JSON object)" in " ".join(done.err.split())
    done = cli("run", base / "plain.yaml", "--prompts", path, "--max-new-tokens", 2)
    assert done.code == 0
    assert "line 13" in done.err
    assert len(done.out.splitlines()) >= 12


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b"\n \n\n", "is empty"),
    "binary.jsonl": (b"\x00\x01\x02" * 40, "binary"),
    "utf16.jsonl": ('{"prompt": "abc"}\n'.encode("utf-16"), "UTF-16"),
    "latin.jsonl": (b'{"prompt": "caf\xe9 ole"}\n', "UTF-8"),
    "broken.jsonl": (b'{"prompt": "abc\n{"prompt"', "line 1"),
    "shapes.jsonl": (b'{"query": "abc"}\n{"text": "def"}\n', "query"),
    "numbers.json": (b"[1, 2, 3]", "record 1"),
    "half.json": (b'[{"prompt": "abc"}, {"pro', "JSON array"),
    "nulls.jsonl": (b'{"prompt": null}\n{"messages": []}\n', "line 1"),
    "columns.csv": (b"a,b\n1,2\n", "no column"),
    "kind.docx": (b"abc", ".jsonl"),
    "long.txt": (b"abcdefgh " * 100, "tokens"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_b38_a_prompt_file_that_cannot_be_used_is_refused_in_one_sentence(
    cli: Cli, base: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    content, reason = BAD_FILES[name]
    path.write_bytes(content)
    out = tmp_path / "out" / "x.yaml"
    out.parent.mkdir()
    done = cli("tune", "--target", base / "target", "--prompts", path, "--out", out, *SMALL)
    refused(done, reason, code=1)
    if name != "long.txt":
        refused(cli("run", base / "plain.yaml", "--prompts", path), reason, code=1)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("command", ["tune", "run"])
def test_a_prompt_file_that_is_not_there_or_a_folder(cli: Cli, base: Path, command: str) -> None:
    start = (command, *(("--target", base / "target") if command == "tune" else ()))
    start += (base / "plain.yaml",) if command == "run" else ()
    refused(cli(*start, "--prompts", base / "none.jsonl"), "There is no prompt file")
    refused(cli(*start, "--prompts", base), "is a folder")


def test_models_devices_and_dtypes_that_do_not_exist(cli: Cli, base: Path, tmp_path: Path) -> None:
    def tune(**changes: object) -> Done:
        options = {"target": base / "target", "prompts": base / "prompts.jsonl"} | {
            "out": tmp_path / "x.yaml"
        }
        pairs = [(f"--{key}", value) for key, value in (options | changes).items()]
        return cli("tune", *(word for pair in pairs for word in pair))

    (tmp_path / "hollow").mkdir()
    refused(tune(target=tmp_path / "nowhere"), "nowhere")
    refused(tune(target="no-such/model"), "no-such/model")
    refused(tune(target=tmp_path / "hollow"), "config.json")
    refused(tune(target=base / "prompts.jsonl"), ".gguf")
    refused(tune(draft=tmp_path / "nowhere"), "nowhere")
    refused(tune(draft="no-such/draft"), "no-such/draft")
    refused(tune(draft=tmp_path / "hollow"), "hollow")
    refused(tune(draft=base / "other-ids"), "tokenizer", "differ")
    refused(tune(device="tpu"), "tpu", "cpu", code=2)
    refused(tune(device="cuda:99"), "cuda:99", code=2)
    refused(tune(dtype="float8"), "float8", "bfloat16", code=2)
    refused(tune(target=""), "model folder")
    assert {path.name for path in tmp_path.iterdir()} == {"hollow"}


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        *((f"--{name}-prompts", n, 2) for name in ("tune", "holdout") for n in ("0", "-1", "x")),
        *(
            (f"--{name}", n, 2)
            for name in ("trials", "max-nodes", "max-depth")
            for n in ("0", "-3")
        ),
        *(("--max-new-tokens", n, 2) for n in ("0", "-1", "1.5")),
        *(("--max-prompt-tokens", n, 2) for n in ("0", "-1")),
        *(("--threads", n, 2) for n in ("0", "-1")),
        *(("--seed", n, 2) for n in ("-1", str(2**40), "x")),
        *(("--temperature", t, None) for t in ("-1", "nan", "inf", "warm")),
        *(("--sample-top-k", k, None) for k in ("-1", "0.5")),
        *(("--sample-top-p", p, None) for p in ("0", "1.5", "-1")),
        ("--max-depth", "5000", 2),
        ("--max-nodes", "1000000", 2),
        ("--max-new-tokens", str(MAX_POSITIONS), None),
        ("--out", "/nowhere/at/all.yaml", 1),
        ("--out", "/proc", 1),
        ("--no-such-option", "1", 2),
    ],
)
def test_values_out_of_range_are_refused(
    cli: Cli, base: Path, tmp_path: Path, option: str, value: str, code: int | None
) -> None:
    arguments = ["tune", "--target", base / "target", "--prompts", base / "prompts.jsonl"]
    arguments += ["--out", tmp_path / "x.yaml", "--dtype", "float32", option, value]
    done = cli(*arguments)
    named = ("--tune-prompts", "--holdout-prompts", "--trials")  # settings of other names
    word = value if option == "--out" else option if option in named else option.split("-")[-1]
    refused(done, word, code=code)
    assert list(tmp_path.iterdir()) == []


def test_answers_longer_than_the_context_are_refused_by_their_own_name(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    arguments = ("--target", base / "target", "--prompts", base / "prompts.jsonl")
    out = ("--out", tmp_path / "x.yaml")
    done = cli("tune", *arguments, *out, "--max-new-tokens", MAX_POSITIONS)
    refused(done, "max_new_tokens", str(MAX_POSITIONS))


def test_wrong_usage_exits_with_2_and_help_with_0(cli: Cli) -> None:
    assert cli().code == 2
    assert cli("no-such-command").code == 2
    assert cli("tune").code == 2
    assert cli("run", "x.yaml").code == 2
    assert cli("run", "x.yaml", "--prompt", "a", "--prompts", "b").code == 2
    for command in ((), ("tune",), ("run",), ("show",), ("check",)):
        done = cli(*command, "--help")
        assert (done.code, done.err) == (0, "")
    assert cli("--version").out.startswith("spectune ")


def test_help_gives_the_defaults_of_a_job(cli: Cli) -> None:
    text = " ".join(cli("tune", "--help").out.split())
    usual, quick = Settings(), Settings.quick()
    assert f"search on (default: {usual.n_tune}, {quick.n_tune} with --quick)" in text
    assert f"per round (default: {usual.max_nodes})" in text


# --- profiles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "check", "run"])
@pytest.mark.parametrize("content", [None, b"", b"\x00\x01", b"[1, 2]", b"a: {", b"name: 1\n"])
def test_a_file_that_is_no_profile(
    cli: Cli, tmp_path: Path, command: str, content: bytes | None
) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    done = cli(command, path, *(("--prompt", "abc") if command == "run" else ()))
    assert done.code == 1
    assert done.out == ""
    assert "Traceback" not in done.err
    assert done.err.startswith("spectune: ")
    assert str(path) in done.err


def test_check_notices_missing_and_damaged_measurements(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    path = edited(base, tmp_path, {"measurements": "gone.json.gz"})
    refused(cli("check", path), "gone.json.gz", code=1)
    (tmp_path / "gone.json.gz").write_bytes(b"no gzip")
    refused(cli("check", path), "gone.json.gz", code=1)


BAD_TREES: dict[str, tuple[dict[str, Any], str]] = {
    "negative depth": ({"tree.depth": -1}, "$.tree.depth is -1"),
    "fractional depth": ({"tree.depth": 2.5}, "$.tree.depth is 2.5"),
    "depth as text": ({"tree.depth": "3"}, "$.tree.depth is '3'"),
    "no depth": ({"tree.depth": None}, "$.tree.depth is null"),
    "no width": ({"tree.width": 0}, "$.tree.width is 0"),
    "no top-k": ({"tree.top_k": 0}, "$.tree.top_k is 0"),
    "fewer nodes than levels": ({"tree.nodes": 2}, "$.tree.nodes is 2"),
    "more nodes than it holds": ({"tree.nodes": 10_000}, "$.tree.nodes is 10000"),
    "top-k above the vocabulary": (
        {"tree": {"depth": 2, "width": 2, "top_k": 5000, "nodes": 5}},
        "tree.top_k is 5000",
    ),
}


@pytest.mark.parametrize("case", BAD_TREES)
def test_b07_a_tree_that_cannot_be_is_refused_even_when_trusted(
    cli: Cli, base: Path, tmp_path: Path, case: str
) -> None:
    changes, reason = BAD_TREES[case]
    done = cli("run", edited(base, tmp_path, changes), "--trust", "--prompt", "abc")
    refused(done, reason)


@pytest.mark.parametrize(
    "tree",
    [
        {"depth": 1, "width": 1, "top_k": 1, "nodes": 1},
        {"depth": 1, "width": 1, "top_k": 259, "nodes": 259},
        {"depth": 9, "width": 1, "top_k": 1, "nodes": 9},
        {"depth": 2, "width": 33, "top_k": 33, "nodes": 100},
        {"depth": 3, "width": 100, "top_k": 2, "nodes": 14},
    ],
)
def test_b07_an_unusual_tree_gives_what_plain_decoding_gives(
    cli: Cli, base: Path, tmp_path: Path, tree: dict[str, int]
) -> None:
    rest = ("--prompt", "abc", "--max-new-tokens", 20, "--json")
    plain = json.loads(cli("run", base / "plain.yaml", *rest).out)
    done = cli("run", edited(base, tmp_path, {"tree": tree}), "--trust", *rest)
    fast = json.loads(done.out)
    assert fast["results"][0][0]["token_ids"] == plain["results"][0][0]["token_ids"]
    assert fast["tree"] == "D{depth} W{width} K{top_k} N{nodes}".format(**tree)
    assert fast["guard"]["n_rounds"] == fast["results"][0][0]["rounds"]
    assert fast["results"][0][0]["drafted"] > 0


def test_b07_depth_zero_is_plain_whatever_else_the_tree_says(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    path = edited(base, tmp_path, {"tree.top_k": 7, "tree.nodes": 9}, "plain.yaml")
    done = cli("run", path, "--prompt", "abc", "--max-new-tokens", 5, "--json")
    document = json.loads(done.out)
    assert document["tree"] == "plain"
    assert document["guard"] is None
    assert document["results"][0][0]["drafted"] == 0


def test_b29_a_profile_from_elsewhere_is_plain_with_a_warning_unless_trusted(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    path = edited(base, tmp_path, {"device.name": "Another CPU"})
    rest = ("--prompt", "abc", "--max-new-tokens", 5, "--json")
    done = cli("run", path, *rest)
    assert done.code == 0
    assert json.loads(done.out)["tree"] == "plain"
    assert done.err.startswith("spectune: the profile ")
    assert "'Another CPU' in the profile" in done.err
    trusted = cli("run", path, *rest, "--trust")
    assert json.loads(trusted.out)["tree"] == load(path).tree.label()
    assert trusted.err == ""


def test_a_profile_whose_models_are_gone(cli: Cli, base: Path, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    path = edited(base, tmp_path, {"target.id": gone})
    refused(cli("run", path, "--prompt", "abc"), gone)
    path = edited(base, tmp_path, {"draft.id": gone})
    refused(cli("run", path, "--trust", "--prompt", "abc"), gone)


# --- run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
def test_b03_an_empty_prompt_is_refused(cli: Cli, base: Path, prompt: str) -> None:
    refused(cli("run", base / "fast.yaml", "--prompt", prompt), "prompt", code=2)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--max-new-tokens", 0), "max_new_tokens"),
        (("--max-new-tokens", -1), "max_new_tokens"),
        (("--max-new-tokens", 1000), "max_new_tokens"),
        (("--temperature", -1), "temperature"),
        (("--temperature", "nan"), "temperature"),
        (("--temperature", 1, "--sample-top-p", 0), "top_p"),
        (("--compare", "--stream"), "--stream"),
        (("--device", "tpu"), "tpu"),
    ],
)
def test_b03_run_options_out_of_range(
    cli: Cli, base: Path, options: tuple[object, ...], word: str
) -> None:
    refused(cli("run", base / "fast.yaml", "--prompt", "abc", *options), word)


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("compare", [(), ("--compare",)])
def test_a_limit_below_one(cli: Cli, base: Path, limit: int, compare: tuple[str, ...]) -> None:
    prompts = ("--prompts", base / "prompts.jsonl")
    refused(cli("run", base / "fast.yaml", *prompts, "--limit", limit, *compare), "limit", code=2)


def test_a_prompt_longer_than_the_context(cli: Cli, base: Path) -> None:
    refused(cli("run", base / "fast.yaml", "--prompt", "abc " * 100), str(MAX_POSITIONS))


def test_code_of_a_target_is_trusted_by_the_flag(
    cli: Cli, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def load_it(name: str, *, trust_remote_code: bool, **options: Any) -> LoadedTarget:
        asked.append(trust_remote_code)
        return load_target(name, **options)

    monkeypatch.setattr(engine.decoder, "load_target", load_it)
    command = ("run", base / "plain.yaml", "--prompt", "abc", "--max-new-tokens", 2)
    assert cli(*command).code == cli(*command, "--trust-remote-code").code == 0
    assert asked == [False, True]


def test_streamed_text_is_the_text(cli: Cli, base: Path) -> None:
    # Random bytes: nearly every character is broken or cut by the end of a round.
    for seed in range(3):
        sampled = ("--temperature", 1, "--seed", seed, "--trust")
        rest = ("--prompts", base / "prompts.jsonl", "--limit", 4, "--max-new-tokens", 40)
        whole = cli("run", base / "fast.yaml", *rest, *sampled)
        streamed = cli("run", base / "fast.yaml", *rest, *sampled, "--stream")
        assert whole.code == streamed.code == 0
        assert streamed.out == whole.out
        assert "\ufffd" in whole.out


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_an_answer_is_whole_in_a_pipe_and_not_obeyed_on_a_terminal(
    cli: Cli, base: Path, monkeypatch: pytest.MonkeyPatch, stream: tuple[str, ...]
) -> None:
    evil = "\x1b[2J\ta\u00a0b\x07\nc"
    monkeypatch.setattr(TextStream, "push", lambda self, ids: "")
    monkeypatch.setattr(TextStream, "finish", lambda self: evil)
    monkeypatch.setattr(
        SpeculativeDecoder,
        "result",
        lambda self, request: Generation(request.generated, evil, "length", request.stats),
    )
    command = ("run", base / "plain.yaml", "--prompt", "abc", "--max-new-tokens", 2, *stream)
    assert cli(*command).out == f"{evil}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli(*command).out == "\ufffd[2J\ta\u00a0b\ufffd\nc\n"


def test_every_turn_is_answered_in_order_with_the_answers_before_it(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text('{"turns": ["abc", "def", "ghi"]}\n{"prompt": "xyz"}\n')
    rest = ("--prompts", path, "--max-new-tokens", 10, "--json")
    results = json.loads(cli("run", base / "fast.yaml", *rest).out)["results"]
    assert [len(turns) for turns in results] == [3, 1]
    decoder = SpeculativeDecoder.from_profile(base / "plain.yaml")
    chat: list[dict[str, str]] = []
    for question, answer in zip(("abc", "def", "ghi"), results[0], strict=True):
        chat.append({"role": "user", "content": question})
        expected = decoder.generate(chat, max_new_tokens=10)
        assert answer["token_ids"] == expected.token_ids
        chat.append({"role": "assistant", "content": answer["text"]})


def test_b24_run_prints_one_document_with_counts_that_add_up(cli: Cli, base: Path) -> None:
    rest = ("--prompts", base / "prompts.jsonl", "--limit", 3, "--max-new-tokens", 16, "--json")
    document = json.loads(cli("run", base / "fast.yaml", *rest).out)
    assert len(document["results"]) == 3
    for (answer,) in document["results"]:
        assert len(answer["token_ids"]) == 16 == 1 + answer["round_tokens"]
        assert answer["round_tokens"] == answer["rounds"] + sum(answer["accepted_by_depth"])
        assert answer["finish_reason"] == "length"


def test_compare_gives_both_speeds_tau_and_whether_the_ids_are_equal(cli: Cli, base: Path) -> None:
    rest = ("--prompts", base / "prompts.jsonl", "--limit", 3, "--max-new-tokens", 16)
    compare = ("run", base / "fast.yaml", *rest, "--compare")
    figures = json.loads(cli(*compare, "--json").out)
    assert figures["prompts"] == figures["equal_token_ids"] == 3
    assert figures["speedup"] == pytest.approx(
        figures["tokens_per_s"] / figures["plain_tokens_per_s"]
    )
    assert 1 < figures["tau"] <= 1 + load(base / "fast.yaml").tree.depth
    assert figures["tau"] > 1
    table = cli(*compare).out
    assert "Token ids equal on 3 of 3 prompts." in table
    assert load(base / "fast.yaml").tree.label() in table
    assert "tau" in table
    plain = json.loads(cli("run", base / "plain.yaml", *rest, "--compare", "--json").out)
    assert (plain["tree"], plain["tau"]) == ("plain", 1.0)


def test_filters_given_without_a_temperature_are_not_ignored(
    cli: Cli, base: Path, tmp_path: Path
) -> None:
    path = edited(base, tmp_path, {"sampling": {"temperature": 1.0, "top_k": 50}})
    rest = ("--prompt", "abc", "--max-new-tokens", 12, "--json")

    def ids(*options: object) -> list[int]:
        document = json.loads(cli("run", path, *rest, "--trust", *options).out)
        return list(document["results"][0][0]["token_ids"])

    greedy = json.loads(cli("run", base / "plain.yaml", *rest).out)["results"][0][0]["token_ids"]
    assert ids() != greedy
    assert ids("--sample-top-k", 1) == greedy  # a single token is left to draw
    assert ids("--temperature", 1) == ids()  # the profile's top_k stays


# --- as people start it -------------------------------------------------------------------------


def test_the_installed_command(base: Path) -> None:
    command = Path(sys.executable).with_name("spectune")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [str(command), *(str(argument) for argument in arguments)]
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    assert run("show", base / "fast.yaml").returncode == 0
    missing = run("show", base / "none.yaml")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == f"spectune: {base / 'none.yaml'} does not exist: check the path.\n"
    done = run("run", base / "fast.yaml", "--prompt", "abc", "--max-new-tokens", 5, "--trust")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
