"""What a restart costs: the hit rate after it, and how long an arena takes to be full again. On the CPU.

    python bench/restart.py [--output FILE] [--only hits|arena]

hits: the demo model's tiers serve recorded routing (`bench/traces/demo_moe.npz`), one token a step; then an engine ends
and the next one goes on at the same place: started from the heat of the first one, started cold, or not restarted at
all. The hit rate is the share of routed pairs whose expert is in the pool in a step's first pass; the steady one is
that of the engine that was not restarted, over all steps behind the restart.

arena: a pack of random rows, 6.75 MiB each, is read into an arena that an arena process keeps; then an engine attaches
to it, with and without looking at the bytes. The pack is read past the page cache where the disk allows it.

Written to `bench/results/restart.json`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench.random_rows import random_rows  # noqa: E402
from bench.results_io import RESULTS, provenance, read_json, write_json  # noqa: E402
from ziggurat.allocators.shared.arena import SharedArena, attach_arena  # noqa: E402
from ziggurat.allocators.shared.errors import ArenaUnreachableError  # noqa: E402
from ziggurat.allocators.shared.lease import ask_status  # noqa: E402
from ziggurat.allocators.shared.messages import Attach  # noqa: E402
from ziggurat.integration.packing import ensure_packs, open_pack  # noqa: E402
from ziggurat.kernels.codecs.registry import get_codec  # noqa: E402
from ziggurat.kernels.geometry import ExpertGeometry  # noqa: E402
from ziggurat.residency.config import TiersConfig  # noqa: E402
from ziggurat.residency.factory import geometry_of, open_service  # noqa: E402
from ziggurat.residency.host_cache import HostCache  # noqa: E402
from ziggurat.residency.ledger import arena_key, open_ledger  # noqa: E402
from ziggurat.residency.passes import PassPath, StepTokens  # noqa: E402
from ziggurat.residency.policies.registry import make_policy  # noqa: E402
from ziggurat.residency.prediction import load_routing, side_by_side  # noqa: E402
from ziggurat.residency.service import ExpertService  # noqa: E402
from ziggurat.stores.checkpoint import Checkpoint  # noqa: E402
from ziggurat.stores.pack import Pack, RowRequest, RowResult  # noqa: E402
from ziggurat.stores.packformat import (  # noqa: E402
    PackHeader,
    header_bytes,
    pack_filename,
    row_digest,
    stride_of,
)
from ziggurat.stores.readers.registry import open_reader  # noqa: E402

MODEL = ROOT / "bench" / "models" / "demo-moe-fp8"
TRACE = ROOT / "bench" / "traces" / "demo_moe.npz"
RESULT = RESULTS / "restart.json"
READERS = 8
WINDOW = 100
GEOMETRY = ExpertGeometry(4096, 2048)  # DeepSeek-V4-Flash's experts, 6.75 MiB in w2

Verify = Literal["always", "first-read", "never"]
FloatArray = np.typing.NDArray[np.float64]


class CountedPack:
    """A pack that counts the rows that are read from it."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self.header, self.checksums, self.counts = pack.header, pack.checksums, pack.counts
        self.rows = 0

    def read_rows(self, wanted: Sequence[RowRequest]) -> Generator[RowResult, None, None]:
        self.rows += len(wanted)
        return self._pack.read_rows(wanted)

    def close(self) -> None:
        self._pack.close()


# -- hits ----------------------------------------------------------------------------------------------------------


