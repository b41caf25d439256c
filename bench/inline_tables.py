"""Tables of steps whose layers fetch their own misses, from the result files that `bench/h200/run_inline.sh` leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.gpu_tables import Markdown, origin

_MODES = ("inline", "replay")


def inline(result: Mapping[str, Any], markdown: Markdown) -> str:
    """Decode steps, the prompt and the timeline of one run; parts that were not run are left out."""
    parts = [
        _decode(result, markdown) if result.get("cases") else "",
        _prompt(result["prompt"], markdown) if "prompt" in result else "",
        *(_timeline(name, one, markdown) for name, one in result.get("timeline", {}).items()),
    ]
    return "\n".join([*(part for part in parts if part), f"{origin(result)}\n"])


def _decode(result: Mapping[str, Any], markdown: Markdown) -> str:
    beside = links_beside(result)
    links = 1 if beside else 0
    rows: list[list[str]] = []
    for case in result["cases"]:
        if "resident_ms" not in case:
            continue
        work = case["resident_ms"]["mean"]
        rows.append([f"{case['label']}: all resident", f"{work:.2f} ms", *[""] * (8 + links)])
        if "forced" in case:
            forced = case["forced"]
            rows.append(
                [
                    f"{case['label']}: all resident, admitting",
                    f"{forced['step_ms']['mean']:.2f} ms",
                    *[""] * (3 + links),
                    f"{1 + forced['overhead']:.3f}",
                    *[""] * 3,
                    bits(forced),
                ]
            )
        rows += [
            _run(case["label"], one, mode, beside)
            for one in case.get("runs", ())
            for mode in _MODES
            if mode in one
        ]
    header = [
        "routing: coverage, misses",
        "step",
        "missed rows",
        "missed",
        *(["link, GB/s"] if beside else []),
        "on the link",
        "ratio",
        "of the limit",
        "passes",
        "predicted",
        "bits",
    ]
    notes = (
        f"{result['layers']} layers of {result['experts']} experts, top-{result['top_k']}, hidden {result['hidden']}, "
        f"intermediate {result['intermediate']}, `{result['codec']}` rows of {result['row_bytes'] / 2**20:.2f} MiB, "
        f"{result['dense_mb_per_layer']:.0f} MB of other weights a layer. {said_of_links(result)} Mean times of a "
        "step; ratio: to the resident step plus the missed bytes over the link (for `admitting`: to the resident step, "
        "medians); of the limit: to the larger of the two."
    )
    if hosts := [_host(case) for case in result["cases"] if "resident_host_us" in case and "forced" in case]:
        notes += f" Before the launch the host takes, of all resident and admitting: {'; '.join(hosts)}."
    return f"{markdown(header, rows)}\n{notes}\n"


def links_beside(result: Mapping[str, Any]) -> bool:
    """Whether the link was measured beside each run; results from before that have one for all."""
    return any(
        "ratio_to_best_link" in run
        for case in result["cases"]
        for one in case.get("runs", ())
        for run in one.values()
        if isinstance(run, Mapping)
    )


def said_of_links(result: Mapping[str, Any]) -> str:
    """Where the GB/s of a table come from, in a sentence or two."""
    best = result["link_gb_per_s"]
    if not links_beside(result):
        return f"Link: {best} GB/s, large copies from page-locked memory in the same run."
    return (
        "Link: large copies from page-locked memory between the steps of the same line, the mean of a "
        f"few samples; in brackets the same ratio with the best sample of the whole run, {best:.1f} GB/s (the "
        f"slowest: {result['slowest_link_gb_per_s']:.1f})."
    )


def ratio_cell(run: Mapping[str, Any], name: str) -> str:
    """`ratio` or `limit_ratio` of a run, with the one to the best link behind it."""
    if name not in run:
        return ""
    best = run.get(f"{name}_to_best_link")
    return f"{run[name]:.3f}" + ("" if best is None else f" ({best:.3f})")


def _host(case: Mapping[str, Any]) -> str:
    before, forced = case["resident_host_us"]["before"], case["forced"]["host_us"]["before"]
    return f"{case['label']} {before:.0f} and {forced:.0f} us"


def ahead(result: Mapping[str, Any], markdown: Markdown) -> str:
    """Decode steps with and without look-ahead, and what came of the guesses."""
    rows = []
    for case in result.get("cases", ()):
        for one in case.get("runs", ()):
            if not {"inline", "ahead"} <= one.keys():
                continue
            plain, run = one["inline"], one["ahead"]
            gain = run["step_ms"]["mean"] / plain["step_ms"]["mean"] - 1
            limits = [ratio_cell(each, "limit_ratio") for each in (plain, run)]
            guesses = run.get("ahead")
            rows.append(
                [
                    f"{case['label']}: {one['coverage']:.0%}",
                    f"{case['recall']:.0%}" if "recall" in case else "",
                    f"{plain['step_ms']['mean']:.2f} ms",
                    f"{run['step_ms']['mean']:.2f} ms ({gain:+.0%})",
                    *limits,
                    f"{run['missed_rows_per_step']:.1f}",
                    *(_guesses(guesses) if guesses else [""] * 4),
                    bits(run),
                ]
            )
    header = [
        "routing: coverage",
        "recall",
        "inline",
        "with look-ahead",
        "of the limit, inline",
        "with",
        "missed rows",
        "guessed rows",
        "of the missing",
        "used",
        "wasted",
        "bits",
    ]
    note = (
        f"{result['layers']} layers of {result['experts']} experts, top-{result['top_k']}, `{result['codec']}` rows of "
        f"{result['row_bytes'] / 2**20:.2f} MiB, {result['dense_mb_per_layer']:.0f} MB of other weights a layer, "
        f"{result['lookahead']} guesses a token. {said_of_links(result)} Mean times of a step; limit: "
        "the larger of the resident step and the missed bytes over the link."
    )
    return f"{markdown(header, rows)}\n{note}\n\n{origin(result)}\n"


def _guesses(found: Mapping[str, float]) -> list[str]:
    return [
        f"{found['guessed_rows_per_step']:.1f}",
        f"{found['recall_missing']:.0%}",
        f"{found['used_mib_per_step']:.1f} MiB",
        f"{found['wasted_mib_per_step']:.1f} MiB",
    ]


def _run(label: str, one: Mapping[str, Any], mode: str, beside: bool) -> list[str]:
    run = one[mode]
    predicted = one.get("predicted", {}) if mode == "inline" else {}
    return [
        f"{label}: {one['coverage']:.0%}, {mode}",
        f"{run['step_ms']['mean']:.2f} ms",
        f"{run['missed_rows_per_step']:.1f}",
        f"{run['missed_mib_per_step']:.1f} MiB",
        *([link_cell(run)] if beside else []),
        f"{run['link_ms']:.2f} ms" if "link_ms" in run else "",
        ratio_cell(run, "ratio"),
        ratio_cell(run, "limit_ratio"),
        f"{run['passes_per_step']:.2f}",
        f"{predicted['step_ms']:.2f} ms ({predicted['error']:+.0%})" if "error" in predicted else "",
        bits(run),
    ]


def link_cell(run: Mapping[str, Any]) -> str:
    """GB/s."""
    return f"{run['link_gb_per_s']:.1f}" if "link_gb_per_s" in run else ""


def bits(run: Mapping[str, Any]) -> str:
    """Whether a run had the bits of the resident one."""
    return "same" if run["same_bits"] else "DIFFERENT"


def host_cost(result: Mapping[str, Any], markdown: Markdown, source: str) -> str:
    """A service a row, microseconds of the host. source: what is said of the measurement."""
    rows = [
        [
            f"{run['model']}, {run['setup']}, {run['tokens']} token{'s' if run['tokens'] > 1 else ''}",
            *(f"{run[part]:.1f} us" for part in ("before", "after", "beside")),
        ]
        for run in result["runs"]
    ]
    header = ["a step of", "until the forward begins", "after its end", "other threads"]
    return f"{markdown(header, rows)}\n{source}\n"


def _prompt(prompt: Mapping[str, Any], markdown: Markdown) -> str:
    hits = prompt["decode_hits"]
    rows = [
        ["all resident", f"{prompt['resident_ms']:.0f} ms"],
        [f"{prompt['coverage']:.0%} resident, the others streamed", f"{prompt['streamed_ms']:.0f} ms"],
        ["streamed", f"{prompt['streamed_gib']:.1f} GiB"],
    ]
    if "ratio" in prompt:
        rows += [
            ["on the link", f"{prompt['link_ms']:.0f} ms"],
            ["ratio to the longer of work and link", _prompt_ratio(prompt)],
        ]
    rows += [
        [f"decode hits in the {hits['steps']} steps before", f"{hits['before']:.1%}"],
        [f"in the {hits['steps']} steps after", f"{hits['after']:.1%}"],
        ["in the same steps without the prompt", f"{hits['after_without_prompt']:.1%}"],
        ["bits", bits(prompt)],
    ]
    return markdown([f"prompt of {prompt['tokens']} tokens", ""], rows)


def _prompt_ratio(prompt: Mapping[str, Any]) -> str:
    if "ratio_to_best_link" not in prompt:
        return f"{prompt['ratio']:.3f}"
    return f"{ratio_cell(prompt, 'ratio')}, link {link_cell(prompt)} GB/s"


def churn(result: Mapping[str, Any], markdown: Markdown) -> str:
    """What thousands of steps did while the arena changed under them."""
    told = ", ".join(f"{count} {outcome}" for outcome, count in result["outcomes"].items())
    rows = [
        ["steps", f"{result['steps']}: {told}"],
        ["with another bit than all resident", f"{result['steps_with_other_bits']}"],
        ["rows evicted from the arena meanwhile", f"{result['evicted_from_the_arena']}"],
        ["rows read into it by the churning thread", f"{result['read_into_the_arena']}"],
        ["rows that the device fetched", f"{result['rows_fetched_by_the_device']}"],
        ["rows that it did not find there", f"{result['rows_missing_in_the_arena']}"],
    ]
    title = f"churn: {result['layers']} layers of {result['experts']} experts, rows of {result['row_kib']:.0f} KiB"
    return f"{markdown([title, ''], rows)}\n{origin(result)}\n"


def _timeline(name: str, one: Mapping[str, Any], markdown: Markdown) -> str:
    rows = [
        [f"`{kernel['name']}`", f"{kernel['count']}", f"{kernel['us']:.0f} us"] for kernel in one["kernels"]
    ]
    rows += [
        ["from the first kernel to the last", "", f"{one['span_us']:.0f} us"],
        ["no kernel runs", "", f"{one['idle_us']:.0f} us"],
        ["gathers run", "", f"{one['gather_us']:.0f} us"],
        ["only gathers run", "", f"{one['gather_alone_us']:.0f} us"],
    ]
    title = f"one step, {name}, {one['routing']}"
    lines = "\n".join(one["first_layers"])
    return (
        f"{markdown([title, 'kernels', 'time'], rows)}\n"
        f"Its first layers, start and duration in microseconds:\n\n```\n{lines}\n```\n"
    )


def inline_gather(result: Mapping[str, Any], markdown: Markdown) -> str:
    """One row for each row size and number of misses."""
    rows = []
    for run in result["runs"]:
        us = run["layer_us"]
        traced = run["gather_us"] is not None
        rows.append(
            [
                f"{run['misses']} x {run['row_bytes'] / 2**20:.2f} MiB, {run['tokens']} token"
                f"{'s' if run['tokens'] > 1 else ''}",
                f"{us['plain']:.1f} us",
                f"{us['present']:.1f} us ({run['idle_overhead']:+.1%})",
                f"{us['missing']:.1f} us",
                f"{run.get('copying_us', run['gather_us']):.1f} us" if traced else "",
                f"{run['gather_of_link']:.2f}" if traced else "",
                f"{run['added_of_link']:.2f}",
                f"{run['ratio']:.3f}",
            ]
        )
    header = [
        "misses of a layer",
        "layer, nothing fetched",
        "admitting, none missing",
        "all missing",
        "gather",
        "of the link",
        "added bytes, of the link",
        "ratio",
    ]
    return f"{markdown(header, rows)}\n{origin(result)}\n"
