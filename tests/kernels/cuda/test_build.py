"""From sources to images: the same bytes again, and every way in which images and sources can fall apart."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from support import sass
from ziggurat.kernels import build as command
from ziggurat.kernels.cuda import cubins, fatbin, images, manifest, nvrtc, wheels
from ziggurat.kernels.cuda.errors import BuildError, ImageError, UnknownKernelError
from ziggurat.kernels.cuda.units import TARGETS, UNITS, Unit, target_for, unit

HEADER = "struct Params { float* out; int count; };\n#define TWICE 2\n"
KERNEL = """
#include "tiny.cuh"
#ifndef FACTOR
#define FACTOR TWICE
#endif
extern "C" __global__ void NAME(const __grid_constant__ Params p) {
    __shared__ float held[64];
    held[threadIdx.x] = p.out[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < p.count) p.out[threadIdx.x] = FACTOR * held[63 - threadIdx.x];
}
"""
TINY = Unit("tiny", "tiny.cu", targets=("sm_80", "sm_120f"))
OTHER = Unit("other", "other.cu", defines=("FACTOR=3",), targets=("sm_90",))
BOTH = (TINY, OTHER)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Sources of two units in `src`, their images in `images`."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "tiny.cuh").write_text(HEADER)
    (sources / "tiny.cu").write_text(KERNEL.replace("NAME", "tiny"))
    (sources / "other.cu").write_text(KERNEL.replace("NAME", "other"))
    images.build(units=BOTH, sources=sources, images=tmp_path / "images")
    return tmp_path


def differences(tree: Path, units: tuple[Unit, ...] = BOTH, names: tuple[str, ...] = ()) -> list[str]:
    return images.differences(names, units=units, sources=tree / "src", images=tree / "images")


def test_a_rebuild_gives_the_same_bytes(tree: Path) -> None:
    before = {path.name: path.read_bytes() for path in (tree / "images").iterdir()}
    assert sorted(before) == ["manifest.json", "other.fatbin", "tiny.fatbin"]
    assert differences(tree) == []
    images.build(units=BOTH, sources=tree / "src", images=tree / "images")
    assert {path.name: path.read_bytes() for path in (tree / "images").iterdir()} == before


def test_another_process_and_folder_give_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    moved = tmp_path / "some where" / "else"
    shutil.copytree(tree / "src", moved / "src")
    program = (
        "import sys; from pathlib import Path; from ziggurat.kernels.cuda import images\n"
        "from ziggurat.kernels.cuda.units import Unit\n"
        f"units = ({TINY!r}, {OTHER!r})\n"
        f"images.build(units=units, sources=Path({str(moved / 'src')!r}), images=Path({str(moved / 'images')!r}))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=moved)
    for path in (tree / "images").iterdir():
        assert (moved / "images" / path.name).read_bytes() == path.read_bytes()


def test_the_manifest_says_what_is_in_the_images(tree: Path) -> None:
    found = manifest.read(tree / "images")
    assert (found.nvrtc, found.nvfatbin, found.options) == (images.NVRTC, images.NVFATBIN, nvrtc.OPTIONS)
    tiny, other = found.units["tiny"], found.units["other"]
    assert list(tiny.sources) == ["tiny.cu", "tiny.cuh"]
    assert sorted(tiny.targets) == ["sm_120f", "sm_80"]
    assert other.defines == ("FACTOR=3",)
    for target, kernels in tiny.targets.items():
        record = kernels["tiny"]
        assert (record.parameter, record.shared) == (16, 256)
        assert record.registers > 0
        assert (record.stack, record.spill_stores, record.spill_loads) == (0, 0, 0)
        code = sass.opcodes(tree / "images" / tiny.image, target)
        assert list(code) == ["tiny"]
        assert any(opcode.startswith("LDG") for opcode in code["tiny"])
    assert found.find("other") == ("other", other)
    with pytest.raises(UnknownKernelError, match=r"'nothing'.*other, tiny"):
        found.find("nothing")


def test_a_changed_source_is_named_and_so_is_what_it_changes(tree: Path) -> None:
    (tree / "src" / "tiny.cuh").write_text(HEADER.replace("TWICE 2", "TWICE 5"))
    found = differences(tree)
    assert [line for line in found if "source" in line] == [
        "unit tiny: source tiny.cuh is not the one that the image was made of",
        "unit other: source tiny.cuh is not the one that the image was made of",
    ]
    assert [line for line in found if line.startswith("tiny.fatbin: ")]
    # `other` defines its own factor: another header, the same code.
    assert not [line for line in found if line.startswith("other.fatbin")]
    assert differences(tree, names=("other",)) == [found[-1]]


def test_a_changed_image_is_named_with_the_place(tree: Path) -> None:
    path = tree / "images" / "tiny.fatbin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert differences(tree) == [
        f"tiny.fatbin: {len(content)} bytes on disk, {len(content)} rebuilt, first difference at byte 100"
    ]
    path.write_bytes(content[:60])
    assert differences(tree) == [
        f"tiny.fatbin: 60 bytes on disk, {len(content)} rebuilt, first difference at byte 60"
    ]


def test_missing_and_surplus_files_are_named(tree: Path) -> None:
    (tree / "images" / "tiny.fatbin").rename(tree / "images" / "old.fatbin")
    assert differences(tree) == ["old.fatbin: belongs to no unit", "tiny.fatbin: No such file or directory"]
    assert differences(tree, units=(OTHER,))[0] == "manifest.json: unit tiny is gone"
    (tree / "images" / "manifest.json").unlink()
    (line,) = differences(tree)
    assert "manifest.json: No such file" in line


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 7, "units": {}}'])
def test_a_manifest_that_is_none_is_refused(tree: Path, text: str) -> None:
    (tree / "images" / "manifest.json").write_text(text)
    with pytest.raises(ImageError, match=r"manifest\.json"):
        manifest.read(tree / "images")
    assert len(differences(tree)) == 1


def test_an_edited_manifest_is_noticed(tree: Path) -> None:
    path = tree / "images" / "manifest.json"
    whole = json.loads(path.read_text())

    def with_change(**changes: object) -> list[str]:
        edited = json.loads(json.dumps(whole))
        edited["units"]["tiny"] |= changes
        path.write_text(json.dumps(edited))
        return differences(tree)

    wrong = "unit tiny: sizes or digests in manifest.json are not those of the image"
    assert with_change(size=1) == [wrong]
    assert with_change(sha256="0") == [wrong]
    assert with_change(defines=["A"]) == ["unit tiny: defines ['A'] became []"]
    targets = whole["units"]["tiny"]["targets"]
    more = {**targets, "sm_80": {"tiny": {**targets["sm_80"]["tiny"], "registers": 1}}}
    assert with_change(targets=more) == ["unit tiny: kernels or their resources differ for sm_80"]
    path.write_text(json.dumps({**whole, "nvrtc": "12.9.86"}))
    (line,) = differences(tree)
    assert "made by NVRTC 12.9.86" in line
    assert images.NVRTC in line


def test_one_unit_is_rebuilt_beside_the_others(tree: Path) -> None:
    other = (tree / "images" / "other.fatbin").read_bytes()
    (tree / "src" / "tiny.cu").write_text(KERNEL.replace("NAME", "renamed"))
    images.build(["tiny"], units=BOTH, sources=tree / "src", images=tree / "images")
    assert differences(tree) == []
    assert manifest.read(tree / "images").find("renamed")[0] == "tiny"
    assert (tree / "images" / "other.fatbin").read_bytes() == other
    images.build(units=(OTHER,), sources=tree / "src", images=tree / "images")
    assert sorted(path.name for path in (tree / "images").iterdir()) == ["manifest.json", "other.fatbin"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("broken", r"tiny\.cu does not compile for sm_\w+:\n(.|\n)*tiny\.cu\(1\): error"),
        ('#include "nowhere.cuh"', r"tiny\.cu does not compile for sm_80:\n(.|\n)*nowhere\.cuh"),
        ("__device__ int nothing;", "holds no kernel"),
        ('extern "C" __global__ void bare() {}', "bare takes no parameter"),
        ('extern "C" __global__ void unused(int p) { int left; }', "gives warnings for sm_80:(.|\n)*left"),
        (KERNEL.replace("NAME", "other"), "kernel other is in units other and tiny"),
    ],
)
def test_a_bad_source_is_refused_and_changes_nothing(tree: Path, source: str, message: str) -> None:
    before = {path.name: path.read_bytes() for path in (tree / "images").iterdir()}
    (tree / "src" / "tiny.cu").write_text(source)
    with pytest.raises(BuildError, match=message):
        images.build(["tiny"], units=BOTH, sources=tree / "src", images=tree / "images")
    with pytest.raises(BuildError, match=message):
        differences(tree, names=("tiny",))
    assert {path.name: path.read_bytes() for path in (tree / "images").iterdir()} == before


def test_a_missing_source_is_named(tree: Path) -> None:
    (tree / "src" / "tiny.cu").unlink()
    with pytest.raises(BuildError, match=r"source tiny\.cu: No such file"):
        differences(tree)


def test_an_include_of_another_configuration_may_be_missing(tree: Path) -> None:
    code = KERNEL.replace("NAME", "tiny")
    (tree / "src" / "tiny.cu").write_text(f'#ifdef EMULATED\n#include "nowhere.cuh"\n#endif\n{code}')
    images.build(["tiny"], units=BOTH, sources=tree / "src", images=tree / "images")
    assert differences(tree) == []


def test_another_compiler_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: "13.5.1")
    message = rf"nvidia-cuda-nvrtc 13\.5\.1 .*: pip install nvidia-cuda-nvrtc=={images.NVRTC}"
    with pytest.raises(BuildError, match=message):
        differences(tree)
    with pytest.raises(BuildError, match=message):
        images.build(units=BOTH, sources=tree / "src", images=tree / "images")


def test_a_missing_compiler_is_named() -> None:
    with pytest.raises(BuildError, match="pip install nvidia-no-such-wheel"):
        wheels.load("nvidia-no-such-wheel", "libnothing.so")
    with pytest.raises(BuildError, match=rf"nvidia-cuda-nvrtc {images.NVRTC} holds no libnvrtc\.so\.99"):
        wheels.load("nvidia-cuda-nvrtc", "libnvrtc.so.99")


def test_the_bundler_refuses_what_is_no_code() -> None:
    with pytest.raises(BuildError, match="nvFatbinAddCubin failed"):
        fatbin.bundle("bad", {"sm_90": b"not a cubin" * 20})


def test_what_the_assembler_says_is_read() -> None:
    log = """ptxas info    : 16 bytes gmem, 32 bytes cmem[4]
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
ptxas         .     304 bytes stack frame, 348 bytes spill stores, 460 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 304 bytes cumulative stack size, 32768 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Used 8 registers, used 0 barriers
a.cu(3): warning #177-D: variable "left" was declared but never referenced"""
    usage, warnings = nvrtc.read_log(log)
    assert usage == {"one": nvrtc.Usage(255, 32768, 304, 348, 460), "two": nvrtc.Usage(8, 0, 0, 0, 0)}
    assert warnings.startswith("a.cu(3)")