def measure_hits(before: int, after: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Hit rates of `after` steps behind a restart that comes after `before` steps, for pools of two sizes."""
    steps = torch.from_numpy(side_by_side(load_routing(TRACE), 1).astype(np.int64))
    if before + after > len(steps):
        raise SystemExit(f"the trace has {len(steps)} steps, not {before + after}")
    pools = {}
    for size in ("25%", "50%"):
        with tempfile.TemporaryDirectory(prefix="ziggurat-restart-") as work:
            pools[size] = _restart(Path(work), size, steps[:before], steps[before : before + after])
        tell(f"pool of {size}: {pools[size]}")
    return {
        "trace": TRACE.name,
        "steps_before": before,
        "steps_after": after,
        "window": WINDOW,
        "pools": pools,
    }


def _restart(work: Path, size: str, first: torch.Tensor, then: torch.Tensor) -> dict[str, float]:
    with _engine(work, size) as (service, _):
        _serve(service, first)
        service.save_heat()
        going_on = _serve(service, then)
    heat = sorted(work.glob("*.heat.safetensors"))
    saved = heat[0].read_bytes()
    rates: dict[str, FloatArray] = {}
    for name in ("warm", "cold"):
        # What the engine that went on has learned meanwhile is not known to one that was restarted.
        heat[0].write_bytes(saved)
        with _engine(work, size, warm=name == "warm") as (service, _):
            rates[name] = _serve(service, then)
    steady = float(going_on.mean())
    return {
        "steady_hit_rate": round(steady, 4),
        "going_on_first_window": round(float(going_on[:WINDOW].mean()), 4),
        **{f"{name}_first_window": round(float(rate[:WINDOW].mean()), 4) for name, rate in rates.items()},
        **{
            f"{name}_of_steady": round(float(rate[:WINDOW].mean()) / steady, 4)
            for name, rate in rates.items()
        },
        **{
            f"{name}_of_going_on": round(float(rate[:WINDOW].mean() / going_on[:WINDOW].mean()), 4)
            for name, rate in rates.items()
        },
        "warm_of_going_on_all_steps": round(float(rates["warm"].mean()) / steady, 4),
    }


@contextmanager
def _engine(work: Path, size: str, *, warm: bool = True) -> Iterator[tuple[ExpertService, CountedPack]]:
    config = TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": str(work), "readers": READERS},
                "host": {"size": "50%"},
                "device": {"size": size, "device": "cpu"},
            },
            "codecs": {"base": "w2"},
            "heat": {"path": str(work), "warm_start": warm},
        }
    )
    with Checkpoint.open(MODEL) as checkpoint:
        ensure_packs(checkpoint, config, 1)
        pack = CountedPack(open_pack(checkpoint, config, 0, 1))
        service = open_service(config, geometry_of(checkpoint, 1), pack, get_codec("w2"))
    try:
        service.warm_start()
        service.preheated()
        yield service, pack
    finally:
        service.close()


def _serve(service: ExpertService, steps: torch.Tensor) -> FloatArray:
    """Steps [steps, layers, tokens, k] of recorded routing; the hit rate of each."""
    _, layers, tokens, k = steps.shape
    x = torch.randn(tokens, service.geometry.hidden, generator=torch.Generator().manual_seed(0))
    weights = torch.full((tokens, k), 1.0 / k)
    rates = []
    for ids in steps:

        def forward(_: PassPath, ids: torch.Tensor = ids) -> None:
            for layer in range(layers):
                service.moe(layer, x, weights, ids[layer])

        result = service.run_step(forward, StepTokens(tokens))
        rates.append(1.0 - result.misses_first_pass / (layers * tokens * k))
    return np.array(rates)


# -- arena ---------------------------------------------------------------------------------------------------------


def measure_arena(
    gib: float, repeats: int, folder: Path | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds until every row of a pack is in the arena: read, and found there."""
    row_bytes = get_codec("w2").row_bytes(GEOMETRY)
    rows = max(1, int(gib * (1 << 30) / stride_of(row_bytes)))
    with tempfile.TemporaryDirectory(prefix="ziggurat-restart-", dir=folder) as work:
        path = _write_pack(Path(work), rows, row_bytes)
        socket = Path(work) / "socket"
        runs: dict[str, list[float]] = {"read": [], "found": [], "found, not verified": []}
        direct = False
        for _ in range(repeats):
            with _arena_process(socket):
                _, seconds, read, direct = _fill(path, socket, "first-read")
                assert read == rows
                runs["read"].append(seconds)
                again: tuple[tuple[str, Verify], ...] = (
                    ("found", "first-read"),
                    ("found, not verified", "never"),
                )
                for name, verify in again:
                    adopted, seconds, read, _ = _fill(path, socket, verify)
                    assert (adopted, read) == (rows, 0)
                    runs[name].append(seconds)
            tell(f"arena: { ({name: round(min(one), 3) for name, one in runs.items()}) }")
    return {
        "rows": rows,
        "row_bytes": row_bytes,
        "bytes": rows * stride_of(row_bytes),
        "direct": direct,
        "readers": READERS,
        "seconds": {name: [round(one, 3) for one in found] for name, found in runs.items()},
    }


def _fill(path: Path, socket: Path, verify: Verify) -> tuple[int, float, int, bool]:
    """An engine's way to a full arena: rows found, seconds, rows read, whether past the page cache."""
    inner = Pack.open(path, reader=open_reader("auto", path, threads=READERS), verify=verify)
    pack = CountedPack(inner)
    header = pack.header
    arena = _when_free(socket, Attach(arena_key(header), "bench", header.rows, header.stride))
    begun = time.perf_counter()
    cache = HostCache(
        pack,
        arena,
        make_policy("lru"),
        experts=header.experts,
        staging=READERS,
        ledger=open_ledger(arena, pack, verify),
    )
    wanted = [(key, 0.0) for key in range(header.rows)]
    for first in range(0, header.rows, 64):
        cache.fill(wanted[first : first + 64], 64)
    seconds = time.perf_counter() - begun
    assert cache.used == header.rows
    arena.close()
    pack.close()
    return cache.adopted, seconds, pack.rows, inner.direct


def _when_free(socket: Path, want: Attach) -> SharedArena:
    """The arena as its writer: the engine before has just left."""
    while True:
        arena = attach_arena(socket, want, READERS)
        if arena.share.writes:
            return arena
        arena.close()


def _write_pack(folder: Path, rows: int, row_bytes: int) -> Path:
    header = PackHeader(
        codec="w2",
        codec_version=get_codec("w2").version,
        layers=1,
        experts=rows,
        hidden=GEOMETRY.hidden,
        intermediate=GEOMETRY.intermediate,
        row_bytes=row_bytes,
        stride=stride_of(row_bytes),
        tp_rank=0,
        tp_size=1,
        identity="random",
        layer_ids=(0,),
    )
    path = folder / pack_filename(header)
    checksums = []
    with path.open("wb") as file:
        file.write(header_bytes(header))
        for number in range(rows):
            row = random_rows("w2", GEOMETRY, 1, header.stride, torch.device("cpu"), seed=number)
            data = memoryview(row.numpy().data).cast("B")
            checksums.append(row_digest(data))
            file.write(data)
        file.write(np.array(checksums, dtype="<u8").tobytes())
        file.flush()
        os.fsync(file.fileno())
    return path


@contextmanager
def _arena_process(socket: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "ziggurat.allocators.shared.process", str(socket)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    ask_status(socket)
                    break
                except ArenaUnreachableError:
                    if process.poll() is not None:
                        raise
                    time.sleep(0.01)
            yield
        finally:
            process.terminate()


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    origin = provenance(["bench/restart.py", *arguments], at=options.commit)
    before = os.getloadavg()[0]
    found = read_json(options.output)
    tell: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731
    if options.only in (None, "hits"):
        found["hits"] = {**origin, **measure_hits(options.before, options.after, tell)}
    if options.only in (None, "arena"):
        found["arena"] = {**origin, **measure_arena(options.gib, options.repeats, options.folder, tell)}
    for part in found.values():
        part.setdefault("load", {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)})
    write_json(options.output, found)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a restart costs.")
    parser.add_argument("--only", choices=("hits", "arena"))
    parser.add_argument("--before", type=int, default=2048, help="steps before the restart")
    parser.add_argument("--after", type=int, default=1024, help="steps behind it")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the pack that fills the arena")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where that pack goes; default: the temporary folder")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--commit")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
