"""vLLM's own offloaders under the same layers: what stock vLLM does where the experts do not fit the GPU.

The layers of a stack become modules with one parameter each, the rows of all their experts, as fused expert weights are
one parameter in vLLM. vLLM's own classes wrap these modules and move the parameters; routing, kernels, rows and the
dense part are those of the stack, and a table that never changes says that expert n is row n.

* **UVA** (`--cpu-offload-gb`): whole parameters, those of the first layers, go to page-locked memory, up to so many
  bytes. Kernels read them there, which are the rows of the routed experts and no others; none is kept.
* **prefetch** (`--offload-group-size`): the last layers of each group are copied whole in each step, each into the same
  buffer on the GPU, from the end of the offloaded layer before on. The buffer is GPU memory, too.

Both offload whole layers of experts, so a coverage is met by as many layers as fit it, buffers included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
import torch

from bench.harness.decode import Case, ratios
from bench.harness.link import Link, sampled_before
from bench.harness.measure import Run, synchronize
from bench.harness.memory import SharedMemory
from bench.harness.routing import IdArray, Routing
from bench.harness.stack import Moe, Stack

NONE, UVA, PREFETCH = "none", "uva", "prefetch"
NAMES = {NONE: "no offloader", UVA: "UVA offloader", PREFETCH: "prefetch offloader"}
_MIB, _GIB = 1 << 20, 1 << 30
_BUFFERS = 1  # vLLM's default: each further one keeps one layer less on the GPU
_WARM = 2  # steps; nothing is learned from them


class OffloadersMissingError(Exception):
    """vLLM, or what is needed of it, is not installed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an offloader is asked for. offloaded: how many of the layers. buffers: layers of GPU memory for their rows.
    group, in_group: of the prefetch offloader: the last so many of each group are offloaded."""

    name: str
    layers: int
    offloaded: int = 0
    buffers: int = 0
    group: int = 0
    in_group: int = 0

    def setting(self, layer_bytes: int) -> str:
        """The options of `vllm serve` that say it."""
        if self.name == UVA:
            return f"--cpu-offload-gb {self.offload_gb(layer_bytes):.1f}"
        if self.name == PREFETCH:
            return f"--offload-group-size {self.group} --offload-num-in-group {self.in_group}"
        return ""

    def offload_gb(self, layer_bytes: int) -> float:
        """GiB after which the UVA offloader stops: it ends the layer with which it gets there."""
        return (self.offloaded - 0.5) * layer_bytes / _GIB


def uva_plan(layers: int, coverage: float) -> Plan:
    """The fewest layers offloaded so that at most `coverage` of all stay."""
    return Plan(UVA, layers, layers - _fit(layers, coverage))


def prefetch_plan(layers: int, coverage: float) -> Plan | None:
    """The same, with the buffer among those that stay; the smallest groups, which offload at the most even distances.

    None if the buffer alone is more than that.
    """
    plans = [
        Plan(PREFETCH, layers, len(prefetched(layers, group, in_group)), _BUFFERS, group, in_group)
        for group in range(1, layers + 1)
        for in_group in range(1, group + 1)
    ]
    fitting = [plan for plan in plans if layers - plan.offloaded + plan.buffers <= _fit(layers, coverage)]
    return min(fitting, key=lambda plan: (plan.offloaded, plan.group), default=None)


def prefetched(layers: int, group: int, in_group: int) -> tuple[int, ...]:
    """The layers that the prefetch offloader offloads."""
    return tuple(layer for layer in range(layers) if layer % group >= group - in_group)


def _fit(layers: int, coverage: float) -> int:
    return int(layers * coverage + 1e-6)


def plans_for(layers: int, coverages: Sequence[float]) -> list[tuple[float, Plan]]:
    """No offloader, then both at each coverage. The smallest coverage comes first: page-locked memory is used again."""
    found: list[tuple[float, Plan]] = [(1.0, Plan(NONE, layers))]
    for coverage in sorted(coverages):
        for plan in (uva_plan(layers, coverage), prefetch_plan(layers, coverage)):
            if plan is None:
                print(f"{NAMES[PREFETCH]}: one layer of {layers} is more than {coverage:.0%}", flush=True)
            else:
                found.append((coverage, plan))
    return found


def check_vllm() -> None:
    """OffloadersMissingError, by name, for what is not here."""
    try:
        import vllm._custom_ops  # noqa: F401  (the views of host memory)
        from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig  # noqa: F401
        from vllm.model_executor.offloader import create_offloader, set_offloader  # noqa: F401
    except ImportError as error:
        raise OffloadersMissingError(
            f"the part offloaders needs vLLM 0.24 or later with vllm.config.offload and vllm.model_executor.offloader: "
            f"{error}; install it or leave the part out"
        ) from error


def offloader_of(plan: Plan, layer_bytes: int) -> Any:
    """vLLM's offloader for the plan, made from the configuration that the options of a server become."""
    from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
    from vllm.model_executor.offloader import create_offloader, set_offloader

    config = OffloadConfig()
    if plan.name == UVA and plan.offloaded:
        uva = UVAOffloadConfig(cpu_offload_gb=plan.offload_gb(layer_bytes), cpu_offload_params={"rows"})
        config = OffloadConfig(offload_backend=UVA, uva=uva)
    elif plan.name == PREFETCH:
        prefetch = PrefetchOffloadConfig(
            offload_group_size=plan.group,
            offload_num_in_group=plan.in_group,
            offload_prefetch_step=plan.buffers,
            offload_params={"rows"},
        )
        config = OffloadConfig(offload_backend=PREFETCH, prefetch=prefetch)
    offloader = create_offloader(config)
    set_offloader(offloader)  # the prefetch offloader's operators ask for it
    return offloader


