"""The torch ops: schemas that tell the truth, fakes that agree, and graphs that hold them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ziggurat.kernels.cuda import ops

TOKENS, HIDDEN, EXPERTS, TOP_K = 5, 8, 4, 2


class Twin:
    """A layer small enough to follow: expert e multiplies by the first byte of its row."""

    def run(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        slots: Tensor,
        pool: Tensor,
        live: Tensor,
        prefill: Tensor | None,
        counts: Tensor | None,
        tally: Tensor | None,
    ) -> Tensor:
        result = torch.zeros_like(x)
        for t in range(int(live)):
            for weight, e in zip(topk_weights[t].tolist(), topk_ids[t].tolist(), strict=True):
                if slots[e] >= 0:
                    result[t] += weight * float(pool[slots[e], 0]) * x[t]
                elif tally is not None:
                    tally[0] += 1
                if counts is not None:
                    counts[e, 0] += 1
        return result


def arguments(device: str = "cpu") -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=generator)
    slots = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    pool = torch.randint(1, 200, (3, 16), generator=generator).to(torch.uint8)
    live = torch.tensor([4], dtype=torch.int32)
    counts = torch.zeros(EXPERTS, 2, dtype=torch.int32)
    tally = torch.zeros(2, dtype=torch.int32)
    moved = [tensor.to(device) for tensor in (x, weights, ids, slots, pool, live)]
    return (*moved, None, counts.to(device), tally.to(device), "twin")


@pytest.fixture
def twin() -> Twin:
    kernels = Twin()
    ops.register("twin", kernels)
    return kernels


def test_the_layer_op_runs_what_its_name_stands_for(twin: Twin) -> None:
    x, weights, ids, slots, pool, live, _, counts, tally, name = arguments()
    result = torch.ops.ziggurat_kernels.moe(x, weights, ids, slots, pool, live, None, counts, tally, name)
    options = {"slots": slots, "pool": pool, "live": live, "prefill": None, "counts": None, "tally": None}
    assert torch.equal(result, twin.run(x, weights, ids, **options))
    assert int(counts[:, 0].sum()) == 4 * TOP_K
    assert int(tally[0]) == int((ids[:4] == 1).sum()) > 0


@pytest.mark.usefixtures("twin")
def test_the_layer_op_passes_torchs_own_checks() -> None:
    torch.library.opcheck(torch.ops.ziggurat_kernels.moe.default, arguments())
    bare = arguments()
    torch.library.opcheck(torch.ops.ziggurat_kernels.moe.default, (*bare[:7], None, None, "twin"))


@pytest.mark.usefixtures("twin")
def test_the_fake_layer_gives_shape_type_and_device_without_running() -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        others = [mode.from_tensor(tensor) for tensor in arguments()[1:6]]
        result = torch.ops.ziggurat_kernels.moe(x, *others, None, None, None, "nobody")
    assert (result.shape, result.dtype, result.device.type) == (x.shape, torch.bfloat16, "cuda")


@pytest.mark.usefixtures("twin")
def test_a_compiled_function_holds_the_layer_whole() -> None:
    def layers(x: Tensor, *rest: Any) -> Tensor:
        once: Tensor = torch.ops.ziggurat_kernels.moe(x * 2, *rest)
        twice: Tensor = torch.ops.ziggurat_kernels.moe(once + 1, *rest)
        return twice

    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    plain, compiled = arguments(), arguments()
    expected = layers(*plain)
    result = torch.compile(layers, fullgraph=True, backend=backend)(*compiled)
    assert torch.equal(result, expected)
    assert torch.equal(plain[7], compiled[7])
    assert seen.count("ziggurat_kernels.moe") == 2


def test_kernels_that_are_gone_are_named() -> None:
    ops.define()
    rest = arguments()[:-1]
    with pytest.raises(LookupError, match="no kernels are registered as 'gone'"):
        torch.ops.ziggurat_kernels.moe(*rest, "gone")


def rows(count: int, size: int) -> Tensor:
    return torch.arange(count * size, dtype=torch.int64).reshape(count, size).remainder(251).to(torch.uint8)


def test_rows_are_copied_to_their_slots() -> None:
    ops.define()
    source = rows(3, 64)
    pool = torch.full((5, 80), 0xEE, dtype=torch.uint8)
    addresses = [source[i].data_ptr() for i in (2, 0)]
    torch.ops.ziggurat_kernels.gather_rows(pool, [4, 1], addresses, 64)
    expected = torch.full((5, 80), 0xEE, dtype=torch.uint8)
    expected[4, :64], expected[1, :64] = source[2], source[0]
    assert torch.equal(pool, expected)
    torch.library.opcheck(torch.ops.ziggurat_kernels.gather_rows.default, (pool, [0, 3], addresses, 64))


@pytest.mark.parametrize(
    ("shape", "dtype", "slots", "nbytes", "message"),
    [
        ((5, 80), torch.int32, [0], 16, "uint8"),
        ((80,), torch.uint8, [0], 16, "uint8"),
        ((5, 80), torch.uint8, [0, 1], 16, "2 slots and 1 sources"),
        ((5, 80), torch.uint8, [5], 16, "slot 5 is not one of the pool's 5"),
        ((5, 80), torch.uint8, [-1], 16, "slot -1"),
        ((5, 80), torch.uint8, [0], 96, "rows of 96 bytes do not fit slots of 80"),
    ],
)
def test_rows_that_do_not_fit_their_slots_are_refused(
    shape: tuple[int, ...], dtype: torch.dtype, slots: list[int], nbytes: int, message: str
) -> None:
    ops.define()
    source = rows(1, 96)
    with pytest.raises(ValueError, match=message):
        torch.ops.ziggurat_kernels.gather_rows(
            torch.zeros(shape, dtype=dtype), slots, [source.data_ptr()], nbytes
        )


@pytest.mark.gpu
def test_rows_are_copied_to_their_slots_on_a_gpu() -> None:
    ops.define()
    source = rows(3, 4096).pin_memory()
    pool = torch.full((5, 8192), 0xEE, dtype=torch.uint8, device="cuda")
    torch.ops.ziggurat_kernels.gather_rows(pool, [4, 1], [source[i].data_ptr() for i in (2, 0)], 4096)
    expected = torch.full((5, 8192), 0xEE, dtype=torch.uint8)
    expected[4, :4096], expected[1, :4096] = source[2], source[0]
    assert torch.equal(pool.cpu(), expected)
