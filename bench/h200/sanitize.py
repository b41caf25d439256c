"""Launches every kernel at small sizes, for compute-sanitizer, and compares what comes out with the CPU's arithmetic.

    compute-sanitizer --tool memcheck python bench/h200/sanitize.py
    compute-sanitizer --tool racecheck python bench/h200/sanitize.py

Random numbers are made on the host, so that hardly anything but our kernels runs on the device. Status 1 if a result is
wrong or if a kernel of the images was not launched.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.random_rows import random_rows  # noqa: E402
from ziggurat.allocators.cuda_pool import CudaPool  # noqa: E402
from ziggurat.allocators.movers import BatchedCopies, SingleCopies  # noqa: E402
from ziggurat.allocators.pinned import PinnedArena  # noqa: E402
from ziggurat.kernels.admission import Admission, make_admission  # noqa: E402
from ziggurat.kernels.codecs.registry import codec_names, get_codec  # noqa: E402
from ziggurat.kernels.cpu.layer import CpuLayerKernels  # noqa: E402
from ziggurat.kernels.cuda import driver, launch, manifest  # noqa: E402
from ziggurat.kernels.cuda.gather import GatherKernel  # noqa: E402
from ziggurat.kernels.cuda.layer import CudaLayerKernels  # noqa: E402
from ziggurat.kernels.cuda.units import IMAGES, target_for  # noqa: E402
from ziggurat.kernels.geometry import ExpertGeometry  # noqa: E402
from ziggurat.kernels.lookahead import GUESSED, MOST_TOKENS, Lookahead, make_lookahead  # noqa: E402
from ziggurat.residency.ports import LayerKernels  # noqa: E402
from ziggurat.stores.packformat import stride_of  # noqa: E402

DEVICE = torch.device("cuda", 0)
GEOMETRY = ExpertGeometry(256, 128)
EXPERTS, TOP_K = 64, 2
#: One block lists the work of up to 128 tokens of these sizes; decode GEMMs run up to 256, prefill GEMMs beyond.
TOKENS = (1, 3, 8, 17, 130, 300)
PIECE = 16
#: What the device and the twin have to agree on after admitted layers.
STATE = ("table", "owners", "heat", "last", "state", "log")
CLAMP = 7.0
#: 16-bit activations against the CPU's: both round the hidden activations to 16 bits, sums differ in their order.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Case:
    """One layer's inputs on the host. The last expert has no slot, the last token is padding if there are several."""

    def __init__(self, codec: str, dtype: torch.dtype, tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        self.codec = codec
        stride = stride_of(get_codec(codec).row_bytes(GEOMETRY))
        self.pool = random_rows(codec, GEOMETRY, EXPERTS + 2, stride, torch.device("cpu"), seed=tokens)
        order = torch.randperm(EXPERTS + 2, generator=generator)[:EXPERTS]
        self.slots = order.to(torch.int32)
        self.slots[-1] = -1
        self.x = torch.randn(tokens, GEOMETRY.hidden, generator=generator).to(dtype)
        scores = torch.rand(tokens, EXPERTS, generator=generator)
        self.ids = scores.topk(TOP_K, dim=-1).indices.to(torch.int32)
        self.weights = torch.softmax(torch.randn(tokens, TOP_K, generator=generator), dim=-1)
        self.live = torch.tensor([max(1, tokens - 1)], dtype=torch.int32)
        self.prefill = (torch.arange(tokens) % 2).to(torch.uint8)

    def whole(
        self, kernels: LayerKernels, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The layer in one call, its counts and its tally; on the host."""
        x, weights, ids, live = (t.to(device) for t in (self.x, self.weights, self.ids, self.live))
        pool, slots, prefill = (t.to(device) for t in (self.pool, self.slots, self.prefill))
        counts = torch.full((EXPERTS, 2), -1, dtype=torch.int32, device=device)
        tally = torch.zeros(2, dtype=torch.int32, device=device)
        out = kernels.run(
            x,
            weights,
            ids,
            slots=slots,
            pool=pool,
            live=live,
            prefill=prefill,
            counts=counts,
            tally=tally,
        )
        return out.cpu(), counts.cpu(), tally.cpu()

    def admitted(
        self, kernels: LayerKernels, device: torch.device, room: int
    ) -> tuple[torch.Tensor, Admission]:
        """Twice the layer that admits its experts, the second of two, into `room` slots; the later one, and the state.

        The last expert's row is not in the arena; the first call is of one token.
        """
        x, weights, ids, live = (t.to(device) for t in (self.x, self.weights, self.ids, self.live))
        stride = self.pool.shape[1]
        arena = PinnedArena(EXPERTS, stride)
        arena.tensor.copy_(self.pool[self.slots.clamp(min=0).long()])
        pool = torch.full((room, stride), 0xFF, dtype=torch.uint8, device=device)
        state = make_admission(2, EXPERTS, arena.tensor, pool)
        state.places[EXPERTS:-1] = torch.arange(EXPERTS - 1, dtype=torch.int32, device=device)
        for tokens in (1, len(x)):
            out = kernels.run(
                x[:tokens],
                weights[:tokens],
                ids[:tokens],
                slots=state.table[1],
                pool=pool,
                live=live.clamp(max=tokens),
                prefill=None,
                counts=None,
                tally=None,
                admission=state,
                layer=1,
            )
        found = out.cpu()
        arena.close()
        return found, state

    def guessed(
        self, kernels: LayerKernels, device: torch.device, room: int
    ) -> tuple[torch.Tensor, Admission, Lookahead]:
        """Two layers into `room` slots, with what the second one is routed to guessed by the first; the later result,
        and the state. The last expert's rows are not in the arena."""
        x, weights, ids, live = (t.to(device) for t in (self.x, self.weights, self.ids, self.live))
        stride = self.pool.shape[1]
        arena = PinnedArena(EXPERTS, stride)
        arena.tensor.copy_(self.pool[self.slots.clamp(min=0).long()])
        pool = torch.full((room, stride), 0xFF, dtype=torch.uint8, device=device)
        state = make_admission(2, EXPERTS, arena.tensor, pool)
        state.places.view(2, EXPERTS)[:, :-1] = torch.arange(EXPERTS - 1, dtype=torch.int32, device=device)
        ahead = make_lookahead(state)
        ahead.spare.fill_(0xFF)
        for layer in (0, 1):
            out = kernels.run(
                x,
                weights,
                ids,
                slots=state.table[layer],
                pool=pool,
                live=live,
                prefill=None,
                counts=None,
                tally=None,
                admission=state,
                layer=layer,
                lookahead=ahead,
                guess=None if layer else lambda x: ids,
            )
        found = out.cpu()
        arena.close()
        return found, state, ahead

    def pieces(self, kernels: LayerKernels, device: torch.device) -> torch.Tensor:
        """The layer a few experts at a time; on the host."""
        x, weights, ids, live = (t.to(device) for t in (self.x, self.weights, self.ids, self.live))
        pool = self.pool.to(device)
        kernels.begin(x, ids, live)
        for first in range(0, EXPERTS, PIECE):
            some = torch.full_like(self.slots, -1)
            some[first : first + PIECE] = self.slots[first : first + PIECE]
            kernels.add(x, ids, live, slots=some.to(device), pool=pool)
        return kernels.finish(x, weights, ids, live).cpu()


def layers() -> list[str]:
    """What is wrong with layers, in words."""
    wrong = []
    for codec, dtype, clamp in itertools.product(codec_names(), TOLERANCE, (None, CLAMP)):
        if codec == "bf16" and dtype is not torch.bfloat16:
            continue  # such rows multiply bfloat16 activations only
        coder = get_codec(codec)
        ours = CudaLayerKernels(
            codec,
            GEOMETRY,
            EXPERTS,
            TOP_K,
            dtype=dtype,
            device=DEVICE,
            max_tokens=max(TOKENS),
            clamp=clamp,
        )
        reference = CpuLayerKernels(coder, GEOMETRY, EXPERTS, TOP_K, clamp=clamp)
        for tokens in TOKENS:
            case = Case(codec, dtype, tokens)
            found = case.whole(ours, DEVICE)
            wanted = case.whole(reference, torch.device("cpu"))
            name = f"{codec} {dtype} clamp {clamp} {tokens} tokens"
            error = float((found[0].float() - wanted[0].float()).norm() / wanted[0].float().norm())
            if not error <= TOLERANCE[dtype]:
                wrong.append(f"{name}: relative error {error:.1e}")
            if not torch.equal(found[0].view(torch.int16), case.pieces(ours, DEVICE).view(torch.int16)):
                wrong.append(f"{name}: a layer in pieces has other bits")
            for room in (min(EXPERTS, TOP_K * tokens), 3 * EXPERTS):
                out, state = case.admitted(ours, DEVICE, room)
                _, twin = case.admitted(reference, torch.device("cpu"), room)
                if not torch.equal(found[0].view(torch.int16), out.view(torch.int16)):
                    wrong.append(f"{name}: admitted into {room} slots, a layer has other bits")
                wrong += [
                    f"{name}: admitted into {room} slots, {part} differs from the twin's"
                    for part in STATE
                    if not torch.equal(getattr(state, part).cpu(), getattr(twin, part))
                ]
            for room in (min(EXPERTS, TOP_K * tokens), 3 * EXPERTS):
                if tokens > MOST_TOKENS:
                    continue
                out, state, ahead = case.guessed(ours, DEVICE, room)
                _, twin, other = case.guessed(reference, torch.device("cpu"), room)
                same = torch.equal(ahead.words.cpu()[: GUESSED + 1], other.words[: GUESSED + 1])
                same &= all(torch.equal(getattr(state, part).cpu(), getattr(twin, part)) for part in STATE)
                if not torch.equal(found[0].view(torch.int16), out.view(torch.int16)):
                    wrong.append(f"{name}: looking ahead into {room} slots, a layer has other bits")
                if not same:
                    wrong.append(
                        f"{name}: looking ahead into {room} slots, the state differs from the twin's"
                    )
            if not (torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2])):
                wrong.append(f"{name}: counts or tally differ")
    return wrong


