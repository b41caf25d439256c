"""Tables of what was measured on GPUs, from the result files that `bench/h200` leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def origin(record: Mapping[str, Any]) -> str:
    """One line: the machine, the versions, the commit and the command."""
    machine = record["machine"]
    versions = ", ".join(
        f"{label} {machine[key]}"
        for key, label in (("driver", "driver"), ("torch", "torch"), ("vllm", "vLLM"))
        if machine.get(key)
    )
    gpu = machine.get("gpu", "no GPU")
    return f"{gpu}, {versions}, commit `{record['commit'][:10]}`: `{record['command']}`"


def kernels(result: Mapping[str, Any], markdown: Markdown) -> str:
    """One row for each shape and number of tokens; our codecs and vLLM's kernels side by side."""
    names = list(dict.fromkeys(line["kernel"] for line in result["runs"]))
    found: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for line in result["runs"]:
        found.setdefault((line["shape"], line["tokens"]), {})[line["kernel"]] = line
    rows = []
    for (shape, tokens), lines in found.items():
        cells = []
        for name in names:
            one = lines.get(name)
            cells.append("" if one is None else f"{_us(one['us'])} ({one['of_floor']:.2f})")
        rows.append([f"{shape}, {tokens} token{'s' if tokens > 1 else ''}", *cells])
    rates = result["rates"]
    note = (
        f"Microseconds of a layer, in brackets the share of its floor. Measured in the same run: read "
        f"{rates['read_tb_per_s']:.2f} TB/s, copy {rates['copy_tb_per_s']:.2f} TB/s (bytes read and written), bfloat16 "
        f"products {rates['matmul_tflops']:.0f} TFLOP/s."
    )
    return f"{markdown(['layer', *names], rows)}\n{note}\n\n{origin(result)}\n"


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def transfers(result: Mapping[str, Any], markdown: Markdown) -> str:
    """One row for each row size and number of rows; movers side by side."""
    measured = result["transfers"]
    movers = list(dict.fromkeys(run["mover"] for run in measured["runs"]))
    found: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for run in measured["runs"]:
        found.setdefault((run["row_bytes"], run["rows"]), {})[run["mover"]] = run
    rows = [
        [
            f"{count} x {row_bytes / 1024:.0f} KiB",
            *(
                f"{runs[mover]['gb_per_s']:.1f} ({runs[mover]['ratio']:.2f})" if mover in runs else ""
                for mover in movers
            ),
            *(f"{runs[mover]['steady_ratio']:.2f}" if mover in runs else "" for mover in movers),
        ]
        for (row_bytes, count), runs in found.items()
    ]
    header = ["rows", *(f"{mover}, GB/s" for mover in movers), *(f"{mover}, steady" for mover in movers)]
    note = (
        f"In brackets the share of the pinned link's peak of the same minute, {measured['peak_gb_per_s']} GB/s in the "
        "median: one call on an idle stream, the host's work for it included; steady: calls back to back."
    )
    return f"{markdown(header, rows)}\n{note}\n\n{origin(result)}\n"


def harness(result: Mapping[str, Any], markdown: Markdown) -> str:
    """One row for each run and coverage."""
    rows: list[list[str]] = []
    notes = []
    for label, record in result["runs"].items():
        reference = record["runs"][0]["step_ms"]["median"]
        rows += [_coverage(label, run, reference) for run in record["runs"]]
        notes.append(
            f"{label}: {record['layers']} layers of {record['experts']} experts, top-{record['top_k']}, rows of "
            f"{record['row_mib']:.2f} MiB, {record['routing']}. {origin(record)}"
        )
    header = [
        "run: coverage",
        "step, median",
        "mean",
        "of resident",
        "no miss",
        "missed pairs",
        "passes",
        "fetched",
        "on the link",
        "bits",
    ]
    return "\n".join([markdown(header, rows), *(f"{note}\n" for note in notes)])


def _coverage(label: str, run: Mapping[str, Any], reference: float) -> list[str]:
    """The cells of one coverage; reference: median milliseconds with every expert resident."""
    return [
        f"{label}: {run['coverage']:.0%}",
        f"{run['step_ms']['median']:.2f} ms",
        f"{run['step_ms']['mean']:.2f} ms",
        f"{run['step_ms']['mean'] / reference:.2f}",
        f"{run['zero_miss_share']:.0%}",
        f"{run['missed_pairs_per_step']:.1f}",
        f"{run['passes_per_step']:.2f}",
        f"{run['mib_per_step']:.1f} MiB",
        "" if run["link_ms_per_step"] is None else f"{run['link_ms_per_step']:.2f} ms",
        "same" if run["same_bits"] else "DIFFERENT",
    ]


