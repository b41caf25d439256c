"""Sizes as a configuration writes them: bytes, a unit, a share, a number of rows, or "auto"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

__all__ = ["ROW_ALIGNMENT", "Size", "format_bytes", "row_stride", "shorten"]

ROW_ALIGNMENT = 4096  # packs, arenas and pools keep rows on this boundary, so that direct reads need no copy

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_WRITTEN = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]+|%)?\s*", re.ASCII)
_LIMIT = 2**63  # one past the largest byte count that an allocation or a file offset can name

SizeKind = Literal["bytes", "percent", "rows", "auto"]


def row_stride(row_bytes: int) -> int:
    """Bytes from one row to the next: `row_bytes` rounded up to 4096."""
    if row_bytes <= 0:
        raise ValueError(f"a row has at least 1 byte, not {row_bytes}")
    return -(-row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


def format_bytes(count: int) -> str:
    """`count` bytes for people: `6.75 MiB`; below 1 KiB, `12 B`."""
    sign, count = ("-", -count) if count < 0 else ("", count)
    if count < 1024:
        return f"{sign}{count} B"
    value, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB", "PiB"):
        if value < 1023.995:
            break
        value, unit = value / 1024, larger
    return f"{sign}{value:.2f} {unit}"


@dataclass(frozen=True, slots=True)
class Size:
    """A size as written: `kind` says what `amount` counts (bytes, percent, rows; 0 for `auto`).

    `amount` is exact: "29%" of 100 rows is 29 rows, which binary floating point would make 28.
    """

    kind: SizeKind
    amount: Fraction = Fraction(0)

    @classmethod
    def parse(cls, written: object) -> Size:
        """Reads an int of bytes, `14GiB`, `1.5 GB`, `25%`, `5 rows` or `auto`. Raises ValueError."""
        if isinstance(written, Size):
            return written
        if isinstance(written, int) and not isinstance(written, bool):
            return cls("bytes", cls._checked(Fraction(written), written))
        if not isinstance(written, str):
            raise ValueError(f"{_EXPECTED}, not {shorten(written)}")
        if written.strip() == "auto":
            return cls("auto")
        match = _WRITTEN.fullmatch(written)
        if match is None:
            raise ValueError(f"{_EXPECTED}, not {shorten(written)}")
        amount, unit = Fraction(match[1]), (match[2] or "b").lower()
        if unit == "%":
            if amount > 100:
                raise ValueError(f"a share is at most 100%, not {shorten(written)}")
            return cls("percent", amount)
        if unit in ("row", "rows"):
            if amount.denominator != 1:
                raise ValueError(f"rows come whole, not {shorten(written)}")
            return cls("rows", cls._checked(amount, written))
        if unit not in _UNITS:
            raise ValueError(
                f"unknown unit {match[2]!r} in {shorten(written)}; write e.g. 14GiB, 25%, 5 rows or auto"
            )
        return cls("bytes", Fraction(int(cls._checked(amount * _UNITS[unit], written))))

    @staticmethod
    def _checked(amount: Fraction, written: object) -> Fraction:
        if amount < 0:
            raise ValueError(f"a size is not negative: {shorten(written)}")
        if amount >= _LIMIT:
            raise ValueError(f"a size is below 2^63, not {shorten(written)}")
        return amount

    @property
    def is_auto(self) -> bool:
        return self.kind == "auto"

    @property
    def is_zero(self) -> bool:
        return self.kind != "auto" and self.amount == 0

    def rows(self, *, stride: int, total_rows: int) -> int:
        """Whole rows of `stride` bytes in this size; a percentage is of `total_rows`. `auto` has none."""
        match self.kind:
            case "bytes":
                return int(self.amount // stride)
            case "percent":
                return int(self.amount * total_rows // 100)
            case "rows":
                return int(self.amount)
            case "auto":
                raise ValueError('"auto" is sized by the budget, not by itself')

    def __str__(self) -> str:
        """The size as a configuration may write it; `Size.parse(str(size)) == size`."""
        match self.kind:
            case "auto":
                return "auto"
            case "percent":
                return f"{_decimal(self.amount)}%"
            case "rows":
                return f"{int(self.amount)} rows"
            case "bytes":
                count = int(self.amount)
                for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
                    if count and count % factor == 0:
                        return f"{count // factor}{unit}"
                return str(count)


_EXPECTED = "expected a size such as 14GiB, 25%, 5 rows, auto or a number of bytes"


def _decimal(amount: Fraction) -> str:
    # A percentage was written as a decimal, so its denominator divides a power of ten.
    if amount.denominator == 1:
        return str(amount.numerator)
    digits = 1
    while (10**digits) % amount.denominator:
        digits += 1
    whole = str(int(amount * 10**digits)).rjust(digits + 1, "0")
    return f"{whole[:-digits]}.{whole[-digits:]}"


def shorten(value: object) -> str:
    """`repr(value)` on one line, cut at 60 characters, for error messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
