"""From what reads of the pack met to the numbers in the metrics buffer."""

from __future__ import annotations

from threading import Lock

from ziggurat.residency.host_cache import HostCache
from ziggurat.residency.metrics import MetricWriter
from ziggurat.stores.counts import FAILED_READS, PackCounts


class PackBooks:
    """Books what is new since the last time. Any thread may do so, each with its own writer."""

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self._booked = PackCounts()
        self._lock = Lock()

    def book(self, writer: MetricWriter) -> None:
        """Add to the counters of `writer`, within its `writing()`."""
        with self._lock:
            now = self._cache.pack_counts()
            new, self._booked = now.since(self._booked), now
        if new == PackCounts():
            return
        add = writer.add
        add("ziggurat_pack_read_bytes_total", new.read_bytes)
        for reason in FAILED_READS:
            add("ziggurat_failed_reads_total", getattr(new, reason), reason)
        add("ziggurat_reread_rows_total", new.reread)
        add("ziggurat_quarantined_rows_total", new.quarantined)
        add("ziggurat_rebuilt_rows_total", new.mended, "yes")
        add("ziggurat_rebuilt_rows_total", new.rebuilt - new.mended, "no")
