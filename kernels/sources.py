"""Checkpoint formats and the exact numbers they stand for."""

from __future__ import annotations

from typing import Protocol

import torch


class SourceWeight(Protocol):
    """One expert matrix as a checkpoint stores it.

    ========== ============================== ==================================== =====================
    format     data                           scale (multiplies)                   scale_2 (multiplies)
    ========== ============================== ==================================== =====================
    bf16       bfloat16 [N, K]                none                                 none
    f16        float16 [N, K]                 none                                 none
    f32        float32 [N, K]                 none                                 none
    fp8_block  float8_e4m3fn [N, K]           f32, bf16 or e8m0                    none
                                              [ceil(N/bn), ceil(K/bk)]
    nvfp4      uint8 [N, K/2], e2m1 pairs     float8_e4m3fn [N, K/16]              f32, one element
    mxfp4      uint8 [N, K/2], e2m1 pairs     uint8 or e8m0 [N, K/32]              none
    ========== ============================== ==================================== =====================

    Pairs hold the even k in the low nibble. ``name`` is the tensor's name, for errors; ``shape`` the
    logical (N, K); ``block`` the fp8_block shape (bn, bk).
    """

    @property
    def name(self) -> str: ...

    @property
    def format(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def data(self) -> torch.Tensor: ...

    @property
    def scale(self) -> torch.Tensor | None: ...

    @property
    def scale_2(self) -> torch.Tensor | None: ...

    @property
    def block(self) -> tuple[int, int] | None: ...