def test_parameter_sizes_are_the_structs(tree: Path) -> None:
    texts = {"a.cu": 'extern "C" __global__ void a(int v, int* o) { *o = v; }\n' + "// é\n"}
    compiled = nvrtc.compile_source("a.cu", texts, "sm_86")
    assert cubins.parameter_sizes(compiled.cubin) == {"a": struct.calcsize("iP")}
    with pytest.raises(ImageError, match="not a cubin"):
        cubins.parameter_sizes(b"\x50\xed\x55\xba" + bytes(60))


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), None),
        ((12, 0), "sm_120f"),
        ((12, 1), "sm_120f"),
    ],
)
def test_a_gpu_runs_the_newest_code_of_its_major_version(
    capability: tuple[int, int], target: str | None
) -> None:
    assert target_for(capability) == target


def test_architecture_specific_code_runs_nowhere_else() -> None:
    assert target_for((9, 0), ("sm_90a",)) == "sm_90a"
    assert target_for((12, 1), ("sm_120a",)) is None
    with pytest.raises(ValueError, match="compute_90"):
        target_for((9, 0), ("compute_90",))


def test_the_command_line(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its parts are tested above; here, what it prints and returns."""
    assert command.main(["--list"]) == 0
    assert "gather_rows" in capsys.readouterr().out
    assert command.main(["--check", "--unit", "gather"]) == 0
    assert "are what the sources give" in capsys.readouterr().out
    assert command.main(["--check", "--unit", "nothing"]) == 2
    assert "no unit is called 'nothing'" in capsys.readouterr().err
    monkeypatch.setattr(images, "differences", lambda names: ["a.fatbin: differs"])
    assert command.main(["--check"]) == 1
    assert "a.fatbin: differs" in capsys.readouterr().err


def test_units_are_named_once_and_known_targets_are_asked_for() -> None:
    assert len({u.name for u in UNITS}) == len(UNITS)
    assert all(set(u.targets) <= set(TARGETS) for u in UNITS)
    assert unit(UNITS[0].name) is UNITS[0]
    with pytest.raises(LookupError, match="'nothing'"):
        unit("nothing")
