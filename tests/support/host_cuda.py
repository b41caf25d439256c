"""The route kernel and the gather compiled for the CPU: their sources, with the few lines of assembly replaced.

Each thread of a block is a fiber (host_cuda.h), so blocks of any size run on one core, in any order of threads.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from lanes.cuda_stubs import find_compiler
from ziggurat.kernels.admission import Admission
from ziggurat.kernels.cuda.admission import GATHER_BLOCKS, AdmittedLayers
from ziggurat.kernels.cuda.lookahead import GuessParams, view_of
from ziggurat.kernels.cuda.nvrtc import sources_of
from ziggurat.kernels.cuda.params import LayerParams, Mode
from ziggurat.kernels.cuda.units import SOURCES
from ziggurat.kernels.cuda.workspace import SMALL_ROUTE_PAIRS, workspace_items
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.lookahead import Lookahead

_THREADS = 64  # of a block that moves rows: a chunk is 512 vectors of 16 bytes
_SHIM = Path(__file__).with_suffix(".h")
_ASSEMBLY = re.compile(r"asm(?: volatile)?\((.*?)\);", re.DOTALL)
_OUTPUT, _ADDRESS = re.compile(r'"=r"\((\w+)'), re.compile(r'"l"\((.*?)\)(?=\s*(?::|$))')
_MAIN = """
static const Params* params;
static i32* dynamic;
extern "C" void route(const Params* p, int large, int threads, int order, int words) {
    params = p;
    dynamic = (i32*)malloc((size_t)words * 4);
    memset(dynamic, 0xEE, (size_t)words * 4);
    blockIdx = Index{0, 0, 0};
    if (large) run_block(threads, order, [] { route_large(*params, dynamic); });
    else run_block(threads, order, [] { route_small(*params); });
    free(dynamic);
}
extern "C" void gather(const Params* p, int blocks, int threads) {
    params = p;
    gridDim = Index{(unsigned)blocks, 1, 1};
    for (unsigned b = 0; b < gridDim.x; b++) {
        blockIdx = Index{b, 0, 0};
        if (p->ahead.words) run_block(threads, 0, [] { copy_missing<true>(*params); });
        else run_block(threads, 0, [] { copy_missing<false>(*params); });
    }
}
static const Guess* guess;
extern "C" void choose(const Guess* p, int order) {
    guess = p;
    blockIdx = Index{0, 0, 0};
    run_block(CHOICE_THREADS, order, [] { choose_rows(*guess); });
}
extern "C" void fetch(const Guess* p, int blocks, int threads, int first, int last) {
    guess = p;
    gridDim = Index{(unsigned)blocks, 1, 1};
    for (int b = first; b < last; b++) {
        blockIdx = Index{(unsigned)b, 0, 0};
        run_block(threads, 0, [] { fetch_rows(*guess); });
    }
}
"""


def _plain(statement: re.Match[str]) -> str:
    """A load becomes one; the rest is left out: nothing that needs it runs."""
    output, address = _OUTPUT.search(statement[1]), _ADDRESS.search(statement[1].replace(': "memory"', ""))
    if output and address and '"ld.' in statement[1]:
        return f"{output[1]} = *({address[1]});"
    return ""


@cache
def compiled() -> ctypes.CDLL:
    """Takes a C++ compiler a second."""
    texts = sources_of("route.cuh", SOURCES)
    folder = Path(mkdtemp(prefix="ziggurat-host-"))
    for name, text in texts.items():
        (folder / name).write_text(_ASSEMBLY.sub(_plain, text))
    (folder / "main.cpp").write_text(f'#include "{_SHIM}"\n#include "route.cuh"\n{_MAIN}')
    compiler = find_compiler()
    assert compiler is not None, "the suites need a C compiler, as the set-up does"
    flags = [
        "-x",
        "c++",
        "-std=c++17",
        "-O1",
        "-w",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-threadsafe-statics",
    ]
    made = folder / "route.so"
    subprocess.run(
        [*compiler, *flags, "-shared", "-fPIC", "-o", str(made), str(folder / "main.cpp")], check=True
    )
    library = ctypes.CDLL(str(made))
    shutil.rmtree(folder)
    return library


class HostLayer:
    """What `CudaLayerKernels` prepares, for the kernels up to the GEMMs, over tensors of the CPU."""

    def __init__(self, experts: int, top_k: int, tokens: int, stride: int) -> None:
        items = workspace_items(ExpertGeometry(32, 32), experts, top_k, tokens)
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        self.memory = {
            name: torch.full((n,), -1 if s > 1 else 255, dtype=kinds[s]) for name, (n, s) in items.items()
        }
        self.experts, self.top_k, self.stride = experts, top_k, stride
        self.params = LayerParams()
        for name, tensor in self.memory.items():
            setattr(self.params, name, tensor.data_ptr())

    def run(
        self,
        admission: Admission | None,
        layer: int,
        ids: torch.Tensor,
        live: torch.Tensor,
        prefill: torch.Tensor | None,
        *,
        slots: torch.Tensor | None = None,
        tally: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        large: bool = False,
        order: int = 0,
        entry_pairs: int = 8,
        lookahead: Lookahead | None = None,
    ) -> None:
        """Route and the gather."""
        p = self.params
        if admission is not None:
            slots = admission.table[layer]
            views = AdmittedLayers(admission, self.experts, admission.arena.data_ptr())
            p.admission = views.view(layer, slots, admission.pool)
            p.pool = admission.pool.data_ptr()
        assert slots is not None
        p.slots, p.ids, p.live = slots.data_ptr(), ids.data_ptr(), live.data_ptr()
        p.prefill = None if prefill is None else prefill.data_ptr()
        p.tally = None if tally is None else tally.data_ptr()
        p.counts = None if counts is None else counts.data_ptr()
        p.ids_are_64 = ids.dtype is torch.int64
        p.tokens, p.top_k, p.experts, p.mode = ids.shape[0], self.top_k, self.experts, Mode.WHOLE
        p.stride, p.entry_pairs = self.stride, entry_pairs
        small = SMALL_ROUTE_PAIRS
        compiled().route(ctypes.byref(p), large, 1024 if large else small, order, (32 + 5) * self.experts)
        if admission is not None:
            if lookahead is not None:
                p.ahead = view_of(lookahead, admission.layers, layer)
            compiled().gather(ctypes.byref(p), GATHER_BLOCKS, _THREADS)

    def entries(self) -> tuple[list[list[int]], int]:
        """(slot, begin, count, expert) of every entry, and how many come first that had their rows."""
        total, resident = self.memory["entry_count"].tolist()
        return self.memory["entries"].view(-1, 4)[:total].tolist(), resident


class HostGuesses:
    """What runs beside a layer, over tensors of the CPU: guesses for layer number `layer`."""

    def __init__(
        self, lookahead: Lookahead, admission: Admission, layer: int, ids: torch.Tensor, live: torch.Tensor
    ) -> None:
        views = AdmittedLayers(admission, admission.experts, admission.arena.data_ptr())
        self._kept = ids, live
        self._params = GuessParams(views.of(layer), view_of(lookahead, admission.layers, layer))
        self._params.ids, self._params.live = ids.data_ptr(), live.data_ptr()
        self._params.tokens, self._params.width = ids.shape
        self._params.ids_are_64 = ids.dtype is torch.int64
        self._params.stride, self._params.experts = lookahead.spare.stride(0), admission.experts

    def choose(self, order: int = 0) -> None:
        compiled().choose(ctypes.byref(self._params), order)

    def fetch(self, first: int = 0, last: int = GATHER_BLOCKS) -> None:
        """By these of as many blocks as there are lanes, to their ends unless they are called off."""
        compiled().fetch(ctypes.byref(self._params), GATHER_BLOCKS, _THREADS, first, last)