def serve(result: Mapping[str, Any], markdown: Markdown) -> str:
    """One row for each server, with its ratio to stock vLLM in the same rounds."""
    loads = result["loads"]
    replayed = any("ratio_to_replay" in found for found in result["servers"].values())
    rows = []
    for found in result["servers"].values():
        cells = []
        for load in loads:
            n = str(load["streams"])
            speed = found["median_tokens_per_s"].get(n)
            ratio = found.get("ratio_to_stock", {}).get(n)
            cells += ["" if speed is None else f"{speed:.0f} tok/s", "" if ratio is None else f"{ratio:.3f}"]
            if replayed:
                of_replay = found.get("ratio_to_replay", {}).get(n)
                cells.append("" if of_replay is None else f"{of_replay:.2f}")
        tiers = found.get("tiers")
        steps = max(1.0, tiers["steps"]) if tiers else 1.0
        rows.append(
            [
                found["what"],
                f"{found['expert_bytes_on_gpu'] / 1e6:.1f} MB",
                *cells,
                f"{tiers['steps_without_miss'] / steps:.0%}" if tiers else "",
                f"{tiers['passes'] / steps:.2f}" if tiers else "",
            ]
        )
    streams = [f"{load['streams']} stream{'s' if load['streams'] > 1 else ''}" for load in loads]
    header = ["server", "experts on the GPU"]
    for stream in streams:
        header += [stream, "of stock", *(["of replay"] if replayed else [])]
    return f"{markdown([*header, 'no miss', 'passes'], rows)}\n{origin(result)}\n"


def gate(result: Mapping[str, Any], markdown: Markdown) -> str:
    """One row for each pool: what its steps did, and whether every bit was as it must be."""
    rows = []
    for part in result["parts"]:
        cases: dict[str, list[Mapping[str, Any]]] = {}
        for run in part["runs"]:
            cases.setdefault(run["case"], []).append(run)
        for case, runs in cases.items():
            sums = [sum(run[key] for run in runs) for key in ("steps", "passes", "missed")]
            outcomes: dict[str, int] = {}
            for run in runs:
                for outcome, count in run["outcomes"].items():
                    outcomes[outcome] = outcomes.get(outcome, 0) + count
            told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            verdict = "no" if any(run["problems"] for run in runs) else "yes"
            rows.append([f"{part['part']}: {case}", *map(str, sums), told, verdict])
    header = ["engine: pool", "steps", "passes", "missed pairs", "outcomes", "as it must be"]
    return f"{markdown(header, rows)}\n{origin(result)}\n"


def profile(result: Mapping[str, Any], markdown: Markdown) -> str:
    """What a kernel did with its cycles, and what each change was worth."""
    kernel = result["kernel"]
    facts = [
        ["time", f"{kernel['microseconds']:.1f} us"],
        ["read from memory", f"{kernel['dram_read_mb']:.0f} MB"],
        ["instructions a scheduler", f"{kernel['instructions_per_scheduler']}"],
        ["issue slots used", f"{kernel['issue_slots_busy']:.0%}"],
        ["ALU pipe", f"{kernel['alu_pipe']:.0%}"],
        ["FMA pipe, heavy half", f"{kernel['fma_heavy_pipe']:.0%}"],
        ["tensor pipe", f"{kernel['tensor_pipe_active']:.0%}"],
        [
            "warps a scheduler, of which eligible",
            f"{kernel['warps_per_scheduler']}, {kernel['eligible_warps_per_scheduler']}",
        ],
        *(
            [f"cycles an instruction: {name.replace('_', ' ')}", f"{value:.2f}"]
            for name, value in kernel["stall_cycles_per_instruction"].items()
        ),
    ]
    trials = [
        [
            trial["change"],
            *("" if us is None else f"{us:.1f} us" for us in (trial["tokens_1"], trial["tokens_8"])),
        ]
        for trial in result["trials"]
    ]
    title = f"`{kernel['name']}`, {kernel['tokens']} tokens, {kernel['state']}"
    return (
        f"{markdown([title, ''], facts)}\n"
        f"{markdown(['w2 layer', '1 token', '8 tokens'], trials)}\n{origin(result)}\n"
    )
