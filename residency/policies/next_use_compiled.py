"""`next_use_score`, compiled by numba once per process."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ziggurat.residency.policies import next_use_score
from ziggurat.residency.runtime_errors import PolicyError


@dataclass(frozen=True, slots=True)
class Compiled:
    """Functions of the same names as in `next_use_score`."""

    record: Callable[..., None]
    follow: Callable[..., None]
    warm: Callable[..., None]
    score: Callable[..., None]
    coldest: Callable[..., int]


@functools.cache
def compiled() -> Compiled:
    """PolicyError if numba is not installed. Takes some seconds the first time."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError as error:
        raise PolicyError(
            "policy.eviction: next-use needs numba, which is not installed: pip install numba, or choose heat-weighted"
        ) from error
    names = ("record", "follow", "warm", "score", "coldest")
    return Compiled(*(numba.njit(getattr(next_use_score, name), nogil=True) for name in names))


def as_ids(ids: np.typing.NDArray[np.integer]) -> np.typing.NDArray[np.int64]:
    """The one layout that the functions are compiled for."""
    return np.ascontiguousarray(ids, dtype=np.int64)
