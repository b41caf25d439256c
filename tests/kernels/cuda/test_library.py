"""Loading and launching, against an imaginary GPU: what reaches the driver, and what is refused before it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import fake_driver
from ziggurat.kernels.cuda.errors import CudaError

LOAD = """
from ziggurat.kernels.cuda.gather import GatherKernel, GatherParams
from ziggurat.kernels.cuda import driver, library
from ziggurat.kernels.cuda.library import kernel, warm
"""


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_driver.build(tmp_path_factory.mktemp("driver"))


def test_a_launch_reaches_the_driver_as_it_was_asked_for(gpu: Path) -> None:
    program = (
        LOAD
        + """
k = kernel("gather_rows", 0)
params = GatherParams(rows=7)
params.dst[0], params.vectors[199] = 0x1122334455667788, 9
k.launch((3, 2, 1), 512, params, stream=0xABC0, dependent=True)
first = record()
params.rows = 8
k.launch(5, (8, 8, 2), params, shared=1024, stream=0)
second = record()
show(first=first, second=second, size=k.parameter_bytes, held=bytes(params).hex())
"""
    )
    shown = fake_driver.run(gpu, program)
    first, second = shown["first"], shown["second"]
    assert (first["grid"], first["block"], first["shared"]) == ([3, 2, 1], [512, 1, 1], 0)
    assert (first["stream"], first["attributes"], first["attribute"], first["allowed"]) == (0xABC0, 1, 6, 1)
    assert (second["grid"], second["block"], second["shared"]) == ([5, 1, 1], [8, 8, 2], 1024)
    assert (second["stream"], second["attributes"]) == (0, 0)
    assert first["function"] == second["function"] != 0
    held = bytes.fromhex(shown["held"])
    assert bytes(second["parameter"][: shown["size"]]) == held
    assert first["parameter"][4000:4004] == [7, 0, 0, 0]
    assert second["parameter"][4000:4004] == [8, 0, 0, 0]
    assert (first["launches"], second["launches"], second["loads"]) == (1, 2, 1)


def test_dependent_launches_need_a_gpu_that_knows_them(gpu: Path) -> None:
    program = (
        LOAD + "kernel('gather_rows', 0).launch(1, 32, GatherParams(), stream=0, dependent=True)\n"
        "show(**record())"
    )
    assert fake_driver.run(gpu, program, FAKE_CAPABILITY=89)["attributes"] == 0
    assert fake_driver.run(gpu, program, FAKE_CAPABILITY=120)["attributes"] == 1


def test_an_image_is_loaded_once_and_a_kernel_once_per_device(gpu: Path) -> None:
    program = (
        LOAD
        + """
found = warm(["gather_rows", "gather_rows"], 0) + warm(["gather_rows"], 1)
show(same=found[0] is found[1], other=found[0] is found[2], devices=[k.device for k in found], record=record())
"""
    )
    shown = fake_driver.run(gpu, program, FAKE_DEVICES=2)
    assert (shown["same"], shown["other"], shown["devices"]) == (True, False, [0, 0, 1])
    assert (shown["record"]["loads"], shown["record"]["function_loads"]) == (1, 2)
    assert shown["record"]["contexts_left"] == 0


def test_shared_memory_beyond_48_kib_is_arranged_for_once(gpu: Path) -> None:
    program = (
        LOAD
        + """
k, seen = kernel("gather_rows", 0), []
for size in (48151, 48152, 48000, 100000):
    k.launch(1, 32, GatherParams(), shared=size, stream=0)
    seen.append(record()["allowed_shared"])
error = refused(k.launch, 1, 32, GatherParams(), shared=300000, stream=0)
show(seen=seen, error=error, blocks=k.blocks_per_multiprocessor(512, 60000), used=k.resources())
"""
    )
    shown = fake_driver.run(gpu, program)
    assert shown["seen"] == [0, 48152, 48152, 100000]
    assert shown["error"][0] == "CudaError"
    assert (
        "gather_rows asks for 300000 bytes of shared memory beside its own 1001; a block of this GPU has 227232"
        in shown["error"][1]
    )
    assert shown["blocks"] == 4
    assert shown["used"] == {"registers": 1004, "local": 1003, "shared": 1001, "threads": 1000}


def test_a_struct_of_another_size_is_refused(gpu: Path) -> None:
    program = (
        LOAD
        + """
