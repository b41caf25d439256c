"""Reads a /metrics page and checks that what Ziggurat counts adds up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

from prometheus_client.parser import text_string_to_metric_families

from ziggurat.residency.metric_specs import METRICS, MetricSpec

Series = tuple[str, frozenset[tuple[str, str]]]
_RANK = ("rank", "0")


class Scrape:
    """One page's samples of Ziggurat, of rank 0."""

    def __init__(self, values: Mapping[Series, float]) -> None:
        self._values = dict(values)

    @classmethod
    def parse(cls, page: str) -> Scrape:
        """Samples of a page in Prometheus's text format."""
        values = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.startswith("ziggurat_"):
                    values[sample.name, frozenset(sample.labels.items())] = sample.value
        return cls(values)

    def value(self, name: str, **labels: str) -> float:
        """One sample; KeyError if the page has none."""
        return self._values[name, frozenset({*labels.items(), _RANK})]

    def missing(self) -> list[str]:
        """Series of the metric list that the page lacks. Of metrics by layer, and of infos, one is enough."""
        names = {name for name, _ in self._values}
        lacking = [
            f"{name}{dict(sorted(labels)) or ''}"
            for spec in METRICS
            if not spec.optional and not spec.per_layer and spec.kind != "info"
            for name, labels in _expected(spec)
            if (name, labels) not in self._values
        ]
        alone = [spec.name for spec in METRICS if spec.per_layer or spec.kind == "info"]
        return lacking + [name for name in alone if name not in names]


def _expected(spec: MetricSpec) -> Iterable[Series]:
    names = (f"{spec.name}_count", f"{spec.name}_sum") if spec.kind == "histogram" else (spec.name,)
    for name in names:
        for values in product(*(choices for _, choices in spec.labels)):
            labels = zip((label for label, _ in spec.labels), values, strict=True)
            yield name, frozenset({*labels, _RANK})


def _label_values(name: str) -> tuple[str, ...]:
    """The values of the only label of a metric."""
    (spec,) = (spec for spec in METRICS if spec.name == name)
    ((_, values),) = spec.labels
    return values


def total_steps(page: Scrape) -> float:
    """Steps, however they ended."""
    return _sum(page, "ziggurat_steps_total", "outcome")


def _sum(page: Scrape, name: str, label: str) -> float:
    """A metric over all values of its one label."""
    return sum(page.value(name, **{label: value}) for value in _label_values(name))


ROUTES = (("arena", "pool"), ("pack", "pool"), ("pack", "arena"))
"""(source, target) of rows that move."""


def problems(page: Scrape, pairs: int) -> list[str]:
    """What does not add up, in words. pairs: routed (token, expert) pairs that the client's own tokens must have made.

    hits + misses = routed pairs; bytes = rows x stride; passes = steps + replays; used <= capacity; nothing failed.
    """
    missing = page.missing()
    if missing:
        return [f"not on the page: {', '.join(missing)}"]
    value = page.value
    stride = value("ziggurat_row_stride_bytes")
    routed = value("ziggurat_routed_pairs_total")
    steps = total_steps(page)
    checks: list[tuple[str, float, float]] = [
        (
            "hits + misses = routed pairs",
            value("ziggurat_hit_pairs_total") + value("ziggurat_missed_pairs_total"),
            routed,
        ),
        ("routed pairs = tokens x layers x top-k", routed, pairs),
        (
            "hits of the pool as a tier = hits",
            value("ziggurat_tier_hits_total", tier="pool"),
            value("ziggurat_hit_pairs_total"),
        ),
        (
            "misses of the pool as a tier = misses",
            value("ziggurat_tier_misses_total", tier="pool"),
            value("ziggurat_missed_pairs_total"),
        ),
        ("passes = steps + replay passes", value("ziggurat_passes_total"), steps + _replays(page)),
        ("steps seen by the pass histogram = steps", value("ziggurat_step_passes_count"), steps),
        (
            "passes seen by the pass histogram = passes",
            value("ziggurat_step_passes_sum"),
            steps + _replays(page),
        ),
        ("I/O errors", value("ziggurat_io_errors_total"), 0),
        ("verification failures", value("ziggurat_verification_failures_total"), 0),
        ("failed reads", _sum(page, "ziggurat_failed_reads_total", "reason"), 0),
        ("rows made anew", _sum(page, "ziggurat_rebuilt_rows_total", "written_back"), 0),
        ("failed tokens", value("ziggurat_failed_tokens_total"), 0),
    ]
    for source, target in ROUTES:
        labels = {"source": source, "target": target}
        rows = value("ziggurat_fetched_rows_total", **labels)
        found = value("ziggurat_fetched_bytes_total", **labels)
        checks.append((f"bytes from {source} to {target} = rows x stride", found, rows * stride))
    for tier in ("pool", "arena"):
        used = value("ziggurat_tier_used_rows", tier=tier)
        checks.append(
            (
                f"used bytes of the {tier} = rows x stride",
                value("ziggurat_tier_used_bytes", tier=tier),
                used * stride,
            )
        )
        over = max(0.0, used - value("ziggurat_tier_capacity_rows", tier=tier))
        checks.append((f"rows of the {tier} beyond its capacity", over, 0))
    return [f"{what}: {found:.0f} against {wanted:.0f}" for what, found, wanted in checks if found != wanted]


def _replays(page: Scrape) -> float:
    return page.value("ziggurat_replay_passes_total")
