"""Prompts that commands run an engine with."""

from __future__ import annotations

from pathlib import Path

from ziggurat.integration.cli.failures import CliError

PROMPTS = (
    "def read_config(path):\n    ",
    "import os\nimport sys\n\nclass Cache:\n",
    "# The quick brown fox",
    "for i in range(10):\n",
)


def read_prompts(path: Path | None) -> list[str]:
    """The lines of a UTF-8 file that are not blank; without a file, the built-in ones. CliError if there are none."""
    if path is None:
        return list(PROMPTS)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read prompts from {path}: {error}") from error
    if not lines:
        raise CliError(f"{path} holds no prompt")
    return lines
