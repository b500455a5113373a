"""Reading prompt files: every documented shape in full, everything else refused in words."""

import json
import sys
from pathlib import Path

import pytest

from autotune.sample import Message, Prompt, PromptFile, read_prompts
from profiles.errors import SpectuneError


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read_records(tmp_path: Path, *records: object) -> PromptFile:
    return read_prompts(write(tmp_path / "prompts.jsonl", *records))


def read_one(tmp_path: Path, record: object) -> list[list[tuple[str, str]]]:
    (prompt,) = read_records(tmp_path, record).records
    return [[(role, content) for role, content in turn] for turn in prompt.turns]


def reason_for(tmp_path: Path, record: object) -> str:
    """Return why ``record`` is skipped; a good record before it gives it line 2."""
    found = read_records(tmp_path, {"prompt": "good"}, record)
    assert [prompt.line for prompt in found.records] == [1]
    ((line, reason),) = found.skipped
    assert line == 2
    return reason


def refusal(path: Path) -> str:
    """Return the message with which a file is refused: one sentence that names the file."""
    with pytest.raises(SpectuneError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith(".")
    assert "\n" not in message
    return message


# Shapes


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        (  # HumanEval: the code stub keeps its last newline
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "x", "entry_point": "f"},
            [[("user", "def f():\n")]],
        ),
        (  # Alpaca
            {"instruction": "Translate.", "input": "Hallo", "output": "Hello"},
            [[("user", "Translate.\n\nHallo")]],
        ),
        ({"instruction": "Sing.", "input": "", "output": "La"}, [[("user", "Sing.")]]),
        ({"instruction": "Sum up.", "context": "Text."}, [[("user", "Sum up.\n\nText.")]]),
        (  # a chat list: the answer asked for is dropped, earlier ones stay
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"},
                    {"role": "assistant", "content": "d"},
                ]
            },
            [[("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]],
        ),
        (  # MT-bench: every turn is decoded
            {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["r"]},
            [[("user", "a")], [("user", "b")]],
        ),
        (  # ShareGPT
            {
                "id": "x_0",
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                    {"from": "human", "value": "c"},
                    {"from": "gpt", "value": "d"},
                ],
            },
            [[("user", "a"), ("assistant", "b"), ("user", "c")]],
        ),
        (  # ShareGPT that starts with the assistant, after a system message
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "gpt", "value": "b"},
                    {"from": "human", "value": "c"},
                ]
            },
            [[("system", "s"), ("user", "c")]],
        ),
        (  # a chat's own greeting is part of what the target sees
            {
                "messages": [
                    {"role": "assistant", "content": "Hello!"},
                    {"role": "user", "content": "Hi"},
                ]
            },
            [[("assistant", "Hello!"), ("user", "Hi")]],
        ),
        (  # the keys of one list in the field of the other
            {"conversations": [{"role": "User", "content": "a"}]},
            [[("user", "a")]],
        ),
        ({"prompt": ["a", "b"]}, [[("user", "a")], [("user", "b")]]),
        ({"prompt": [{"role": "user", "content": "a"}]}, [[("user", "a")]]),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    }
                ]
            },
            [[("user", "a\nb")]],
        ),
        # Several shapes at once: the most complete one that is not empty counts.
        (
            {"prompt": "a", "messages": [{"role": "user", "content": "A"}]},
            [[("user", "A")]],
        ),
        ({"prompt": "a", "messages": None, "turns": [], "instruction": " "}, [[("user", "a")]]),
    ],
)
def test_every_shape_is_read_in_full(
    tmp_path: Path, record: dict[str, object], turns: list[list[tuple[str, str]]]
) -> None:
    assert read_one(tmp_path, record) == turns