class Short(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int)]
show(error=refused(kernel("gather_rows", 0).launch, 1, 1, Short(), stream=0), launches=record()["launches"])
"""
    )
    shown = fake_driver.run(gpu, program)
    assert shown["launches"] == 0
    assert shown["error"] == [
        "LaunchError",
        "kernel gather_rows takes a struct of 4008 bytes and Short has 4: one of the two definitions is out of date",
    ]


def test_what_the_driver_refuses_is_told_with_its_name_for_it(gpu: Path) -> None:
    program = LOAD + "show(error=refused(kernel('gather_rows', 0).launch, 1, 2048, GatherParams(), stream=0))"
    kind, text = fake_driver.run(gpu, program)["error"]
    assert kind == "CudaError"
    assert text.startswith(
        "cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE (kernel gather_rows, grid 1, block 2048"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"FAKE_CAPABILITY": 75}, ["GPU 0, Imaginary (sm_75)", "sm_80, sm_86, sm_89, sm_90", "580"]),
        ({"FAKE_VERSION": 12080}, ["driver 580 or newer", "supports CUDA 12.8", "made for CUDA 13.0"]),
        ({"FAKE_INIT": 100}, ["driver 580 or newer", "cuInit failed: CUDA_ERROR_NO_DEVICE"]),
        ({"FAKE_DEVICES": 0}, ["no GPU number 0", "shows 0"]),
    ],
)
def test_a_machine_that_cannot_run_the_kernels_is_told_why(
    gpu: Path, settings: dict[str, int], words: list[str]
) -> None:
    shown = fake_driver.run(gpu, LOAD + "show(error=refused(GatherKernel, 0), record=record())", **settings)
    kind, text = shown["error"]
    assert kind == "UnsupportedGpuError"
    assert [word for word in words if word not in text] == []
    assert (shown["record"]["loads"], shown["record"]["launches"]) == (0, 0)


def test_a_gpu_newer_than_the_images_gets_code_compiled_for_it(gpu: Path) -> None:
    program = (
        LOAD
        + """
import logging
said = []
handler = logging.Handler()
handler.emit = lambda entry: said.append(entry.getMessage())
logging.getLogger("ziggurat.kernels.cuda.library").addHandler(handler)
k = kernel("gather_rows", 0)
k.launch(1, 32, GatherParams(), stream=0)
kernel("gather_rows", 0)
show(said=said, record=record())
"""
    )
    shown = fake_driver.run(gpu, program, FAKE_CAPABILITY=100)
    assert shown["said"] == ["no image of unit gather fits Imaginary: compiled it for sm_100"]
    assert (shown["record"]["loads"], shown["record"]["launches"]) == (1, 1)


def test_a_gpu_that_the_compiler_does_not_know_is_refused(gpu: Path) -> None:
    shown = fake_driver.run(gpu, LOAD + "show(error=refused(GatherKernel, 0))", FAKE_CAPABILITY=137)
    kind, text = shown["error"]
    assert kind == "UnsupportedGpuError"
    assert "(sm_137): images exist for" in text
    assert "compiling it here failed: " in text


def test_a_kernel_that_is_only_in_some_targets_is_refused_on_the_others(gpu: Path, tmp_path: Path) -> None:
    program = (
        LOAD
        + f"""
from pathlib import Path
from ziggurat.kernels.cuda import images
from ziggurat.kernels.cuda.units import Unit
folder = Path({str(tmp_path)!r})
(folder / "two.cu").write_text('''
extern "C" __global__ void always(int* p) {{ *p = 1; }}
#if __CUDA_ARCH__ >= 1200
extern "C" __global__ void later_mx(int* p) {{ *p = 2; }}
#endif
''')
units = (Unit("two", "two.cu", targets=("sm_90", "sm_120f")),)
images.build(units=units, sources=folder, images=folder)
loaded = library.Images(folder, folder)
names = [loaded.kernel("always", 0).name]
error = refused(loaded.kernel, "later_mx", 0)
unknown = refused(loaded.kernel, "never", 0)
compiled = library.compile_unit(units[0], "sm_90", ["A=1"], sources=folder)
missing = refused(compiled.kernel, "missing", 0)
(folder / "two.fatbin").write_bytes(b"short")
damaged = refused(library.Images(folder, folder).kernel, "always", 0)
show(names=names, error=error, unknown=unknown, missing=missing, damaged=damaged)
"""
    )
    shown = fake_driver.run(gpu, program, FAKE_PARAMETER=8)
    assert shown["names"] == ["always"]
    assert shown["error"][0] == "UnsupportedGpuError"
    assert (
        "kernel later_mx cannot run on GPU 0, Imaginary (sm_90): images exist for sm_120f "
        in shown["error"][1]
    )
    assert shown["unknown"] == [
        "UnknownKernelError",
        "no image holds a kernel 'never'; there are always, later_mx",
    ]
    assert shown["missing"] == ["UnknownKernelError", "image two (sm_90) holds no kernel 'missing'"]
    assert shown["damaged"][0] == "ImageError"
    assert "two.fatbin has 5 bytes and the manifest says" in shown["damaged"][1]


def test_without_a_driver_everything_imports_and_the_first_use_says_what_is_missing(tmp_path: Path) -> None:
    """Run apart from this process, where torch may have loaded a stand-in for the driver."""
    program = (
        "from ziggurat.kernels.cuda import driver, gather, launch, library\n"
        "from ziggurat.kernels.cuda.errors import UnsupportedGpuError\n"
        "try:\n    gather.GatherKernel(0)\nexcept UnsupportedGpuError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    if "driver 580 or newer" not in done.stdout:
        pytest.skip("this machine has a driver")


def test_errors_carry_call_and_code() -> None:
    error = CudaError("cuInit", "CUDA_ERROR_UNKNOWN", "why")
    assert (error.call, error.code, str(error)) == (
        "cuInit",
        "CUDA_ERROR_UNKNOWN",
        "cuInit failed: CUDA_ERROR_UNKNOWN (why)",
    )
