import errno
import os
import re
import stat

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiles import Profile, SpectuneError, atomic_write, load, save, to_yaml
from toy_profiles import PLAIN_CHANGES, YAML, data, profile, write


def refusal(path):
    with pytest.raises(SpectuneError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def edited(folder, old, new):
    assert YAML.count(old) == 1, old
    return write(folder, YAML.replace(old, new))


def test_a_profile_returns_as_it_was_saved(tmp_path):
    for made in (load(write(tmp_path)), profile(PLAIN_CHANGES)):
        save(made, tmp_path / "again.yaml")
        assert load(tmp_path / "again.yaml") == made
        assert to_yaml(load(tmp_path / "again.yaml")) == to_yaml(made)


def test_the_file_is_made_for_people(tmp_path):
    text = to_yaml(profile({"noise": {"spread": 0.123456789, "drift": 1e-9}}))
    assert text.startswith("# ")
    assert "`spectune show FILE`" in text
    assert "tree: {depth: 4, width: 3, top_k: 3, nodes: 10}\n" in text
    assert "created: 2026-11-30T09:00:00Z\n" in text
    assert "noise: {spread: 0.123457, drift: 1.0e-09}\n" in text
    assert "driver" not in text  # a missing fact is left out
    keys = re.findall(r"^(\w+):", text, re.M)
    assert keys == [name for name in Profile.model_fields if name in keys]  # as declared


def test_other_yaml_readers_see_the_same_profile():
    made = profile({"name": "012", "target.revision": "1e5", "domain.name": "no"})
    seen = yaml.safe_load(to_yaml(made))
    assert (seen["name"], seen["target"]["revision"], seen["domain"]["name"]) == (
        "012",
        "1e5",
        "no",
    )
    assert seen["evidence"] == data()["evidence"]


def test_a_time_in_another_zone_is_written_in_utc():
    made = profile({"created": "2026-11-30T11:00:00.5+02:00"})
    assert "created: 2026-11-30T09:00:00.500000Z\n" in to_yaml(made)


@pytest.mark.parametrize(
    "name",
    ["no", "Off", "012", "089", "1:30", "1e5", "1e-3", "0x1f", "0b1", "0o17", "1_000", "-.5", ".5"]
    + ["1.0e3", "null", "~", "true", "2026-11-30", "2.13", "12", ".nan", "-.inf", "a: b", "# x"]
    + ["- x", "{x", "&a", "*a", "!x", "=", "<<", "y", "\u00e9\U0001f600", "two\nlines", "\ttab"]
    + [
        " space ",
        "'quoted'",
        "\x85",
        "a\u2028b",
        "\ufeffx",
        "\x07",
        "a" * 300,
        "0b" * 32,
        "%x",
        "@x",
        "`x",
    ],
)
def test_any_text_survives_saving(tmp_path, name):
    made = profile({"name": name})
    save(made, tmp_path / "p.yaml")
    assert load(tmp_path / "p.yaml") == made
    assert yaml.safe_load(to_yaml(made))["name"] == name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("depth: 4", "depth: yes", "$.tree.depth is yes: readers of YAML disagree"),
        ("name: code", "name: no", "$.domain.name is no: readers of YAML disagree"),
        ("dtype: bfloat16", "dtype: off", "$.target.dtype is off: readers of YAML disagree"),
        ("depth: 4", "depth: true", "$.tree.depth is true: it must be a whole number"),
        ("spread: 0.01", "spread: 1e-3", "$.noise.spread is 1e-3: readers of YAML disagree"),
        ("spread: 0.01", "spread: '1e-3'", "$.noise.spread is '1e-3': it must be a number; write"),
        ("nodes: 10", "nodes: 012", "$.tree.nodes is 012: readers of YAML disagree"),
        ("nodes: 10", "nodes: 0x0a", "$.tree.nodes is 0x0a: readers of YAML disagree"),
        ("n_tune: 32", "n_tune: 1:30", "$.domain.n_tune is 1:30: readers of YAML disagree"),
        ("spread: 0.01", "spread: .nan", "$.noise.spread is nan: it must be a finite number"),
        ("spread: 0.01", "spread: .inf", "$.noise.spread is inf: it must be a finite number"),
        ("drift: -0.02", "drift: -.inf", "$.noise.drift is -inf: it must be a finite number"),
        ("spread: 0.01", "spread: 1.0e+999", "$.noise.spread is inf: it must be a finite number"),
        ("spread: 0.01", "spread: NaN", "$.noise.spread is 'NaN': it must be a number"),
        ("depth: 4", "depth: 4.0", "$.tree.depth is 4.0: it must be a whole number"),
        ("depth: 4", "depth: four", "$.tree.depth is 'four': it must be a whole number"),
        ("depth: 4", "depth: '4'", "$.tree.depth is '4': it must be a whole number"),
        ("depth: 4", "depth: -4", "$.tree.depth is -4: it must be at least 0; correct it"),
        ("depth: 4", "depth:", "$.tree.depth is null: it must be a whole number"),
        ("depth: 4, ", "", "$.tree.depth is missing: add it."),
        ("nodes: 10", "nodes: 500", "$.tree.nodes is 500: depth 4, width 3 and top_k 3 give only"),
        ("nodes: 10", f"nodes: {'9' * 5000}", "$.tree.nodes has 5000 digits"),
        ("nodes: 10", "nodez: 10, nodes: 10", "$.tree.nodez is not a known key (its value is 10)"),
        ("nodes: 10", "nodes: 10, depth: 4", "$.tree.depth is given twice, again on line 14"),
        ("reason:", "name: x\nreason:", "$.name is given twice, again on line 13: keep one."),
        ("spectune: 0.1.0", "spectune: 0.1", "$.spectune is 0.1: it must be text; put it in quo"),
        (
            "decision: speculate",
            "decision: maybe",
            "$.decision is 'maybe': it must be 'speculate'",
        ),
        ("low: 1.7,", "low: 0.9,", "$.evidence.speedup.low is 0.9: decision speculate needs it"),
        ("name: toy", "name: !!python/name:os.system toy", "$.name carries the YAML tag tag:yaml"),
        (
            "name: toy",
            "name: !!int toy",
            "$.name carries the YAML tag tag:yaml.org,2002:int: remo",
        ),
        ("name: toy", "name: &a toy", "not valid YAML: line 2, column 7: anchors and aliases"),
        ("name: code", "name: *a", "not valid YAML: line 9, column 16: anchors and aliases"),
        ("n_tune: 32", "[1]: 32", "$.domain has a list or mapping as a key: use a word."),
        ("name: toy", "\tname: toy", "not valid YAML: line 2, column 1: a tab cannot indent"),
        ("name: toy", 'name: "\\ud800" #', "$.name holds half a character"),
        ("name: toy", 'name: "\\UFFFFFFFF" #', "not valid YAML: "),
        ("name: toy", "name: \x07", "not valid YAML: special characters are not allowed"),
        ("nodes: 10}", "nodes: 10", "not valid YAML: line 15, column "),
        ("name: toy", "---\nname: toy", "not valid YAML: line 2, column 1: but found another doc"),
        ("reason:", f"x: {'[' * 5000}\nreason:", "more than 30 levels of nesting"),
        (
            "schema_version: 1",
            "schema_version: 2",
            "$.schema_version is 2, but this spectune read",
        ),
    ],
)
def test_each_fault_is_one_line_with_the_file_the_key_the_value_and_the_remedy(
    tmp_path, old, new, message
):
    told = refusal(edited(tmp_path, old, new))
    assert told.startswith(f": {message}") or message in told
    assert len(told) < 400
    assert re.search(r"; |: (remove|keep|use|add|correct|no setting)|upgrade|column", told)


