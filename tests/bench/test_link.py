"""The link beside what is measured: when it is sampled, and which of its rates a ratio is to."""

from __future__ import annotations

import pytest
import torch

from bench.harness import decode, prefill
from bench.harness.link import Link, link_of, sampled_before
from bench.harness.measure import Run
from bench.harness.prefill import Prompt


def ran(ms: float, rows: int = 0, links: tuple[float, ...] = ()) -> Run:
    return Run(4, ms=[ms, ms], rows=rows, links=list(links))


def test_samples_lie_between_the_steps_at_even_distances() -> None:
    assert sampled_before(48, 96) == {48, 60, 72, 84}
    assert sampled_before(2, 5) == {2, 3, 4}
    assert sampled_before(7, 8) == {7}


def test_a_ratio_is_to_the_link_of_its_own_moment() -> None:
    found = decode.ratios(ran(4.0, 20, (40.0, 60.0)), ran(1.0), 10_000_000, 100.0)
    assert found["link_gb_per_s"] == 50.0
    assert found["links_gb_per_s"] == [40.0, 60.0]
    assert found["resident_step_ms"] == 1.0
    assert (found["link_ms"], found["ratio"], found["limit_ratio"]) == (2.0, round(4 / 3, 4), 2.0)
    assert (found["ratio_to_best_link"], found["limit_ratio_to_best_link"]) == (2.0, 4.0)


def test_without_samples_the_best_link_is_the_only_one() -> None:
    found = decode.ratios(ran(4.0, 20), ran(1.0), 10_000_000, 100.0)
    assert found["ratio"] == found["ratio_to_best_link"] == 2.0
    assert decode.ratios(ran(4.0, 20), ran(1.0), 10_000_000, None) == {}


def test_a_prompt_has_both_ratios_too() -> None:
    out = torch.zeros(3, 4, dtype=torch.bfloat16)
    streamed = Prompt([4.0, 4.0], 1e8, out, [40.0, 60.0])
    found = prefill.report(Prompt([1.0, 1.0], 0.0, out), streamed, {}, 100.0)
    assert (found["link_gb_per_s"], found["link_ms"], found["ratio"]) == (50.0, 2.0, 2.0)
    assert found["ratio_to_best_link"] == 4.0


def test_there_is_no_link_on_a_cpu() -> None:
    assert link_of(torch.device("cpu")) is None


@pytest.mark.gpu
def test_samples_of_a_real_link() -> None:
    link = Link(torch.device("cuda", 0))
    rates = [link.sample() for _ in range(3)]
    assert link.samples == rates
    assert link.best == max(rates)
    assert min(rates) > 0.5
