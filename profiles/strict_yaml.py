"""Read and write the part of YAML on which every reader agrees.

YAML 1.1 and 1.2 read `no`, `012`, `1:30` or `1e-3` differently, and PyYAML keeps the last of two
equal keys; here each of these is refused by name. Times are read as text, and written plainly
when given as UTC. Knows nothing of profiles.
"""

import re
from datetime import datetime
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .errors import SpectuneError
from .strict import key_path

MAX_NESTING = 30
MAX_DIGITS = 18

_NULL = re.compile(r"(~|null|Null|NULL)?\Z")
_BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(
    r"([-+]?[0-9]+\.[0-9]*(e[-+][0-9]+)?|\.[0-9]+(e[-+][0-9]+)?|[-+]?\.inf|\.nan)\Z", re.I
)
# Plain scalars that are text to some readers and a number or a truth value to others.
_AMBIGUOUS = re.compile(
    r"""( yes | no | on | off
        | [-+]? 0 [0-9_]+                                              # 012
        | [-+]? 0 ( b[01_]+ | o[0-7_]+ | x[0-9a-f_]+ )                 # 0b1 0o17 0x1f
        | [-+]? [0-9][0-9_]* ( : [0-5]?[0-9] )+ ( \.[0-9_]* )?         # 1:30
        | [-+]? [0-9](?= [0-9.]*+ _ ) [0-9_.]*+                          # 1_000
        | [-+]? ( [0-9]++ \.? [0-9]*+ | \.[0-9]++ ) ( e [-+]? [0-9]++ )?  # 1e-3 1.0e3 -.5
        )\Z""",
    re.I | re.X,
)


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """Read one YAML document whose root is a mapping.

    Args:
        text: The document.
        source: Where it came from, named first in every message.

    Raises:
        SpectuneError: The text is empty, is not YAML, is no mapping, or uses a form that readers
            of YAML disagree about.
    """
    root = _compose(text, source)
    if root is None:
        raise SpectuneError(f"{source}: the file is empty: write it anew with `spectune tune`.")
    if not isinstance(root, MappingNode):
        raise SpectuneError(f"{source}: $ must be a mapping of keys to values, one `key:` a line.")
    try:
        return _mapping(root, ())
    except _RefusedError as error:
        raise SpectuneError(f"{source}: {error}") from None


def dump_mapping(data: dict[str, Any]) -> str:
    """Write plain data so that `parse_mapping`, and any other reader of YAML, returns it."""
    return yaml.dump(
        data,
        Dumper=_Dumper,
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=99,
    )


class _RefusedError(Exception):
    """A value that is valid YAML and still not accepted."""


class _Composer(yaml.BaseLoader):
    """Build bare nodes; anchors and endless nesting stop here, before they can grow."""

    _nesting = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases (& and *) are not accepted; write the value out",
                problem_mark=event.start_mark,
            )
        if self._nesting >= MAX_NESTING:
            raise yaml.MarkedYAMLError(
                problem=f"more than {MAX_NESTING} levels of nesting; remove the extra brackets",
                problem_mark=event.start_mark,
            )
        self._nesting += 1
        node = super().compose_node(parent, index)
        self._nesting -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quote whatever our own reader would refuse or read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> ScalarNode:
        # PyYAML folds these three line breaks like any other; only escapes keep them.
        style = '"' if set(text) & set("\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)

    def represent_time(self, time: datetime) -> ScalarNode:
        text = time.isoformat().replace("+00:00", "Z")
        return self.represent_scalar("tag:yaml.org,2002:timestamp", text)


_Dumper.add_implicit_resolver("!ambiguous", _AMBIGUOUS, None)
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(datetime, _Dumper.represent_time)


def _compose(text: str, source: str) -> Node | None:
    try:
        loader = _Composer(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context
        if "'\\t'" in str(problem):
            problem = "a tab cannot indent; use spaces"
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpectuneError(f"{source}: not valid YAML: {where}{problem}.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The last two come from PyYAML itself for escapes such as "\UFFFFFFFF".
        reason = getattr(error, "reason", None) or str(error)
        raise SpectuneError(
            f"{source}: not valid YAML: {reason}; remove that character."
        ) from None


def _value(node: Node, path: tuple[int | str, ...]) -> Any:
    if isinstance(node, MappingNode):
        return _mapping(node, path)
    if isinstance(node, SequenceNode):
        _refuse_tag(node, "seq", path)
        return [_value(item, (*path, i)) for i, item in enumerate(node.value)]
    assert isinstance(node, ScalarNode)  # noqa: S101 - YAML has no fourth kind
    return _scalar(node, path)


def _mapping(node: MappingNode, path: tuple[int | str, ...]) -> dict[str, Any]:
    _refuse_tag(node, "map", path)
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, ScalarNode):
            raise _RefusedError(f"{key_path(path)} has a list or mapping as a key: use a word.")
        key = key_node.value
        here = (*path, key)
        _refuse_surrogates(key, path)
        if key in data:
            line = key_node.start_mark.line + 1
            raise _RefusedError(
                f"{key_path(here)} is given twice, again on line {line}: keep one."
            )
        data[key] = _value(value_node, here)
    return data


def _scalar(node: ScalarNode, path: tuple[int | str, ...]) -> Any:
    _refuse_tag(node, "str", path)
    text: str = node.value
    _refuse_surrogates(text, path)
    if node.style is not None:  # in quotes, or a block of text
        return text
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        if len(text) > MAX_DIGITS:
            raise _RefusedError(
                f"{key_path(path)} has {len(text)} digits: no setting is that large."
            )
        return int(text)
    if _FLOAT.match(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if _AMBIGUOUS.match(text):
        raise _RefusedError(
            f"{key_path(path)} is {text}: readers of YAML disagree on what that means; put it in"
            " quotes if it is text, else write true, false or a plain decimal number."
        )
    return text


def _refuse_tag(node: Node, expected: str, path: tuple[int | str, ...]) -> None:
    if node.tag != f"tag:yaml.org,2002:{expected}":
        raise _RefusedError(f"{key_path(path)} carries the YAML tag {node.tag}: remove it.")


def _refuse_surrogates(text: str, path: tuple[int | str, ...]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        rule = "holds half a character (\\ud800 to \\udfff): remove it."
        raise _RefusedError(f"{key_path(path)} {rule}") from None
