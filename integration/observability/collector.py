"""Turns metric samples into Prometheus families, with a `rank` label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as Line

from ziggurat.residency.metric_specs import METRICS, MetricSpec
from ziggurat.residency.metrics import Sample

Source = Callable[[], dict[int, list[Sample]]]


class TierCollector(Collector):
    """Reads its source at scrape time; nothing runs between scrapes."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        families = {spec.name: _family(spec) for spec in METRICS}
        for rank, samples in sorted(self._source().items()):
            # As the families' `add_metric` does, without making the labels of every line anew.
            for spec, named, value, buckets in samples:
                lines, name = families[spec.name].samples, spec.name
                labels = _labels(named, rank)
                if not buckets:
                    lines.append(Line(name, labels, value))
                    continue
                for bound, count in buckets:
                    lines.append(Line(f"{name}_bucket", _labels(named, rank, bound), float(count)))
                lines.append(Line(f"{name}_count", labels, float(buckets[-1][1])))
                lines.append(Line(f"{name}_sum", labels, value))
        yield from families.values()

    def describe(self) -> Iterator[Metric]:
        return iter([_family(spec) for spec in METRICS])


def _family(spec: MetricSpec) -> Metric:
    """An info is a gauge of value 1, as in Prometheus's own text format."""
    if spec.kind == "counter":
        return CounterMetricFamily(spec.name, spec.help)
    if spec.kind == "histogram":
        return HistogramMetricFamily(spec.name, spec.help)
    return GaugeMetricFamily(spec.name, spec.help)


@lru_cache(maxsize=1 << 14)
def _labels(named: tuple[tuple[str, str], ...], rank: int, bound: float | None = None) -> dict[str, str]:
    """The labels of a line, shared by every scrape: nobody may change them. bound: of a histogram's bucket."""
    labels = {**dict(named), "rank": str(rank)}
    if bound is not None:
        labels["le"] = "+Inf" if bound == float("inf") else f"{bound:g}"
    return labels