def test_roles_are_read_by_name_not_by_position(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert read_one(tmp_path, {"messages": messages}) == [[("user", "a"), ("user", "b")]]


def test_a_mix_of_shapes_keeps_what_is_usable_and_the_lines_of_the_rest(tmp_path: Path) -> None:
    found = read_records(
        tmp_path,
        {"prompt": "a"},
        {"conversations": []},
        {"turns": ["b"]},
        {"text": "c", "label": 1},
        {"instruction": "d"},
    )
    assert [prompt.line for prompt in found.records] == [1, 3, 5]
    assert [skipped.line for skipped in found.skipped] == [2, 4]
    assert found.skipped[0].reason == "'conversations' is an empty list (keys: conversations)"
    assert "none of the fields" in found.skipped[1].reason
    assert found.skipped[1].reason.endswith("(keys: text, label)")
    assert found.unit == "line"


# Records that are skipped


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": None}, "'prompt' is null, not text (keys: prompt)"),
        ({"prompt": 7, "id": 1}, "'prompt' is a number, not text (keys: prompt, id)"),
        ({"prompt": True}, "'prompt' is true or false"),
        ({"prompt": "  \n"}, "'prompt' is empty"),
        ({"prompt": {"text": "a"}}, "'prompt' is an object, not text"),
        ({"prompt": [1, 2]}, "'prompt' holds a number where a message is expected"),
        ({"prompt": float("nan")}, "'prompt' is a number"),
        ({"prompt": "\ud800"}, "half a character"),
        ({"turns": "a"}, "'turns' is text, not a list"),
        ({"turns": ["a", None]}, "'turns' is null, not text"),
        ({"turns": [["a"]]}, "'turns' holds text, and only text parts are read"),
        ({"messages": {"role": "user", "content": "a"}}, "'messages' is an object, not a list"),
        ({"messages": ["a"]}, "'messages' holds text where a message is expected"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role 'tool', which is not read"),
        ({"messages": [{"content": "a"}]}, "role None, which is not read"),
        ({"messages": [{"role": "user", "content": 5}]}, "the user message in 'messages' is a nu"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user message"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "system", "content": "b"},
                ]
            },
            "ends with a system message",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]},
            "a part of type 'image_url', and only text parts are read",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b", "tool_calls": [{"id": 1}]},
                ]
            },
            "'tool_calls' would be dropped",
        ),
        ({"prompt": "a", "system": "Be brief."}, "'system' would be dropped; put it into the pro"),
        ({"prompt": "Translate.", "input": "Hallo"}, "'input' would be dropped"),
        ({"instruction": "a", "input": 5}, "'instruction' is a number, not text"),
        ({"data": {"prompt": "a"}}, "none of the fields"),
        (["a"], "is a list, not a JSON object"),
        ("a", "is text, not a JSON object"),
    ],
)
def test_a_record_that_cannot_be_read_in_full_is_skipped_with_the_reason(
    tmp_path: Path, record: object, reason: str
) -> None:
    assert reason in reason_for(tmp_path, record)


def test_many_long_keys_are_cut_in_the_reason(tmp_path: Path) -> None:
    reason = reason_for(tmp_path, {f"{'k' * 100}{index}": 1 for index in range(100)})
    assert len(reason) < 600
    assert reason.endswith(", ...)")


def test_a_half_broken_last_line_is_skipped_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    whole = json.dumps({"prompt": "größer"}, ensure_ascii=False).encode()
    for n_cut in range(1, len(whole)):  # inside a character too
        path.write_bytes(b'{"prompt": "a"}\n\n' + whole[:-n_cut])
        found = read_prompts(path)
        assert len(found.records) == 1
        assert found.skipped == [(3, "is not one complete JSON object")]


def test_deep_nesting_is_a_skipped_line_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ' + "[" * 200_000 + "\n")
    assert read_prompts(path).skipped == [(2, "is not one complete JSON object")]


