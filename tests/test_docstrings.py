"""Everything public says what it is."""

import ast
import pydoc
from collections.abc import Iterator
from pathlib import Path

import autotune
import engine
from profiles import Profile

ROOT = Path(__file__).parent.parent
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Documented]]:
    """Yield public functions and classes, and the public methods of public classes."""
    for node in body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def test_every_module_and_every_public_class_and_function_has_a_docstring() -> None:
    bare, n_seen = [], 0
    for package in ("autotune", "engine", "profiles"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ast.parse(path.read_text("utf-8"))
            where = path.relative_to(ROOT).as_posix()
            if not ast.get_docstring(module):
                bare.append(where)
            for name, node in public(module.body, ""):
                n_seen += 1
                if not ast.get_docstring(node):
                    bare.append(f"{where}: {name}")
    assert n_seen > 500
    assert not bare


def test_what_raises_our_errors_says_so() -> None:
    """A public function that raises a `SpectuneError` itself has a `Raises:` in its docstring."""
    silent = []
    for package in ("autotune", "engine", "profiles"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name, node in public(ast.parse(path.read_text("utf-8")).body, ""):
                if isinstance(node, ast.ClassDef) or "Raises:" in (ast.get_docstring(node) or ""):
                    continue
                raised = {
                    ast.unparse(part.exc.func)
                    for part in ast.walk(node)
                    if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call)
                }
                if raised & {"SpectuneError", "UsageError"}:
                    silent.append(f"{path.relative_to(ROOT)}: {name}")
    assert not silent


def test_help_on_a_record_tells_what_its_fields_mean() -> None:
    for name, field in Profile.model_fields.items():
        assert f"    {name}: {field.description}" in (Profile.__doc__ or "")


def test_pydoc_shows_what_is_loaded_when_it_is_used() -> None:
    for package, names in ((engine, ["SpeculativeDecoder"]), (autotune, ["tune", "Models"])):
        text = pydoc.plain(pydoc.render_doc(package))
        assert all(name in text for name in names)
        assert "Raises:" in text
