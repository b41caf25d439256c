"""Runs the README's quick start on a GPU as it is written there.

    python bench/h200/quickstart.py [--list]

The YAML block becomes `tiers.yaml` in a temporary folder where `bench` leads to this checkout's; the lines that begin
with `$` are run there one after another. The server runs until the lines behind it are done. Status 1 if a line fails.
The line that installs is left to `bench/h200/setup.sh`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.served import Server  # noqa: E402

HEADING = "## Quick start on a GPU"
PORT = 8000
READY_SECONDS = 240.0
LINE_SECONDS = 120.0


def section(readme: str) -> str:
    """The text under the heading; ValueError without it."""
    _, found, rest = readme.partition(f"\n{HEADING}\n")
    if not found:
        raise ValueError(f"the README has no section {HEADING!r}")
    return rest.partition("\n## ")[0]


def tiers_of(text: str) -> str:
    """The section's YAML block."""
    found = re.search(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError("the quick start has no YAML block")
    return found[1]


def lines_of(text: str) -> list[str]:
    """The commands, each as one shell command; a line that ends in a backslash goes on."""
    return [
        match[1].replace("\\\n", " ")
        for match in re.finditer(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)$", text, re.MULTILINE)
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the README's quick start on a GPU.")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    options = parser.parse_args(arguments)
    text = section((ROOT / "README.md").read_text(encoding="utf-8"))
    lines = lines_of(text)
    if options.list:
        print("\n".join(lines))
        return 0
    with tempfile.TemporaryDirectory(prefix="ziggurat-quickstart-") as name:
        folder = Path(name)
        (folder / "tiers.yaml").write_text(tiers_of(text), encoding="utf-8")
        (folder / "bench").symlink_to(ROOT / "bench")
        return _run(lines, folder)


def _run(lines: Sequence[str], folder: Path) -> int:
    server: Server | None = None
    try:
        for line in lines:
            print(f"$ {line}", flush=True)
            if line.startswith("ziggurat serve "):
                shell = ["bash", "-c", f"cd {folder} && exec {line}"]
                server = Server(shell, os.environ, PORT, folder / "server.log")
                print(
                    f"ready after {server.wait_ready(READY_SECONDS, lambda waited: None):.0f} s", flush=True
                )
                continue
            status = subprocess.run(
                ["bash", "-o", "pipefail", "-c", line], cwd=folder, timeout=LINE_SECONDS, check=False
            ).returncode
            print(flush=True)
            if status:
                print(f"status {status}: {line}", file=sys.stderr)
                return 1
    finally:
        if server is not None:
            print(server.tail(12))
            server.stop()
    print("the quick start works as written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