def test_a_newer_file_is_told_apart_before_its_unknown_keys(tmp_path):
    path = write(tmp_path, YAML.replace("schema_version: 1", "schema_version: 7\nnovelty: 1"))
    assert refusal(path).endswith(
        ": $.schema_version is 7, but this spectune reads up to 1: upgrade spectune."
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (b"# only a comment\n", ": the file is empty"),
        (b"[1, 2]", ": $ must be a mapping"),
        (b"hello", ": $ must be a mapping"),
        (b"name: \xff\xfe", " is not UTF-8 text (byte 6 is 0xff): save it as UTF-8."),
        (YAML.encode("utf-16"), " is not UTF-8 text (byte 0 is 0xff): save it as UTF-8."),
        (b"\x00\x01\x02", " is not text (it holds a zero byte): give a YAML file."),
        (b"#" * (1024**2 + 1), " is larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_profile_at_all_is_refused(tmp_path, content, message):
    path = tmp_path / "toy.yaml"
    path.write_bytes(content)
    assert refusal(path).startswith(message)


def test_a_path_that_cannot_be_read_is_refused(tmp_path):
    assert refusal(tmp_path / "none.yaml") == " does not exist: check the path."
    assert refusal(tmp_path) == " is a folder: give the file inside it."
    assert "cannot be read" in refusal(f"{tmp_path}/nul\0.yaml")
    assert "cannot be read" in refusal(f"{write(tmp_path)}/below.yaml")


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + YAML.replace("\n", "\r\n").encode())
    assert load(path) == load(write(tmp_path))


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just([]),
    st.just({}), st.lists(st.integers(), max_size=3),
)  # fmt: skip
TOKENS = st.sampled_from(
    [
        "yes",
        "1e-3",
        "012",
        "1:30",
        ".nan",
        "&a",
        "*a",
        "!!map",
        "<<",
        "? ",
        "- ",
        "{",
        "}",
        "[",
        "]",
    ]
    + [
        "'",
        '"',
        "|",
        ">",
        "%",
        "@",
        "\t",
        "\n",
        "\0",
        "\\",
        ": ",
        "#",
        "---",
        "...",
        "\ud800",
        "9",
    ]
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(YAML)), st.integers(0, 12), TOKENS | st.text(max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_text_changed_at_random_loads_or_is_refused_and_nothing_else(tmp_path, edits):
    text = YAML
    for start, length, new in edits:
        text = text[:start] + new + text[start + length :]
    path = tmp_path / "toy.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    loads_or_refuses(path)


def places(node, path=()):
    """List the path of every value inside nested lists and mappings."""
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    inside = [place for key in keys for place in places(node[key], (*path, key))]
    return [path, *inside] if path else inside


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.sampled_from(places(data())), value=VALUES)
def test_any_value_in_any_place_loads_or_is_refused_and_nothing_else(tmp_path, place, value):
    content = data()
    node = content
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    path = tmp_path / "toy.yaml"
    path.write_bytes(yaml.safe_dump(content).encode("utf-8", "surrogatepass"))
    loads_or_refuses(path)


