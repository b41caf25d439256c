"""On a GPU: every image loads, and the driver finds in it what the manifest says."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ziggurat.kernels.cuda import driver, library, manifest
from ziggurat.kernels.cuda.errors import LaunchError, UnsupportedGpuError
from ziggurat.kernels.cuda.gather import THREADS, Batch, GatherParams, columns
from ziggurat.kernels.cuda.units import IMAGES, UNITS, Unit, target_for, unit

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_every_kernel_loads_and_is_what_the_manifest_says(unit: Unit) -> None:
    record = manifest.read(IMAGES).units[unit.name]
    target = target_for(driver.capability(0), tuple(record.targets))
    assert target is not None
    listed = record.targets[target]
    for kernel in library.warm(listed, 0):
        told = kernel.resources()
        said = listed[kernel.name]
        assert (told["registers"], told["local"], kernel.parameter_bytes) == (
            said.registers,
            said.stack,
            said.parameter,
        ), kernel.name
        # The driver may keep some shared memory for itself (1 KiB per block since 8.0).
        assert said.shared <= told["shared"] <= said.shared + 1024, kernel.name


def test_kernels_of_another_family_are_refused() -> None:
    record = manifest.read(IMAGES).units["moe"]
    target = target_for(driver.capability(0), tuple(record.targets))
    assert target is not None
    elsewhere = {name for kernels in record.targets.values() for name in kernels} - record.targets[
        target
    ].keys()
    for name in elsewhere:
        with pytest.raises(UnsupportedGpuError, match=f"kernel {name} cannot run on GPU 0"):
            library.kernel(name, 0)


def test_a_unit_compiled_here_does_what_its_image_does() -> None:
    major, minor = driver.capability(0)
    compiled = library.compile_unit(unit("gather"), f"sm_{major}{minor}").kernel("gather_rows", 0)
    source = torch.arange(1 << 18, dtype=torch.int32).pin_memory()
    device = torch.zeros_like(source, device="cuda")
    batch = Batch()
    batch.fill(columns([device.data_ptr()], [source.data_ptr()], [source.nbytes]))
    compiled.launch(8, THREADS, batch.params)
    assert torch.equal(device.cpu(), source)


def test_a_launch_goes_to_torchs_current_stream() -> None:
    """A copy that is captured leaves its memory alone until the graph runs."""
    source = torch.full((4096,), 7, dtype=torch.uint8).pin_memory()
    device = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    batch = Batch()
    batch.fill(columns([device.data_ptr()], [source.data_ptr()], [4096]))
    kernel = library.kernel("gather_rows", 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(1, THREADS, batch.params)
    torch.cuda.synchronize()
    assert not device.any()
    graph.replay()
    assert torch.equal(device.cpu(), source)


def test_dynamic_shared_memory_up_to_the_limit_can_be_reserved() -> None:
    kernel = library.kernel("gather_rows", 0)
    limit = driver.attribute(0, "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    assert kernel.blocks_per_multiprocessor(THREADS, limit) == 1
    kernel.launch(1, THREADS, GatherParams(), shared=limit)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=f"a block of this GPU has {limit}"):
        kernel.launch(1, THREADS, GatherParams(), shared=limit + 1)


def test_a_struct_of_another_size_is_refused() -> None:
    class Short(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int),)

    with pytest.raises(LaunchError, match="Short has 4"):
        library.kernel("gather_rows", 0).launch(1, 32, Short())
