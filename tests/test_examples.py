"""What the README and the examples show runs as shown, on a tiny pair."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

import pairs
from autotune.commands.cli import parser
from autotune.sample import read_prompts
from profiles import load

ROOT = Path(__file__).parent.parent
DOMAINS = ("code", "math", "chat", "rewrite", "atypical")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pairs.save_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sample") / "toy.jsonl"
    texts = [f"{word} " * 3 for word in ("apple river stone cloud lamp " * 6).split()]
    lines = [json.dumps({"prompt": text + str(i) * 9}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def run_example(name: str, *arguments: str) -> None:
    namespace = runpy.run_path(str(ROOT / "examples" / name), run_name="example")
    namespace["main"](*arguments)


def test_examples_tune_and_decode(
    target: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned.yaml"
    run_example("tune_domain.py", str(sample), str(target), "lookup", str(out))
    decision = load(out).decision
    assert capsys.readouterr().out.startswith(decision)
    run_example("run_profile.py", str(out), "abc abc")
    assert re.search(r"\d+ tokens in \d+ rounds, length", capsys.readouterr().out)
    run_example("choose_profile.py", str(tmp_path), str(target), "toy")
    assert capsys.readouterr().out.startswith(f"{load(out).name}: {decision}")
    run_example("choose_profile.py", str(tmp_path), str(target), "law")
    assert "tuned.yaml: domain.name: toy in the profile, law wanted" in capsys.readouterr().out


def test_readme_python_runs_as_written(target: Path, sample: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    decode, tune = blocks
    profile = tmp_path / "toy.yaml"
    substitutes = {
        "out/demo-rewrite.yaml": str(profile),
        "out/rewrite.yaml": str(profile),
        "examples/domains/rewrite.jsonl": str(sample),
        '"demo"': f'"{target}"',
    }
    for block in (tune, decode):  # the profile must exist before it is used
        for shown, used in substitutes.items():
            block = block.replace(shown, used)
        exec(compile(block, "README.md", "exec"), {})
    assert load(profile).domain.name == "toy"


def readme_commands() -> list[str]:
    """Return the command lines of the README, without `spectune` itself."""
    text = (ROOT / "README.md").read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^    (?:\.venv/bin/)?spectune (.*)$", text, re.M)
    return [line.replace(" ...", " --target T --prompts P") for line in lines]


@pytest.mark.parametrize("line", readme_commands())
def test_readme_commands_are_understood(line: str) -> None:
    arguments = parser().parse_args(shlex.split(line, comments=True))
    assert callable(arguments.command)


@pytest.mark.parametrize("domain", DOMAINS)
def test_domain_samples_are_whole(domain: str) -> None:
    file = read_prompts(ROOT / "examples" / "domains" / f"{domain}.jsonl")
    assert not file.skipped
    assert len({prompt.id for prompt in file.records}) == len(file.records) >= 64
