"""Numbers that another process reads from a buffer without asking."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.residency.metric_specs import MAX_LAYERS, METRICS, markdown_table
from ziggurat.residency.metrics import BUFFER_BYTES, SCHEMA_VERSION, Sample, TierMetrics, read_samples
from ziggurat.residency.runtime_errors import MetricsBufferError


def find(samples: list[Sample], name: str, **labels: str) -> Sample:
    (sample,) = [s for s in samples if s.spec.name == name and dict(s.labels) == labels]
    return sample


def test_names_follow_prometheus_conventions() -> None:
    names = [spec.name for spec in METRICS]
    assert len(set(names)) == len(names)
    for spec in METRICS:
        assert re.fullmatch(r"ziggurat_[a-z][a-z_]*[a-z]", spec.name)
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert spec.help
        assert (spec.kind == "histogram") == bool(spec.bounds)
        assert list(spec.bounds) == sorted(set(spec.bounds))
        assert spec.name.endswith("_info") == (spec.kind == "info")
        if spec.kind == "gauge":
            assert spec.name.endswith(("_rows", "_bytes", "_ratio", "_seconds", "_per_second"))
    # A histogram's and a counter's series must not be taken for one another's.
    families = [name.removesuffix("_total") for name in names]
    assert len(set(families)) == len(families)


def test_what_is_written_is_read() -> None:
    metrics = TierMetrics()
    with metrics.writing():
        metrics.add("ziggurat_steps_total", 3, "replayed")
        metrics.add("ziggurat_fetched_bytes_total", 2**40 + 1, "pack", "pool")
        metrics.set("ziggurat_coverage_ratio", 0.25)
        metrics.observe("ziggurat_fetch_seconds", [1e-5, 2e-5, 99.0], "arena")
    samples = metrics.samples()
    assert find(samples, "ziggurat_steps_total", outcome="replayed").value == 3
    assert find(samples, "ziggurat_steps_total", outcome="clean").value == 0
    assert find(samples, "ziggurat_fetched_bytes_total", source="pack", target="pool").value == 2**40 + 1
    assert find(samples, "ziggurat_coverage_ratio").value == 0.25
    histogram = find(samples, "ziggurat_fetch_seconds", source="arena")
    assert histogram.value == pytest.approx(99.00003)
    assert histogram.buckets[0] == (1e-5, 1), "a bound belongs to its bucket"
    assert histogram.buckets[1][1] == 2
    assert histogram.buckets[-2][1] == 2
    assert histogram.buckets[-1] == (float("inf"), 3)
    assert find(samples, "ziggurat_fetch_seconds", source="pack").buckets[-1][1] == 0


def test_every_series_has_cells_of_its_own() -> None:
    metrics = TierMetrics()
    metrics.describe(range(3), {})
    number, expected = 0.0, {}
    for spec in METRICS:
        for labels in itertools.product(*(values for _, values in spec.labels)):
            named = tuple(zip((label for label, _ in spec.labels), labels, strict=True))
            number += 1.0
            if spec.per_layer:
                values = number + np.arange(3)
                number += 2.0
                write = metrics.add_layers if spec.kind == "counter" else metrics.set_layers
                write(spec.name, values.astype(np.int64), *labels)
                for layer in range(3):
                    expected[spec.name, (*named, ("layer", str(layer)))] = values[layer]
                continue
            expected[spec.name, named] = number
            if spec.kind == "gauge":
                metrics.set(spec.name, number, *labels)
            elif spec.kind == "histogram":
                metrics.observe(spec.name, [number], *labels)
            elif spec.role == "seconds":
                metrics.add_seconds(spec.name, number, *labels)
            else:
                metrics.add(spec.name, int(number), *labels)
    assert {(s.spec.name, s.labels): s.value for s in metrics.samples()} == expected


def test_both_sides_are_added_up() -> None:
    """What steps and what threads behind them count: counters, seconds, histograms and layers."""
    metrics = TierMetrics()
    metrics.describe((0, 1), {})
    for writer, factor in ((metrics, 1), (metrics.behind, 10)):
        with writer.writing():
            writer.add("ziggurat_passes_total", 3 * factor)
            writer.add_seconds("ziggurat_step_part_seconds_total", 0.5 * factor, "fetch")
            writer.observe("ziggurat_step_passes", [2.0] * factor)
            writer.add_layers("ziggurat_layer_fetched_rows_total", np.array([1, 2]) * factor)
    samples = metrics.samples()
    assert find(samples, "ziggurat_passes_total").value == metrics.value("ziggurat_passes_total") == 33
    seconds = find(samples, "ziggurat_step_part_seconds_total", part="fetch").value
    assert seconds == metrics.value("ziggurat_step_part_seconds_total", "fetch") == 5.5
    histogram = find(samples, "ziggurat_step_passes")
    assert histogram.value == 22.0
    assert histogram.buckets[-1] == (float("inf"), 11)
    assert metrics.value("ziggurat_step_passes") == 11
    assert find(samples, "ziggurat_layer_fetched_rows_total", layer="1").value == 22


def test_layers_have_the_numbers_of_the_model() -> None:
    metrics = TierMetrics()
    metrics.set_layers("ziggurat_layer_pool_heat_ratio", np.array([5, 6]))
    assert not [s for s in metrics.samples() if s.spec.per_layer], "without numbers there are no series"
    metrics.describe((3, 7), {})
    samples = metrics.samples()
    assert find(samples, "ziggurat_layer_pool_heat_ratio", layer="3").value == 5
    assert find(samples, "ziggurat_layer_pool_heat_ratio", layer="7").value == 6


def test_layers_beyond_the_limit_have_no_series() -> None:
    metrics = TierMetrics()
    many = MAX_LAYERS + 7
    metrics.describe(range(many), {})
    metrics.add_layers("ziggurat_layer_fetched_rows_total", np.arange(many))
    metrics.set_layers("ziggurat_layer_pool_heat_ratio", np.ones(many))
    samples = metrics.samples()
    fetched = [s for s in samples if s.spec.name == "ziggurat_layer_fetched_rows_total"]
    assert [s.value for s in fetched] == list(range(MAX_LAYERS))
    assert find(samples, "ziggurat_layer_pool_heat_ratio", layer="0").value == 1
    series = sum(len(s.buckets) + 2 if s.buckets else 1 for s in samples)
    optional = sum(spec.series(0) for spec in METRICS if spec.optional)
    infos = sum(spec.kind == "info" for spec in METRICS)
    assert series == sum(spec.series(many) for spec in METRICS) - optional - infos


def test_a_gauge_that_was_never_set_is_not_there() -> None:
    metrics = TierMetrics()
    assert not [s for s in metrics.samples() if s.spec.optional]
    metrics.set("ziggurat_budget_bytes", 7.0, "pool floor")
    metrics.set("ziggurat_link_bytes_per_second", 6.4e10)
    found = [(s.spec.name, s.value) for s in metrics.samples() if s.spec.optional]
    assert found == [("ziggurat_budget_bytes", 7.0), ("ziggurat_link_bytes_per_second", 6.4e10)]


def test_infos_have_their_labels() -> None:
    metrics = TierMetrics()
    build = {"version": '0.1 "x"', "python": "3.11", "torch": "2", "vllm": "none"}
    metrics.describe((), {"ziggurat_build_info": build})
    (info,) = [s for s in metrics.samples() if s.spec.kind == "info"]
    assert (info.spec.name, dict(info.labels), info.value) == ("ziggurat_build_info", build, 1.0)
    with pytest.raises(MetricsBufferError, match="ziggurat_build_info is described by"):
        metrics.describe((), {"ziggurat_build_info": {"version": "1"}})
    with pytest.raises(MetricsBufferError, match="no info metric ziggurat_other"):
        metrics.describe((), {"ziggurat_other": {}})
    with pytest.raises(MetricsBufferError, match="there is room for"):
        metrics.describe((), {"ziggurat_build_info": {**build, "torch": "x" * 9000}})


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(0, 100, allow_subnormal=False), max_size=30))
def test_histogram_buckets_count_like_prometheus(values: list[float]) -> None:
    metrics = TierMetrics()
    metrics.observe("ziggurat_fetch_seconds", values, "pack")
    sample = find(metrics.samples(), "ziggurat_fetch_seconds", source="pack")
    for bound, count in sample.buckets:
        assert count == sum(value <= bound for value in values)
    assert sample.value == pytest.approx(sum(values))


def test_another_process_reads_a_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    with path.open("w+b") as file:
        file.truncate(BUFFER_BYTES)
        metrics = TierMetrics(memoryview(mmap.mmap(file.fileno(), BUFFER_BYTES)))
    with metrics.writing():
        metrics.add("ziggurat_routed_pairs_total", 12345)
    program = (
        "import sys; from ziggurat.residency.metrics import read_samples\n"
        "samples = read_samples(open(sys.argv[1], 'rb').read())\n"
        "print([int(s.value) for s in samples if s.spec.name == 'ziggurat_routed_pairs_total'])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[12345]"


def test_a_reader_never_sees_half_a_group() -> None:
    """hits + misses = pairs in every copy taken while a writer is at work."""
    metrics = TierMetrics()
    done = threading.Event()

    def write() -> None:
        for i in range(3000):
            with metrics.writing():
                metrics.add("ziggurat_routed_pairs_total", i)
                metrics.add("ziggurat_hit_pairs_total", i // 3)
                metrics.add("ziggurat_missed_pairs_total", i - i // 3)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        samples = {s.spec.name: s.value for s in read_samples(metrics.buffer, attempts=10**9)}
        pairs = samples["ziggurat_hit_pairs_total"] + samples["ziggurat_missed_pairs_total"]
        assert pairs == samples["ziggurat_routed_pairs_total"]
    writer.join()


class Racing(bytearray):
    """A buffer whose owner does something each time a reader has copied all of it."""

    def __init__(self, *then: Callable[[], None]) -> None:
        super().__init__(BUFFER_BYTES)
        self.then = list(then)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice) and index == slice(None, BUFFER_BYTES) and self.then:
            self.then.pop(0)()
        return found


def test_a_copy_taken_in_the_middle_of_a_group_is_thrown_away() -> None:
    group = contextlib.ExitStack()

    def finish() -> None:
        metrics.add("ziggurat_hit_pairs_total", 7)
        group.close()

    buffer = Racing(finish)
    metrics = TierMetrics(buffer)
    group.enter_context(metrics.writing())
    metrics.add("ziggurat_routed_pairs_total", 7)
    samples = read_samples(buffer)
    assert find(samples, "ziggurat_routed_pairs_total").value == 7
    assert find(samples, "ziggurat_hit_pairs_total").value == 7
    assert buffer.then == []


def test_a_copy_during_which_a_group_was_written_is_thrown_away() -> None:
    def write() -> None:
        with metrics.writing():
            metrics.add("ziggurat_passes_total", 1)

    buffer = Racing(write, write)
    metrics = TierMetrics(buffer)
    assert find(read_samples(buffer), "ziggurat_passes_total").value == 2


def test_the_thread_of_the_steps_waits_for_nobody() -> None:
    """A thread behind it that stands in the middle of its group, and a reader, do not keep it from writing."""
    metrics = TierMetrics()
    entered, go = threading.Event(), threading.Event()

    def stand() -> None:
        with metrics.behind.writing():
            metrics.behind.add("ziggurat_passes_total", 1)
            entered.set()
            go.wait()

    other = threading.Thread(target=stand)
    other.start()
    entered.wait()
    try:
        with metrics.writing():
            metrics.add("ziggurat_passes_total", 1)
        assert find(read_samples(metrics.buffer, attempts=3), "ziggurat_passes_total").value == 2
    finally:
        go.set()
        other.join()


def test_one_thread_behind_the_steps_writes_at_a_time() -> None:
    metrics = TierMetrics()
    with metrics.behind.writing():
        assert metrics.behind._lock.locked()
    assert not metrics.behind._lock.locked()


def test_a_writer_that_died_half_way_is_still_read() -> None:
    metrics = TierMetrics()
    metrics.add("ziggurat_passes_total", 5)
    group = metrics.writing()
    group.__enter__()
    assert find(read_samples(metrics.buffer, attempts=3), "ziggurat_passes_total").value == 5


@pytest.mark.parametrize("threads", [4])
def test_threads_of_the_writer_do_not_lose_counts(threads: int) -> None:
    metrics = TierMetrics()

    def count() -> None:
        for _ in range(2000):
            with metrics.behind.writing():
                metrics.behind.add("ziggurat_passes_total", 1)

    workers = [threading.Thread(target=count) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert metrics.value("ziggurat_passes_total") == threads * 2000


def test_a_foreign_buffer_is_refused() -> None:
    for data in (b"", b"\0" * BUFFER_BYTES, b"ZIGMETR1"):
        with pytest.raises(MetricsBufferError, match="not a metrics buffer"):
            read_samples(data)
    other = bytearray(TierMetrics().buffer)
    other[8] += 1  # schema version
    with pytest.raises(MetricsBufferError, match=f"schema {SCHEMA_VERSION + 1}/"):
        read_samples(other)
    with pytest.raises(MetricsBufferError, match="schema"):
        read_samples(bytes(TierMetrics().buffer)[:-8])


def test_a_buffer_that_cannot_hold_the_numbers_is_refused() -> None:
    with pytest.raises(MetricsBufferError, match=str(BUFFER_BYTES)):
        TierMetrics(bytearray(BUFFER_BYTES - 1))
    with pytest.raises(MetricsBufferError, match="writable"):
        TierMetrics(memoryview(bytes(BUFFER_BYTES)))


def test_a_larger_and_dirty_buffer_is_cleared() -> None:
    buffer = bytearray(b"\xff" * (BUFFER_BYTES + 64))
    metrics = TierMetrics(buffer)
    metrics.describe((1,), {})
    assert all(sample.value == 0 for sample in metrics.samples())
    assert buffer[BUFFER_BYTES:] == b"\xff" * 64


def test_a_metric_used_as_another_kind_is_refused() -> None:
    with pytest.raises(MetricsBufferError, match="is a counter, not a gauge"):
        TierMetrics().set("ziggurat_passes_total", 1.0)
    with pytest.raises(MetricsBufferError, match="is a seconds, not a counter"):
        TierMetrics().add("ziggurat_step_part_seconds_total", 1, "fetch")
    with pytest.raises(MetricsBufferError, match="is a counter, not a seconds"):
        TierMetrics().add_seconds("ziggurat_passes_total", 1.0)
    with pytest.raises(MetricsBufferError, match="is a layer counter, not a counter"):
        TierMetrics().add("ziggurat_layer_fetched_rows_total", 1)
    with pytest.raises(MetricsBufferError, match="no series ziggurat_steps_total"):
        TierMetrics().add("ziggurat_steps_total", 1, "unheard of")
    with pytest.raises(MetricsBufferError, match="is a counter, not a layer counter"):
        TierMetrics().add_layers("ziggurat_passes_total", np.ones(1, dtype=np.int64))


def test_words_are_aligned_so_that_single_numbers_are_never_torn() -> None:
    assert BUFFER_BYTES % 8 == 0
    buffer = np.frombuffer(TierMetrics().buffer, dtype=np.uint64)
    assert buffer.ctypes.data % 8 == 0


def test_the_table_has_every_metric() -> None:
    table = markdown_table()
    assert all(f"`{spec.name}`" in table for spec in METRICS)
    assert len([line for line in table.splitlines() if line.startswith("| `")]) == len(METRICS)
    assert f"{sum(spec.series(MAX_LAYERS) for spec in METRICS)} at the very most" in table
