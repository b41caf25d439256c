"""YAML for configuration files: small, plain, and with nothing that happens behind the reader's back.

The scalars are those of YAML 1.2's core schema (so `on`, `no` and `1:30` stay strings), a doubled key is an
error, tags and merge keys are refused, and size, depth and the number of values after expanding aliases are
bounded, so that no file can make the reader slow or deep.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from ziggurat.residency.errors import ConfigError
from ziggurat.residency.sizes import shorten

__all__ = ["MAX_BYTES", "parse_yaml", "read_yaml_file"]

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 10_000


class _Loader(yaml.SafeLoader):
    """The safe loader, pure Python: its composer is the place where depth and aliases can be bounded."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - filled below

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._composed = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._composed += 1
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's stubs lack it
        mark = event.start_mark
        if self._depth > MAX_DEPTH:
            raise _RefusedError(f"nested more than {MAX_DEPTH} deep", mark)
        if self._composed > MAX_VALUES:
            raise _RefusedError(f"holds more than {MAX_VALUES} values", mark)
        if getattr(event, "tag", None) is not None:
            raise _RefusedError(f"tags are not supported: {_one_line(str(event.tag))}", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _RefusedError(Exception):
    def __init__(self, why: str, mark: Any) -> None:
        super().__init__(why)
        self.mark = mark


_CORE = "tag:yaml.org,2002:"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,400}|0o[0-7]{1,400}|0x[0-9a-fA-F]{1,400}", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]{1,400}|[0-9]{1,400}(?:\.[0-9]{0,400})?)(?:[eE][-+]?[0-9]{1,20})?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_CORE + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


class _Builder:
    """Plain Python values from a composed document, every alias counted as if it were written out."""

    def __init__(self) -> None:
        self._values = 0
        self._open: list[yaml.Node] = []

    def build(self, node: yaml.Node) -> object:
        self._values += 1
        if self._values > MAX_VALUES:
            raise _RefusedError(
                f"holds more than {MAX_VALUES} values once its aliases are expanded", node.start_mark
            )
        if any(node is outer for outer in self._open):
            raise _RefusedError("an alias refers to the value that holds it", node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        self._open.append(node)
        if len(self._open) > MAX_DEPTH:
            raise _RefusedError(
                f"nested more than {MAX_DEPTH} deep once its aliases are expanded", node.start_mark
            )
        value = (
            [self.build(item) for item in node.value]
            if isinstance(node, yaml.SequenceNode)
            else self._mapping(node)
        )
        self._open.pop()
        return value

    def _mapping(self, node: yaml.Node) -> dict[str, object]:
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _CORE + "merge":
                raise _RefusedError("merge keys (<<) are not supported", key_node.start_mark)
            key = self.build(key_node)
            if not isinstance(key, str):
                raise _RefusedError(f"a key is a word, not {shorten(key)}", key_node.start_mark)
            if key in result:
                raise _RefusedError(f'key "{_one_line(key)}" appears twice', key_node.start_mark)
            result[key] = self.build(value_node)
        return result


def _scalar(node: yaml.ScalarNode) -> object:
    text: str = node.value
    match node.tag.removeprefix(_CORE):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            return text


def _place(name: str, mark: Any) -> str:
    return name if mark is None else f"{name}:{mark.line + 1}:{mark.column + 1}"


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 200 else flat[:197] + "..."


def parse_yaml(text: str, *, name: str) -> object:
    """The value of one YAML document. Errors are ConfigErrors of one line that starts with `name`."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _Builder().build(node)
    except _RefusedError as refused:
        raise ConfigError(f"{_place(name, refused.mark)}: {refused}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{name}: not valid YAML: {_one_line(str(error))}") from None
    except yaml.MarkedYAMLError as error:
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{_place(name, error.problem_mark)}: not valid YAML: {_one_line(what)}") from None
    finally:
        if loader is not None:
            loader.dispose()


def read_yaml_file(path: Path) -> object:
    """The value of the file at `path`; every way in which it cannot be read is a ConfigError of one line."""
    name = str(path)
    try:
        # Not blocking: opening a pipe that nobody writes to would wait for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{name}: not a regular file")
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES} bytes; this is not a configuration file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start}"
        ) from None
    return parse_yaml(text, name=name)
