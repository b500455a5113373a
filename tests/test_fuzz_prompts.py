"""Prompt files of any content: every record is read in full, or named as skipped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from autotune.sample import PromptFile, build_sample, read_prompts
from autotune.sample.records import SHAPES, UNREAD
from fuzzing import TEXTS, cases, check_message, mangled, run, values, within
from pairs import tokenizer
from profiles.errors import SpectuneError

TOKENIZER = tokenizer()

words = st.one_of(
    st.sampled_from(TEXTS), st.sampled_from(("Say hi.", "What is 2 + 2?")), st.text(max_size=9)
)
roles = st.sampled_from(("user", "assistant", "system", "human", "gpt", "User", "tool", "", None))
messages = st.fixed_dictionaries(
    {},
    optional={
        **{"role": roles, "from": roles, "content": st.one_of(words, values), "value": words},
        **{"tool_calls": values, "weight": values},
    },
)
contents = st.one_of(
    words,
    st.lists(words, max_size=3),
    st.lists(messages, max_size=4),
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=2),
    values,
)
records = st.one_of(
    st.dictionaries(st.sampled_from((*SHAPES, *UNREAD, "id", "answer")), contents, max_size=3),
    st.fixed_dictionaries({"prompt": words}),
    st.fixed_dictionaries({"messages": st.lists(messages, min_size=1, max_size=4)}),
    values,
)


def attempt(path: Path) -> PromptFile | None:
    """Read a file and split it; None where it is refused in a sentence."""
    try:
        with within():
            file = read_prompts(path)
            build_sample(
                file, TOKENIZER, seed=0, n_tune=3, n_holdout=3, max_prompt_tokens=64
            ).summary()
    except SpectuneError as error:
        check_message(str(error))
        return None
    return file


def texts_in(value: Any) -> set[str]:
    """Return every text of a record."""
    if isinstance(value, dict):
        return set().union(*map(texts_in, value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*map(texts_in, value)) if value else set()
    return {value} if isinstance(value, str) else set()


def check_content(file: PromptFile, known: Callable[[int], Any]) -> None:
    """Check that prompts say what their records say, word for word."""
    for prompt in file.records:
        said = texts_in(known(prompt.line))
        for turn in prompt.turns:
            for message in turn:
                assert all(part in said for part in _parts(message.content, said)), message


def _parts(content: str, said: set[str]) -> list[str]:
    """Return the texts a message was joined of; itself where it was not joined."""
    if content in said:
        return [content]
    return (
        [text for text in content.replace("\n\n", "\0").replace("\n", "\0").split("\0") if text]
        if not any("\n" in text for text in said)
        else []
    )


@cases(few=80, many=2500)
def test_json_lines_are_read_in_full_or_named(n_cases: int, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"

    @given(st.lists(records, min_size=1, max_size=5), st.booleans())
    def check(drawn: list[Any], as_array: bool) -> None:
        lines = [json.dumps(record) for record in drawn]
        path.write_text(f"[{','.join(lines)}]" if as_array else "\n".join(lines), "utf-8")
        file = attempt(path)
        if file is not None and (as_array or not lines[0].startswith("[")):
            assert len(file.records) + len(file.skipped) == len(drawn)
            check_content(file, lambda line: json.loads(lines[line - 1]))

    run(check, n_cases)


@cases(few=60, many=2500)
def test_mangled_files_of_every_kind_are_read_or_refused(n_cases: int, tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}, please.", "id": n} for n in range(4)]
    frame = pd.DataFrame(rows)
    frame.to_parquet(tmp_path / "good.parquet")
    kinds = {
        ".jsonl": "\n".join(map(json.dumps, rows)).encode(),
        ".json": json.dumps(rows).encode(),
        ".csv": frame.to_csv(index=False).encode(),
        ".txt": "\n".join(row["prompt"] for row in rows).encode(),
        ".parquet": (tmp_path / "good.parquet").read_bytes(),
    }
    choices = [
        st.tuples(st.just(ending), st.one_of(mangled(data), st.binary(max_size=40)))
        for ending, data in kinds.items()
    ]

    @given(st.one_of(choices))
    def check(drawn: tuple[str, bytes]) -> None:
        ending, data = drawn
        path = tmp_path / f"prompts{ending}"
        path.write_bytes(data)
        file = attempt(path)
        if (
            file is not None
            and ending in (".jsonl", ".txt")
            and not data.lstrip().startswith(b"[")
        ):
            n_lines = sum(
                bool(line.strip()) for line in data.decode("utf-8-sig", "ignore").split("\n")
            )
            assert len(file.records) + len(file.skipped) == n_lines

    run(check, n_cases)


columns = st.one_of(
    st.sampled_from((*SHAPES, *UNREAD)), st.text(max_size=5), st.integers(), st.booleans()
)
cells = st.one_of(
    st.lists(words, min_size=3, max_size=3),
    st.lists(st.one_of(st.none(), words), min_size=3, max_size=3),
    st.lists(st.integers(-(2**60), 2**60), min_size=3, max_size=3),
    st.lists(st.floats(), min_size=3, max_size=3),
    st.lists(st.binary(max_size=4), min_size=3, max_size=3),
    st.lists(st.lists(words, max_size=2), min_size=3, max_size=3),
    st.lists(st.datetimes(), min_size=3, max_size=3),
    st.lists(st.fixed_dictionaries({"role": words, "content": words}), min_size=3, max_size=3),
)


@cases(few=30, many=800)
def test_tables_of_any_columns_are_read_or_refused(n_cases: int, tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"

    @given(st.dictionaries(columns, cells, min_size=1, max_size=3))
    def check(table: dict[Any, list[Any]]) -> None:
        try:
            pd.DataFrame(table).to_parquet(path)
        except Exception:  # pandas cannot write it, so nobody has it
            return
        file = attempt(path)
        if file is not None:
            assert len(file.records) + len(file.skipped) == 3

    run(check, n_cases)


@cases(few=20, many=600)
def test_tables_of_text_keep_every_cell(n_cases: int, tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"

    @given(st.lists(words, min_size=1, max_size=4), st.sampled_from(SHAPES))
    def check(drawn: list[str], column: str) -> None:
        try:
            pd.DataFrame({column: drawn, "id": range(len(drawn))}).to_csv(path, index=False)
        except UnicodeEncodeError:  # pandas writes no half of a surrogate pair
            return
        file = attempt(path)
        if file is not None and column in ("prompt", "instruction"):
            assert len(file.records) + len(file.skipped) == len(drawn)
            said = {prompt.turns[0][0].content for prompt in file.records}
            assert said <= set(drawn)

    run(check, n_cases)
