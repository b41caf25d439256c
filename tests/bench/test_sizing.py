"""The worked examples of docs/sizing.md are plans that a start would accept, with the sizes that the page shows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bench import sizing
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.errors import BudgetError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
CONFIGS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


@pytest.mark.parametrize("example", sizing.EXAMPLES, ids=lambda example: example.name)
def test_the_examples_fit(example: sizing.Example) -> None:
    found = example.plan()
    assert found.ok
    assert len(found.ranks) == example.ranks
    assert found.arena_kind == "pinned"


def test_an_example_on_a_smaller_machine_does_not() -> None:
    example = sizing.EXAMPLES[0]
    with pytest.raises(BudgetError, match=r"tiers\.host\.size"):
        replace(example, free_host=40 * sizing.GIB).plan()
    with pytest.raises(BudgetError, match=r"device memory: .*tiers\.device\.size"):
        replace(example, free_device=14 * sizing.GIB).plan()


def test_the_page_shows_the_configurations_of_the_examples() -> None:
    shown = [(found["tiers"]["device"]["size"], found["tiers"]["host"]["size"]) for found in CONFIGS]
    assert shown == [(example.pool, example.host) for example in (sizing.EXAMPLES[0], sizing.EXAMPLES[2])]
    for found in CONFIGS:
        TiersConfig.from_mapping(found)


def test_the_text_has_the_numbers_of_the_plans() -> None:
    text = re.sub(r"(?<=\d) (?=\d{3})", "", PAGE)
    for example in (sizing.EXAMPLES[0], sizing.EXAMPLES[2]):
        found = example.plan()
        one = found.ranks[0]
        for rows in (one.pool_rows, one.arena_rows, found.rows):
            assert f"{rows} " in text
        for share in (one.coverage, one.arena_rows / found.rows):
            assert f"{share:.0%}".replace("%", " %") in PAGE
        assert f"{found.pack_bytes / sizing.GIB:.1f} GiB" in PAGE


def test_misses_cost_bytes_over_the_link() -> None:
    example = sizing.EXAMPLES[0]
    assert f"| {10 * 6.75 * 2**20 / 27e9 * 1e3:.2f} ms |" in sizing.time_table()
    assert example.plan().stride == 6.75 * 2**20


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in ("metrics.md", "operations.md", "sizing.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (ROOT / "docs" / target).is_file(), f"{page} links to {target}"