def loads_or_refuses(path):
    try:
        made = load(path)
    except SpectuneError as error:
        assert str(path) in str(error)
        assert len(str(error).splitlines()) <= 10
    else:
        save(made, path)
        assert load(path) == made


def test_a_new_file_obeys_the_umask_and_an_old_one_keeps_its_mode(tmp_path):
    path = tmp_path / "p.yaml"
    before = os.umask(0o027)
    try:
        save(profile(), path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        save(profile(PLAIN_CHANGES), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert load(path).decision == "plain"


def test_a_link_keeps_pointing_at_the_file_that_is_replaced(tmp_path):
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    save(profile(), real)
    link.symlink_to(real)
    save(profile(PLAIN_CHANGES), link)
    assert link.is_symlink()
    assert load(real).decision == "plain"


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_b31_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path, monkeypatch, step, failure
):
    path = tmp_path / "p.yaml"
    save(profile(), path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(os, step, fail)
    expected = SpectuneError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        save(profile(PLAIN_CHANGES), path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    if expected is SpectuneError:
        assert str(caught.value) == (
            f"{path} cannot be written (No space left): choose another path or make room for it."
        )


def test_b31_a_path_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def told(path):
        with pytest.raises(SpectuneError) as caught:
            atomic_write(path, "x")
        return str(caught.value).removeprefix(str(path))

    assert told(tmp_path).startswith(" cannot be written (it is a folder): choose another path")
    nowhere = told(tmp_path / "none" / "p.yaml")
    assert "No such file" in nowhere
    assert nowhere.endswith("make its folder, or choose another path.")
    assert "null " in told(f"{tmp_path}/\0")  # "byte", from Python 3.13 on "character"
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in told(tmp_path / "pipe")
    path = write(tmp_path)
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert "it is read-only" in told(path)
    assert path.read_text(encoding="utf-8") == YAML


def test_bytes_and_text_are_written_as_given(tmp_path):
    atomic_write(tmp_path / "a", b"\x00\xff")
    atomic_write(str(tmp_path / "b"), "\u00e9\n")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"
    assert (tmp_path / "b").read_bytes() == b"\xc3\xa9\n"
