"""The arrows between the packages: autotune -> engine -> profiles, never back."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "profiles": {"engine", "autotune", "torch", "transformers", "optuna"},
    "engine": {"autotune", "optuna"},
    "autotune": {"optuna"},
}
EXCEPTIONS = {
    (f"autotune/search/{name}.py", "optuna")
    for name in ("measured", "shared", "storage", "workers")
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_module_imports_against_the_arrows(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found = {name.split(".")[0] for name in names} & FORBIDDEN[package]
            here = path.relative_to(ROOT).as_posix()
            assert not {name for name in found if (here, name) not in EXCEPTIONS}, here
