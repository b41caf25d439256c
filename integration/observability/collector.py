"""Turns metric samples into Prometheus families, with a `rank` label."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

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
            for sample in samples:
                labels = [value for _, value in sample.labels] + [str(rank)]
                family = families[sample.spec.name]
                if isinstance(family, HistogramMetricFamily):
                    buckets = [(_bound(bound), float(count)) for bound, count in sample.buckets]
                    family.add_metric(labels, buckets, sample.value)
                else:
                    family.add_metric(labels, sample.value)
        yield from families.values()

    def describe(self) -> Iterator[Metric]:
        return iter([_family(spec) for spec in METRICS])


def _family(spec: MetricSpec) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    labels = [*(name for name, _ in spec.labels), "rank"]
    if spec.kind == "counter":
        return CounterMetricFamily(spec.name, spec.help, labels=labels)
    if spec.kind == "gauge":
        return GaugeMetricFamily(spec.name, spec.help, labels=labels)
    return HistogramMetricFamily(spec.name, spec.help, labels=labels)


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else f"{bound:g}"
