"""The one argument of a layer's kernels, field by field as `src/params.cuh` has it."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from ziggurat.kernels.cuda.admission import AdmissionParams
from ziggurat.kernels.cuda.lookahead import AheadParams


class Mode(IntEnum):
    """What a route kernel does: a whole layer's list, none (forget all pairs), or one more chunk of experts."""

    WHOLE = 0
    BEGIN = 1
    ADD = 2


class LayerParams(ctypes.Structure):
    """Addresses on the device, offsets and sizes; see the source for shapes."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("live", ctypes.c_void_p),
        ("prefill", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("tally", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("activations", ctypes.c_void_p),
        ("activation_scale", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("entry_count", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("hidden_amax", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("w13_scales", ctypes.c_int64),
        ("w2_codes", ctypes.c_int64),
        ("w2_scales", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("inter", ctypes.c_int32),
        ("ids_are_64", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("entry_pairs", ctypes.c_int32),
        ("direct", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("admission", AdmissionParams),
        ("ahead", AheadParams),
    ]
