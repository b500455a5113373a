"""What a fresh interpreter loads, and what it says when it finds somebody else's package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toy_profiles import YAML, write

HEAVY = ("torch", "transformers", "optuna", "pandas", "sklearn", "scipy", "matplotlib")
MAIN = "from autotune.commands.cli import main; "


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "code",
    [
        "import profiles",
        "import engine",
        "import autotune",
        "import autotune.commands.cli",
        MAIN + "main(['--help'])",
        MAIN + "main(['tune', '--help'])",
        MAIN + "assert main(['show', 'toy.yaml']) == 0",
        MAIN + "assert main(['show', 'toy.yaml', 'toy.yaml']) == 0",
        MAIN + "assert main(['show', '.']) == 0",
        MAIN + "assert main(['check', 'toy.yaml']) == 0",
        MAIN + "assert main(['export', 'toy.yaml', '--to', 'eagle']) == 0",
        MAIN + "assert main(['what-if', 'toy.yaml', '--json']) == 0",
    ],
)
def test_light_commands_and_imports_load_no_torch(tmp_path: Path, code: str) -> None:
    write(tmp_path, YAML.replace("measurements: toy-code-epyc.measurements.json.gz\n", ""))
    program = (
        "import sys\n"
        "try:\n"
        f"    {code}\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0, stop.code\n"
        f"print('loaded:', *sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)\n"
    )
    done = run_python("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "loaded:"


def test_a_report_is_made_without_torch(tmp_path: Path) -> None:
    write(tmp_path, YAML.replace("measurements: toy-code-epyc.measurements.json.gz\n", ""))
    program = (
        "import sys\n"
        "from autotune.commands.cli import main\n"
        "assert main(['show', 'toy.yaml', '--html', 'toy.html']) == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = run_python("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "toy.html").exists()


@pytest.mark.parametrize(
    ("stray", "package"),
    [("engine", "autotune"), ("profiles", "autotune"), ("profiles", "engine")],
)
def test_a_stray_module_beside_a_script_is_named_in_one_sentence(
    tmp_path: Path, stray: str, package: str
) -> None:
    (tmp_path / f"{stray}.py").write_text("")
    (tmp_path / "script.py").write_text(f"import {package}\n")
    done = run_python("script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: spectune's `{package}` needs its own `{stray}`, but Python finds "
        f"{tmp_path / stray}.py first; rename that file, or run Python with -P"
    )
