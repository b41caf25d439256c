"""What a budget says: the rows and bytes of every tier, every check, and the refusal in one line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ziggurat.residency.errors import BudgetError
from ziggurat.residency.sizes import format_bytes

__all__ = ["ArenaKind", "Check", "Plan", "RankPlan", "Unit"]

ArenaKind = Literal["none", "pageable", "pinned"]
Unit = Literal["bytes", "rows", "support"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing the plan needs. `short_by` = max(0, needed - have); `key` is what to change then."""

    name: str
    needed: int
    have: int
    unit: Unit
    key: str
    advice: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.have >= self.needed

    @property
    def short_by(self) -> int:
        return max(0, self.needed - self.have)

    def amount(self, count: int) -> str:
        """`count` in this check's unit, for people."""
        if self.unit == "bytes":
            return format_bytes(count)
        if self.unit == "rows":
            return f"{count} row" if count == 1 else f"{count} rows"
        return "yes" if count else "no"

    def line(self) -> str:
        """The check in one line: its numbers and, when it is short, the key to change and how."""
        if self.unit == "support":
            return f"{self.name}: {self.detail}" + ("" if self.ok else f"; {self.advice}")
        detail = f" ({self.detail})" if self.detail else ""
        text = f"{self.name}: needs {self.amount(self.needed)}{detail}, has {self.amount(self.have)}"
        return text if self.ok else f"{text}, short by {self.amount(self.short_by)}; {self.advice}"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one tensor-parallel rank allocates. `staging_bytes`: its reads in flight if it has no arena.

    `ring_parts`, `ring_rows`, `ring_bytes`: staging memory on the device through which prompts stream, in parts of so
    many rows; 0 where nothing streams. `spare_bytes`: memory of the device for rows that are fetched ahead.
    `direct_rows`: the part of the arena whose rows are read in place and have no slots. `pinned_bytes`: the part of the
    arena that is page-locked. `numa_node`: what that is bound to, None for nothing.
    """

    rank: int
    pool_rows: int
    pool_bytes: int
    arena_rows: int
    arena_bytes: int
    staging_bytes: int
    coverage: float
    pinned_bytes: int = 0
    numa_node: int | None = None
    ring_parts: int = 0
    ring_rows: int = 0
    ring_bytes: int = 0
    direct_rows: int = 0
    spare_bytes: int = 0

    @property
    def beside_bytes(self) -> int:
        """Device memory for rows beside the pool."""
        return self.ring_bytes + self.spare_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank besides its pool."""
        return self.arena_bytes + self.staging_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes and rows of every tier, the floors, and every check. `rows` and `pack_bytes` are one rank's.

    `arena_shared`: the arenas are memory of the arena process, not of the engine.
    """

    device: str
    codec: str
    tp_size: int
    row_bytes: int
    stride: int
    rows: int
    pack_bytes: int
    pool_floor: int
    arena_floor: int
    arena_kind: ArenaKind
    ranks: tuple[RankPlan, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    arena_shared: bool = False

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def short(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.ok)

    def refusal(self) -> str | None:
        """Why this plan cannot work, in one line, or None if it can."""
        if not self.short:
            return None
        first, others = self.short[0], self.short[1:]
        return first.line() + (f" (also short: {', '.join(one.name for one in others)})" if others else "")

    def require(self) -> Plan:
        """This plan, if every check is met; raises BudgetError otherwise."""
        refusal = self.refusal()
        if refusal is not None:
            raise BudgetError(refusal, self)
        return self

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values for `--json`: every field, and for every check whether it is met."""
        checks = [
            {**asdict(check), "ok": check.ok, "short_by": check.short_by, "message": check.line()}
            for check in self.checks
        ]
        return {**asdict(self), "checks": checks, "ok": self.ok, "refusal": self.refusal()}
