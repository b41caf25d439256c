"""Renders bench/results/policies.json for docs/policies.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, Final

Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]

CLASSICAL: Final = ("arc", "clock", "lfru", "lfu-decay", "lru", "s3-fifo", "sieve", "slru", "w-tinylfu")
OURS: Final = ("heat-weighted", "next-use")
BOUND: Final = "belady"
_ORDER: Final = (*CLASSICAL, "device", *OURS, BOUND)


def policies(
    result: Mapping[str, Any], markdown: Markdown, origin: Callable[[Mapping[str, Any]], str]
) -> str:
    """The gap that ours close, then all hit ratios, then what prompts do, the device's constants, and speed."""
    grid = result["grid"]
    parts = [
        "### How much of the gap is closed\n",
        gaps([cell for cell in grid if cell["pool"] == "shared"], markdown),
        "### Hit ratios\n",
    ]
    for trace, pool, batch in dict.fromkeys((c["trace"], c["pool"], c["batch"]) for c in grid):
        here = [c for c in grid if (c["trace"], c["pool"], c["batch"]) == (trace, pool, batch)]
        streams = "one stream" if batch == 1 else f"{batch} streams"
        kind = "one pool for all layers" if pool == "shared" else "a pool for each layer"
        parts += [f"**{trace}** ({here[0]['role']}), {streams}, {kind}:\n", hits(here, markdown)]
    parts.append(f"{origin(result['origins']['grid'])}\n")
    if "prompts" in result:
        parts += ["### Prompts beside decoding\n", prompts(result["prompts"], markdown)]
    if "device" in result:
        parts += ["### Constants of the device's policy\n", device(result["device"], markdown)]
        parts.append(f"{origin(result['origins']['device'])}\n")
    if "host" in result:
        parts += ["### Policies of the arena\n", host(result["host"], markdown)]
        parts.append(f"{origin(result['origins']['host'])}\n")
    if "host_scans" in result:
        parts += ["Prompts beside decoding, in the arena:\n", host_scans(result["host_scans"], markdown)]
        parts.append(f"{origin(result['origins']['host_scans'])}\n")
    parts += ["### Speed of the simulator\n", speed(result["pairs_per_second"], markdown)]
    return "\n".join(parts)


def closed(cell: Mapping[str, Any], name: str) -> float:
    """Percent of the rows between the best classical policy and the bound that `name` does not bring."""
    rows = {policy: numbers["rows"] for policy, numbers in cell["policies"].items()}
    best = min(rows[policy] for policy in CLASSICAL)
    gap = best - rows[BOUND]
    return 100 * (best - rows[name]) / gap if gap > 0 else 0.0


def gaps(cells: Sequence[Mapping[str, Any]], markdown: Markdown) -> str:
    coverages = sorted({cell["coverage"] for cell in cells})
    rows = []
    for trace, batch in dict.fromkeys((cell["trace"], cell["batch"]) for cell in cells):
        here = {cell["coverage"]: cell for cell in cells if (cell["trace"], cell["batch"]) == (trace, batch)}
        first = next(iter(here.values()))
        kind = first["role"] if first["ordered"] else "test, order lost"
        texts = []
        for coverage in coverages:
            cell = here.get(coverage)
            if cell is None:
                texts.append("")
                continue
            best = min(CLASSICAL, key=lambda name: (cell["policies"][name]["rows"], name))
            texts.append(f"{closed(cell, 'next-use'):.0f} % ({closed(cell, 'heat-weighted'):.0f} %, {best})")
        average = mean(closed(cell, "next-use") for cell in here.values())
        rows.append([f"{trace}, {batch} ({kind})", *texts, f"{average:.0f} %"])
    header = ["trace, streams", *(f"{coverage:g} % coverage" for coverage in coverages), "mean"]
    return markdown(header, rows)


def hits(cells: Sequence[Mapping[str, Any]], markdown: Markdown) -> str:
    """A policy a row, a coverage a column: hits, rows brought a step, steps without a miss."""
    cells = sorted(cells, key=lambda cell: float(cell["coverage"]))
    rows = []
    for name in _ORDER:
        if name not in cells[0]["policies"]:
            continue
        texts = []
        for cell in cells:
            numbers = cell["policies"][name]
            clean = f", {numbers['clean']:.1f} % clean" if numbers["clean"] >= 0.1 else ""
            texts.append(f"{numbers['hits']:.1f} % ({numbers['rows']:.1f}{clean})")
        rows.append([f"`{name}`", *texts])
    return markdown(["policy", *(f"{cell['coverage']:g} %, {cell['slots']} slots" for cell in cells)], rows)


def prompts(lines: Sequence[Mapping[str, Any]], markdown: Markdown) -> str:
    header = ["hits of decoding", *(f"{line['coverage']:g} % coverage" for line in lines)]
    rows = [[f"`{name}`", *(f"{line['decode_hits'][name]:.1f} %" for line in lines)] for name in _ORDER]
    return markdown(header, rows)


def device(lines: Sequence[Mapping[str, Any]], markdown: Markdown) -> str:
    """Rows a step under each set of constants."""

    def label(run: Mapping[str, Any]) -> str:
        window = "all slots" if run["candidates"] >= 1 << 20 else f"{run['candidates']} candidates"
        extra = (", a use a pass" if run["presence"] else "") + (", distance" if run["distance"] else "")
        return f"half-life {run['half_life']}, {window}{extra}"

    names = {"demo model, texts 17-32": "demo", "FLAME-MoE-290M": "FLAME"}
    header = [
        "rows a step",
        *(
            f"{names.get(line['trace'], line['trace'])}, {line['batch']}, {line['coverage']:g} %"
            for line in lines
        ),
    ]
    rows = [
        [label(run), *(f"{line['runs'][i]['rows']:.2f}" for line in lines)]
        for i, run in enumerate(lines[0]["runs"])
    ]
    return markdown(header, rows)


def speed(found: Mapping[str, int], markdown: Markdown) -> str:
    rows = [[f"`{name}`", f"{found[name] / 1000:.0f} k"] for name in _ORDER if name in found]
    return markdown(["policy", "routed pairs a second, one core"], rows)


def host(lines: Sequence[Mapping[str, Any]], markdown: Markdown) -> str:
    """A table for each trace and batch; an arena a row, sizes a column: rows read from disk a step, steps without."""
    parts = []
    for trace, batch in dict.fromkeys((line["trace"], line["batch"]) for line in lines):
        here = [line for line in lines if (line["trace"], line["batch"]) == (trace, batch)]
        streams = "one stream" if batch == 1 else f"{batch} streams"
        header = [
            f"{trace}, {streams}",
            *(f"pool {line['pool']:g} %, arena {line['arena']:g} %" for line in here),
        ]
        rows = [["asked of the arena", *(f"{line['asked']:.2f}" for line in here)]]
        for name in here[0]["arenas"]:
            found = [line["arenas"][name] for line in here]
            rows.append([f"`{name}`", *(f"{one['read']:.2f} ({one['none']:.0f} %)" for one in found)])
        parts.append(markdown(header, rows))
    return "\n".join(parts)


def host_scans(lines: Sequence[Mapping[str, Any]], markdown: Markdown) -> str:
    """Rows read a step without a prompt."""
    header = ["rows read a step that only decodes", *(f"arena {line['arena']:g} %" for line in lines)]
    rows = [
        ["prompts displace nothing", *(f"{line['told']:.2f}" for line in lines)],
        ["prompts count as use", *(f"{line['untold']:.2f}" for line in lines)],
    ]
    return markdown(header, rows)
