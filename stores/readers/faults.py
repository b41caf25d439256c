"""A reader that makes another one fail on purpose, by rule, so that error paths can be tested in a running service.

Rules come from a plain mapping, or from a JSON file that is looked at again before every `read`, so that a test can
switch faults on and off in a live server (write the file aside and rename it into place):

    {"seed": 0, "rules": [{"kind": "error", "tags": [17], "times": 3, "errno": "EIO"}]}

kind         error: the read fails without touching the buffer. short: half of the bytes (in whole 4 KiB) arrive,
             which is reported as it is, without an error. flip: one bit of what arrived is turned over. delay: the
             bytes arrive `seconds` late.
tags         which jobs (for a pack: layer index * experts + expert); all of them if absent
after        let this many matching reads pass first (default 0)
times        then hit this many (default: without end)
probability  hit each matching read with this chance (default 1); the choice depends on seed, tag and how often the
             tag was read, never on the order of threads
errno        of "error", by name (default EIO); seconds: of "delay"; bit: of "flip", counted from the buffer's
             first (default: chosen like `probability`)
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import xxhash

from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers.base import Arrived, ReadDone, Reader, ReadJob

FaultKind = Literal["error", "short", "flip", "delay"]
_KINDS = ("error", "short", "flip", "delay")
_PAGE = 4096


@dataclass
class FaultRule:
    """One rule and how often it matched and hit so far."""

    kind: FaultKind
    tags: frozenset[int] | None = None
    after: int = 0
    times: int | None = None
    probability: float = 1.0
    errno: int = errno.EIO
    seconds: float = 0.0
    bit: int | None = None
    matched: int = field(default=0, compare=False)
    hits: int = field(default=0, compare=False)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> FaultRule:
        """Raises ReaderError naming the entry that is wrong."""
        known = {"kind", "tags", "after", "times", "probability", "errno", "seconds", "bit"}
        if not isinstance(mapping, Mapping) or mapping.get("kind") not in _KINDS:
            raise ReaderError(f"fault rule {mapping!r}: kind must be one of {', '.join(_KINDS)}")
        if unknown := sorted(set(mapping) - known):
            raise ReaderError(
                f"fault rule: unknown entry {unknown[0]!r}; there are {', '.join(sorted(known))}"
            )
        name = mapping.get("errno", "EIO")
        number = getattr(errno, name, None) if isinstance(name, str) else None
        if not isinstance(number, int):
            raise ReaderError(f"fault rule: errno {name!r} is no error name like EIO")
        for key in ("after", "times", "bit"):
            value = mapping.get(key)
            if value is not None and (type(value) is not int or value < 0):
                raise ReaderError(f"fault rule: {key} is {value!r}, not a count")
        for key in ("probability", "seconds"):
            value = mapping.get(key, 0)
            if type(value) not in (int, float) or not 0 <= value < 1e6:
                raise ReaderError(f"fault rule: {key} is {value!r}, not a number")
        tags = mapping.get("tags")
        if tags is not None and not (isinstance(tags, list) and all(type(tag) is int for tag in tags)):
            raise ReaderError(f"fault rule: tags are {tags!r}, not a list of numbers")
        return cls(
            kind=mapping["kind"],
            tags=None if tags is None else frozenset(tags),
            after=mapping.get("after", 0),
            times=mapping.get("times"),
            probability=float(mapping.get("probability", 1.0)),
            errno=number,
            seconds=float(mapping.get("seconds", 0.0)),
            bit=mapping.get("bit"),
        )


_Hit = tuple[FaultRule, int]


@dataclass
class _RuleSet:
    rules: list[FaultRule]
    seed: int
    reads: Counter[int] = field(default_factory=Counter)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> _RuleSet:
        if not isinstance(mapping, Mapping):
            raise ReaderError("fault rules are not a mapping")
        if unknown := sorted(set(mapping) - {"rules", "seed"}):
            raise ReaderError(f"fault rules: unknown entry {unknown[0]!r}; there are rules, seed")
        rules, seed = mapping.get("rules", []), mapping.get("seed", 0)
        if not isinstance(rules, list) or type(seed) is not int:
            raise ReaderError("fault rules: rules must be a list and seed a number")
        return cls([FaultRule.from_mapping(rule) for rule in rules], seed)

    def choose(self, tag: int) -> list[_Hit]:
        """The rules that hit this read of `tag`, each with a number that is random but always the same."""
        nth = self.reads[tag]
        self.reads[tag] += 1
        hits = []
        for i, rule in enumerate(self.rules):
            if rule.tags is not None and tag not in rule.tags:
                continue
            rule.matched += 1
            if rule.matched <= rule.after or (rule.times is not None and rule.hits >= rule.times):
                continue
            number = xxhash.xxh3_64_intdigest(f"{self.seed} {i} {tag} {nth}".encode())
            if number >= rule.probability * 2**64:
                continue
            rule.hits += 1
            hits.append((rule, number))
        return hits


class FaultyReader:
    """A `Reader` around another one. rules: a mapping as above, or the path of a JSON file of one.

    A file that does not exist holds no rules. Each version of it starts counting anew.
    """

    def __init__(self, inner: Reader, rules: Mapping[str, Any] | Path) -> None:
        self._inner = inner
        self._path = rules if isinstance(rules, Path) else None
        self._stamp: tuple[int, ...] | None = None
        self._lock = Lock()
        self._set = _RuleSet([], 0) if isinstance(rules, Path) else _RuleSet.from_mapping(rules)

    @property
    def name(self) -> str:
        return f"faults({self._inner.name})"

    @property
    def direct(self) -> bool:
        return self._inner.direct

    @property
    def hits(self) -> int:
        """Faults injected under the present rules."""
        with self._lock:
            return sum(rule.hits for rule in self._set.rules)

    def read(
        self, jobs: Iterable[ReadJob], arrived: Arrived | None = None, *, fresh: bool = False
    ) -> Generator[ReadDone]:
        """As `Reader.read`. Raises ReaderError, before anything is read, if the rules file is no rules."""
        work = list(jobs)
        # Checks the jobs, all of them, as the inner reader does.
        self._inner.read(work).close()
        return self._read(work, arrived, fresh)

    def read_ahead(self, pieces: Sequence[tuple[int, int]]) -> bool:
        return self._inner.read_ahead(pieces)

    def forget(self, offset: int, nbytes: int) -> None:
        self._inner.forget(offset, nbytes)

    def close(self) -> None:
        self._inner.close()

    def _read(self, work: list[ReadJob], arrived: Arrived | None, fresh: bool) -> Generator[ReadDone]:
        failed: list[ReadDone] = []
        passed: list[ReadJob] = []
        hits: list[list[_Hit]] = []
        # The inner reader sees positions as tags, since the caller's need not differ.
        with self._lock:
            self._refresh()
            for place, job in enumerate(work):
                hits.append(self._set.choose(job.tag))
                kinds = {rule.kind: rule for rule, _ in reversed(hits[place])}
                if "error" in kinds:
                    number = kinds["error"].errno
                    failed.append(
                        ReadDone(job.tag, 0, 0.0, OSError(number, f"{os.strerror(number)} (injected)"))
                    )
                elif "short" in kinds:
                    half = job.buffer.nbytes // 2 // _PAGE * _PAGE
                    if half:
                        passed.append(ReadJob(job.offset, job.buffer.cast("B")[:half], place, job.late))
                    else:
                        failed.append(ReadDone(job.tag, 0, 0.0, None))
                else:
                    passed.append(job._replace(tag=place))

        def spoil(job: ReadJob) -> None:
            wanted = work[job.tag]
            for rule, number in hits[job.tag]:
                if rule.kind == "delay":
                    time.sleep(rule.seconds)
                elif rule.kind == "flip":
                    bit = (number if rule.bit is None else rule.bit) % (job.buffer.nbytes * 8)
                    job.buffer.cast("B")[bit // 8] ^= 1 << bit % 8
            if arrived is not None and job.buffer.nbytes == wanted.buffer.nbytes:
                arrived(wanted)

        yield from failed
        with closing(self._inner.read(passed, spoil, fresh=fresh)) as ends:
            for done in ends:
                yield done._replace(tag=work[done.tag].tag)

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            found = self._path.stat()
            stamp: tuple[int, ...] | None = (found.st_ino, found.st_mtime_ns, found.st_size)
        except FileNotFoundError:
            stamp = None
        if stamp == self._stamp:
            return
        rules: Any = {}
        if stamp is not None:
            try:
                rules = json.loads(self._path.read_bytes())
            except (OSError, ValueError) as e:
                raise ReaderError(f"{self._path}: no fault rules: {e}") from e
        self._set, self._stamp = _RuleSet.from_mapping(rules), stamp