def moves() -> list[str]:
    """What is wrong with moving rows by each of the movers."""
    wrong = []
    for stride in (4096, 5 * 4096, 1 << 20):
        arena = PinnedArena(6, stride)
        arena.tensor.copy_(torch.randint(0, 256, arena.tensor.shape, dtype=torch.uint8))
        wanted = arena.tensor.clone()
        for mover in (GatherKernel(DEVICE.index), BatchedCopies(), SingleCopies()):
            pool = CudaPool(8, stride, DEVICE)
            places, slots = [4, 0, 5], [7, 2, 0]
            base = arena.device_pointer if isinstance(mover, GatherKernel) else arena.tensor.data_ptr()
            assert base is not None
            stream = torch.cuda.Stream(DEVICE)
            mover.move(
                [pool.tensor[slot].data_ptr() for slot in slots],
                [base + place * stride for place in places],
                [stride] * len(slots),
                stream.cuda_stream,
            )
            stream.synchronize()
            if not torch.equal(pool.tensor[slots].cpu(), wanted[places]):
                wrong.append(f"{type(mover).__name__}: rows of {stride} bytes arrived changed")
            pool.close()
        arena.close()
    return wrong


def held_kernels() -> set[str]:
    """Names of the kernels that the images hold for this device."""
    found = manifest.read(IMAGES)
    capability = driver.capability(DEVICE.index)
    names: set[str] = set()
    for unit in found.units.values():
        target = target_for(capability, tuple(unit.targets))
        names |= set(unit.targets[target]) if target else set()
    return names


def main() -> int:
    launched: set[str] = set()
    plain = launch.Kernel.launch

    def launch_and_note(self: launch.Kernel, *arguments: object, **options: object) -> None:
        launched.add(self.name)
        plain(self, *arguments, **options)  # type: ignore[arg-type]

    launch.Kernel.launch = launch_and_note  # type: ignore[method-assign]
    wrong = layers() + moves()
    torch.cuda.synchronize()
    missing = sorted(held_kernels() - launched)
    for line in wrong:
        print(f"WRONG: {line}")
    for name in missing:
        print(f"NOT LAUNCHED: {name}")
    print(
        f"{len(launched)} kernels launched, {len(wrong)} wrong results, {len(missing)} kernels not launched"
    )
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    sys.exit(main())
