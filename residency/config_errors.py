"""What pydantic found, as one line per mistake that names the key and, for an unknown one, the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from ziggurat.residency.sizes import shorten

__all__ = ["explain", "known_keys"]


def explain(error: ValidationError, model: type[BaseModel], name: str) -> tuple[str, ...]:
    """One line per mistake in `error`, each starting with `name`, in the order in which they were found."""
    lines: dict[str, None] = {}  # a union reports one mistake once per member
    for problem in error.errors(include_url=False):
        path = ".".join(str(part) for part in problem["loc"])
        lines[f"{name}: {_line(problem, path, model)}"] = None
    return tuple(lines)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Full dotted path of every key that `model` accepts, sections before what they hold."""
    for key, field in model.model_fields.items():
        yield prefix + key
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{prefix}{key}.")


def _line(problem: Any, path: str, model: type[BaseModel]) -> str:
    given, context = problem["input"], problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return _unknown(problem["loc"], model)
        case "missing":
            return f'key "{path}" is missing'
        case "value_error":
            return f"{path}: {context['error']}"
        case "literal_error":
            return f"{path}: expected {context['expected'].replace(chr(39), '')}, not {shorten(given)}"
        case "model_type" if given is None:
            return f"{path}: is empty; remove the key or give it a mapping"
        case "model_type":
            return f"{path}: expected a mapping, not {shorten(given)}"
        case "int_type" | "int_from_float":
            return f"{path}: expected a whole number, not {shorten(given)}"
        case "bool_type":
            return f"{path}: expected true or false, not {shorten(given)}"
        case "greater_than_equal":
            return f"{path}: at least {context['ge']}, not {shorten(given)}"
        case "less_than_equal":
            return f"{path}: at most {context['le']}, not {shorten(given)}"
        case _:
            return f"{path}: {problem['msg']}, not {shorten(given)}"


def _unknown(path: tuple[str | int, ...], model: type[BaseModel]) -> str:
    prefix, key = "".join(f"{part}." for part in path[:-1]), str(path[-1])
    known = list(known_keys(model))
    siblings = [one.removeprefix(prefix) for one in known if one.startswith(prefix)]
    siblings = [one for one in siblings if "." not in one]
    line = f'unknown key "{_flat(prefix + key)}"'
    if near := difflib.get_close_matches(key, siblings, n=1):
        return f'{line}; did you mean "{prefix}{near[0]}"?'
    # A right word in the wrong section: `host:` at the top level, `readers:` under tiers.
    leaves = {one.rpartition(".")[2]: one for one in reversed(known)}
    if near := difflib.get_close_matches(key, leaves, n=1, cutoff=0.75):
        return f'{line}; did you mean "{leaves[near[0]]}"?'
    return f"{line}; known {'here' if prefix else 'keys'}: {', '.join(siblings)}"


def _flat(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 80 else flat[:77] + "..."