def test_line_separators_inside_a_string_do_not_end_the_record(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\r\n', encoding="utf-8")
    assert [p.turns[0][0].content for p in read_prompts(path).records] == ["a\u2028b\x85c", "d"]


# Kinds of file


def test_a_json_array_counts_records(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt": "a"}, 5, {"turns": ["b"]}], indent=2))
    found = read_prompts(path)
    assert [prompt.line for prompt in found.records] == [1, 3]
    assert found.skipped == [(2, "is a number, not a JSON object")]
    assert found.unit == "record"


def test_json_lines_may_be_named_json(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.json", {"prompt": "a"}, {"prompt": "b"})
    assert len(read_prompts(path).records) == 2


def test_a_text_file_has_one_prompt_per_line_that_is_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('First?\r\n\n  \nSecond: 5\n42\n{"prompt": "a"}\n')
    found = read_prompts(path)
    texts = [(prompt.line, prompt.turns[0][0].content) for prompt in found.records]
    assert texts == [(1, "First?"), (4, "Second: 5"), (5, "42")]
    assert found.skipped == [(6, "is a JSON object; name the file .jsonl")]


def test_csv_keeps_text_that_looks_like_something_else(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text('id,prompt\n1,NA\n2,007\n3,"Two\nlines, and a comma"\n4,\n')
    found = read_prompts(path)
    texts = [prompt.turns[0][0].content for prompt in found.records]
    assert texts == ["NA", "007", "Two\nlines, and a comma"]
    assert found.skipped == [(4, "'prompt' is empty (keys: id, prompt)")]


def test_csv_cells_hold_lists_as_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text('turns,prompt\n"[""a"", ""b""]",\n,c\n[broken,\n')
    found = read_prompts(path)
    assert [len(prompt.turns) for prompt in found.records] == [2, 1]
    assert [skipped.line for skipped in found.skipped] == [3]
    assert "'turns' is text, not a list" in found.skipped[0].reason


def test_csv_never_drops_what_stands_behind_an_unquoted_comma(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("prompt\nHello\nHello, world\n")
    found = read_prompts(path)
    assert len(found.records) == 1
    assert found.skipped == [(2, "has more or fewer cells than the header; quote its commas")]


def test_parquet_rows_become_records(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "prompts.parquet"
    chat = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    table = pa.table(
        {
            "conversations": [chat, None, []],
            "prompt": [None, "c", None],
            "picture": [b"\xff", b"\xfe", b"\0"],
        }
    )
    parquet.write_table(table, path)
    found = read_prompts(path)
    assert [prompt.turns for prompt in found.records] == [
        ((Message("user", "a"),),),
        ((Message("user", "c"),),),
    ]
    assert [skipped.line for skipped in found.skipped] == [3]


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompts.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refusal(path)


# Files that are refused


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b"", "is empty; write at least one prompt"),
        ("a.jsonl", b" \n\n", "is empty"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"prompt\n", "is empty"),
        ("a.json", b"[]", "is empty"),
        ("a.jsonl", '{"prompt": "a"}'.encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("a.txt", "abc".encode("utf-16-be"), "is binary data (or UTF-16), not text"),
        ("a.jsonl", b"\x7fELF\x00\x01", "is binary data"),
        ("a.txt", b"good\ncaf\xe9 au lait\n", "is not UTF-8 (byte 0xe9 on line 2); save it as"),
        ("a.json", b'[{"prompt": "a"}, {"pro', "is not one complete JSON array"),
        ("a.csv", b"question,answer\n1,2\n", "its columns are question, answer, so rename"),
        ("a.csv", b'prompt\n"open', "is not a well-formed CSV table"),
        ("a.parquet", b"PAR1 but not really", "is not a readable Parquet file"),
        ("a.md", b"# Prompts", "use .jsonl, .json, .txt, .csv or .parquet"),
        ("a", b"text", "use .jsonl, .json, .txt, .csv or .parquet"),
    ],
)
def test_an_unusable_file_is_refused_with_a_remedy(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(data)
    assert words in refusal(path)


def test_a_file_without_a_usable_record_names_the_first_reasons(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "a.jsonl", *({"question": str(i)} for i in range(5))))
    assert "line 1: has none of the fields" in message
    assert "(keys: question)" in message
    assert "line 3:" in message
    assert "line 4:" not in message
    assert "and 2 more" in message


def test_missing_folder_and_oversized_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "check the path" in refusal(tmp_path / "nowhere.jsonl")
    assert "is a folder; name one file" in refusal(tmp_path)
    path = write(tmp_path / "a.jsonl", {"prompt": "a"})
    monkeypatch.setattr("autotune.sample.prompts.MAX_FILE_BYTES", 10)
    assert "above the limit of" in refusal(path)


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"prompt": "a"}'), ("a.csv", "prompt\na"), ("a.txt", "a")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        (prompt,) = read_prompts(tmp_path / name).records
        assert prompt.turns == ((Message("user", "a"),),)


# Ids


def test_the_id_depends_on_the_content_alone() -> None:
    def prompt(*texts: str, line: int = 0) -> Prompt:
        return Prompt(tuple((Message("user", text),) for text in texts), line)

    assert prompt("a", "b", line=1).id == prompt("a", "b", line=2).id
    assert len({prompt("a").id, prompt("b").id, prompt("a", "b").id, prompt("ab").id}) == 4