class Layer(torch.nn.Module):
    """One layer of a stack with its experts' rows, uint8 [E, stride], as a parameter. compute: (rows, x) -> x."""

    def __init__(
        self, rows: torch.Tensor, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(rows, requires_grad=False)
        self._compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._compute(self.rows.data, x)


class OffloadedStack:
    """A stack whose layers an offloader of vLLM has wrapped. It is used by one case after the other.

    rows: uint8 [layers * E, stride], those of key n in row n; what is offloaded is copied from there.
    """

    def __init__(self, plan: Plan, memory: SharedMemory, rows: torch.Tensor) -> None:
        experts = memory.shape.experts
        self.plan = plan
        self.device = memory.device
        self.layer_bytes = experts * rows.shape[1]
        self._experts = experts
        self._kernels = memory.kernels()
        self._slots = torch.arange(experts, dtype=torch.int32, device=self.device)
        self._live = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._stack: Stack | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._offloader = offloader_of(plan, self.layer_bytes)
        layers = (
            Layer(rows[number * experts : (number + 1) * experts], self._compute(number))
            for number in range(plan.layers)
        )
        self._layers = self._offloader.wrap_modules(layers)
        self._offloader.post_init()
        self.offloaded = tuple(
            number for number, layer in enumerate(self._layers) if self._is_offloaded(layer)
        )

    def _is_offloaded(self, layer: Layer) -> bool:
        """Whether vLLM has done it, whatever was planned: it leaves alone what is on the CPU anyway."""
        if self.plan.name == PREFETCH:
            return any(layer is one.module for one in self._offloader.module_offloaders)
        return layer.rows.device.type != self.device.type or hasattr(layer.rows, "_vllm_is_uva_offloaded")

    @property
    def gpu_share(self) -> float:
        """Of all layers' rows in GPU memory, buffers included."""
        pool = getattr(self._offloader, "buffer_pool", None)
        buffers = 0 if pool is None else pool.total_bytes / self.layer_bytes
        return (self.plan.layers - len(self.offloaded) + buffers) / self.plan.layers

    @property
    def capturable(self) -> bool:
        """Without UVA that class copies in the midst of a layer, which vLLM captures no graph of."""
        return self.device.type == "cuda" and (
            self.plan.name != UVA or not self.offloaded or bool(self._offloader.uva_offloading)
        )

    def _compute(self, number: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def compute(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            assert self._stack is not None
            return self._stack.layer(self._moe(rows), number, x)

        return compute

    def _moe(self, rows: torch.Tensor) -> Moe:
        def moe(layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self._kernels.run(
                x,
                weights,
                ids,
                slots=self._slots,
                pool=rows,
                live=self._live,
                prefill=None,
                counts=None,
                tally=None,
            )

        return moe

    def use(self, stack: Stack) -> None:
        """Compute this stack's steps from now on; captured as vLLM captures a model, where that can be."""
        self._stack = stack
        self._graph = None
        self._live.fill_(stack.tokens)
        if not self.capturable:
            return
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                stack.through(self._layers)
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        self._offloader.sync_prev_onload()
        with torch.cuda.graph(graph):
            stack.through(self._layers)
            self._offloader.join_after_forward()
        self._graph = graph

    def step(self) -> torch.Tensor:
        """[T, H], in a tensor that the next step overwrites."""
        assert self._stack is not None
        if self._graph is None:
            return self._stack.through(self._layers)
        self._offloader.sync_prev_onload()
        self._graph.replay()
        return self._stack.out

    @property
    def graph(self) -> bool:
        return self._graph is not None

    def moved(self, ids: IdArray) -> int:
        """Rows that a step brings over the link whose layers are routed to ids [layers, T, k]."""
        if self.plan.name == PREFETCH:
            return len(self.offloaded) * self._experts
        return sum(len(np.unique(ids[layer])) for layer in self.offloaded)

    def close(self) -> None:
        """Let go of everything but the rows."""
        from vllm.model_executor.offloader import set_offloader
        from vllm.model_executor.offloader.base import NoopOffloader

        synchronize(self.device)
        set_offloader(NoopOffloader())
        self._graph = self._stack = self._offloader = None
        self._layers = []
        gc.collect()  # wrapped modules and their forwards hold each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(slots=True)
class Offloaded:
    """What one case did under one plan. run: rows are those that came over the link."""

    coverage: float
    plan: Plan
    offloaded: tuple[int, ...]
    gpu_share: float
    graph: bool
    setting: str
    run: Run = field(repr=False)


def measure(
    memory: SharedMemory,
    cases: Sequence[Case],
    coverages: Sequence[float],
    found: dict[str, list[Offloaded]],
    *,
    left: Callable[[], float],
    done: Callable[[], None],
    link: Link | None = None,
) -> None:
    """Fills `found`, by the label of a case. left, done, link: as `decode.measure`'s."""
    rows = memory.all_rows()
    for coverage, plan in plans_for(memory.shape.layers, coverages):
        if left() <= 0:
            print(f"no time left for the {NAMES[plan.name]} at {coverage:.0%}", flush=True)
            continue
        if plan.name == PREFETCH and memory.device.type != "cuda":
            print(f"vLLM's {NAMES[PREFETCH]} needs a CUDA device", flush=True)
            continue
        began = time.monotonic()
        stack = OffloadedStack(plan, memory, rows)
        print(
            f"{NAMES[plan.name]} at {coverage:.0%}: ready after {time.monotonic() - began:.1f} s", flush=True
        )
        try:
            for case in cases:
                run = run_steps(stack, case.stack, case.routing, case.warm, link)
                found.setdefault(case.label, []).append(
                    Offloaded(
                        coverage,
                        plan,
                        stack.offloaded,
                        stack.gpu_share,
                        stack.graph,
                        plan.setting(stack.layer_bytes),
                        run,
                    )
                )
        finally:
            stack.close()
        print(f"{NAMES[plan.name]} at {coverage:.0%}: {time.monotonic() - began:.1f} s", flush=True)
        done()


def run_steps(
    offloaded: OffloadedStack, stack: Stack, routing: Routing, first: int, link: Link | None
) -> Run:
    """The steps from `first` on, as `bench.harness.measure.run_steps` measures them: from an idle device to an idle
    device."""
    offloaded.use(stack)
    for step in range(max(0, first - _WARM), first):
        stack.load(step)
        offloaded.step()
    run = Run(round(offloaded.gpu_share * offloaded.plan.layers * routing.experts))
    sampled = sampled_before(first, routing.steps)
    for step in range(first, routing.steps):
        if link is not None and step in sampled:
            run.links.append(link.sample())
        stack.load(step)
        synchronize(stack.device)
        started = time.perf_counter()
        out = offloaded.step()
        synchronize(stack.device)
        run.ms.append((time.perf_counter() - started) * 1e3)
        run.rows += offloaded.moved(routing.ids[step])
        run.outputs.append(out.clone())
    if link is not None:
        run.links.append(link.sample())
    return run


def report(
    found: Sequence[Offloaded], resident: Run, stride: int, best: float | None
) -> list[dict[str, Any]]:
    """What goes into a result file. resident: the steps with every row in the tiers' pool. best: GB/s of the link."""
    return [
        {
            "offloader": one.plan.name,
            "coverage": one.coverage,
            "setting": one.setting,
            "gpu_share": round(one.gpu_share, 4),
            "offloaded_layers": len(one.offloaded),
            "graph": one.graph,
            "step_ms": {"mean": round(mean(one.run.ms), 4), "median": round(float(np.median(one.run.ms)), 4)},
            "moved_rows_per_step": round(one.run.rows / len(one.run.ms), 3),
            "moved_mib_per_step": round(one.run.rows * stride / len(one.run.ms) / _MIB, 3),
            "same_bits": one.run.same_bits(resident),
            **ratios(one.run, resident, stride, best),
        }
        for one in found
    ]


def table(found: Sequence[dict[str, Any]]) -> str:
    """One case as lines of text."""
    lines = []
    for one in found:
        text = (
            f"  {one['coverage']:>4.0%} {NAMES[one['offloader']]:<19}{one['step_ms']['mean']:>9.3f} ms "
            f"{one['gpu_share']:>6.1%} on the GPU, {one['offloaded_layers']} layers offloaded, "
            f"{one['moved_mib_per_step']:.1f} MiB, {'graph' if one['graph'] else 'eager'}"
        )
        if "ratio" in one:
            text += (
                f", link {one['link_gb_per_s']:.1f} GB/s, {one['link_ms']:.3f} ms, ratio {one['ratio']:.3f}"
            )
        lines.append(f"{text}  {'same' if one['same_bits'] else 'DIFFERENT'} bits")
    return "\n".join(lines)
