"""The tables of docs/sizing.md: what `ziggurat plan` would say of machines that are not here.

    python bench/sizing.py          # prints them; bench/tables.py puts them into the page

Nothing is measured. Memory goes through the same `plan()` that a start goes through; the time of misses is bytes over
the link.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.shapes import SHAPES, MoeShape  # noqa: E402
from ziggurat.kernels.codecs.registry import get_codec  # noqa: E402
from ziggurat.kernels.cuda.workspace import workspace_bytes  # noqa: E402
from ziggurat.kernels.geometry import ExpertGeometry  # noqa: E402
from ziggurat.residency.budget import MachineLimits, ModelFacts, plan  # noqa: E402
from ziggurat.residency.budget_plan import Plan  # noqa: E402
from ziggurat.residency.config import TiersConfig  # noqa: E402
from ziggurat.residency.sizes import format_bytes  # noqa: E402

GIB = 1 << 30
MAX_TOKENS = 2048  # vLLM's --max-num-batched-tokens


@dataclass(frozen=True, slots=True)
class Example:
    """A model on a machine.

    free_device: bytes of each GPU that vLLM leaves for the pool, the kernels and the staging of prompts. free_host: of
    the whole machine, once vLLM runs. pool, host: the configuration's sizes. link: bytes a second.
    """

    name: str
    shape: MoeShape
    codec: str
    ranks: int
    free_device: int
    free_host: int
    pool: str
    host: str
    link: float

    def plan(self) -> Plan:
        """BudgetError if the sizes do not fit."""
        geometry = ExpertGeometry(self.shape.hidden, self.shape.intermediate // self.ranks)
        config = TiersConfig.from_mapping(
            {
                "tiers": {
                    "disk": {"path": "/nvme/packs"},
                    "host": {"size": self.host},
                    "device": {"size": self.pool, "device": "cuda:0"},
                },
                "codecs": {"base": self.codec},
            }
        )
        shape = self.shape
        facts = ModelFacts(shape.layers, shape.experts, shape.top_k, shape.hidden, shape.intermediate)
        machine = MachineLimits(
            device="cuda:0",
            memory_available=self.free_host,
            device_free=self.free_device,
            device_workspace=workspace_bytes(geometry, shape.experts, shape.top_k, MAX_TOKENS),
        )
        row_bytes = get_codec(self.codec).row_bytes(geometry)
        return plan(config, facts, row_bytes, machine=machine, tp_size=self.ranks).require()


_DS, _GLM = SHAPES["deepseek-v4-flash"], SHAPES["glm-5.2"]
EXAMPLES = (
    Example("DeepSeek-V4-Flash, w2", _DS, "w2", 1, 15 * GIB, 52 * GIB, "14GiB", "44GiB", 27e9),
    Example("DeepSeek-V4-Flash, w2, PCIe 5", _DS, "w2", 1, 15 * GIB, 52 * GIB, "14GiB", "44GiB", 54e9),
    Example("GLM-5.2, w2, two ranks", _GLM, "w2", 2, 52 * GIB, 172 * GIB, "50GiB", "80GiB", 54e9),
)
MISSED_ROWS = (2, 5, 10, 30, 60)


def memory_table() -> str:
    """Where the rows go."""
    header = [
        "of each rank",
        "a row",
        "all rows",
        "pool",
        "arena",
        "pool + arena",
        "workspace",
        "disk, all ranks",
    ]
    rows = []
    for example in _by_memory():
        found = example.plan()
        one = found.ranks[0]
        both = min(1.0, (one.pool_rows + one.arena_rows) / found.rows)
        workspace = (
            next(check for check in found.checks if check.name == "device memory").needed - one.pool_bytes
        )
        rows.append(
            [
                example.name,
                format_bytes(found.row_bytes),
                f"{found.rows} · {format_bytes(found.pack_bytes)}",
                f"{one.pool_rows} · {one.coverage:.1%}",
                f"{one.arena_rows} · {one.arena_rows / found.rows:.1%}",
                f"at most {both:.0%}",
                format_bytes(workspace),
                format_bytes(found.pack_bytes * found.tp_size),
            ]
        )
    return _markdown(header, rows)


def _by_memory() -> Iterator[Example]:
    """Examples that differ in more than the link."""
    seen = set()
    for example in EXAMPLES:
        key = (example.shape, example.codec, example.ranks, example.pool, example.host)
        if key not in seen:
            seen.add(key)
            yield example


def time_table() -> str:
    """What missed rows cost in a step, at most."""
    header = ["rows missed in a step", *(str(rows) for rows in MISSED_ROWS), "rows routed to, 1 token"]
    lines = []
    for example in EXAMPLES:
        stride = example.plan().stride
        lines.append(
            [
                f"{example.name}, {example.link / 1e9:.0f} GB/s",
                *(f"{rows * stride / example.link * 1e3:.2f} ms" for rows in MISSED_ROWS),
                str(example.shape.layers * example.shape.top_k),
            ]
        )
    return _markdown(header, lines)


def floor_table() -> str:
    """Slots that a captured batch may need in one layer, and their bytes."""
    header = ["tokens of a captured batch", "1", "8", "32", "64"]
    lines = []
    for example in _by_memory():
        stride = example.plan().stride
        sizes = [min(example.shape.experts, tokens * example.shape.top_k) for tokens in (1, 8, 32, 64)]
        lines.append([example.name, *(f"{rows} rows · {format_bytes(rows * stride)}" for rows in sizes)])
    return _markdown(header, lines)


def tables() -> str:
    """What stands in docs/sizing.md."""
    return "\n".join(
        [
            "Where the rows go:\n",
            memory_table(),
            "What misses cost a step at the very most, none of it hidden, from the arena:\n",
            time_table(),
            "What a pool must hold at least, so that a layer finds room for all that a batch can route to in it:\n",
            floor_table(),
        ]
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(tables())
