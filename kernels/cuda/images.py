"""Make the images of units, and compare the ones on disk with a rebuild."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ziggurat.kernels.cuda import fatbin, manifest, nvrtc
from ziggurat.kernels.cuda.cubins import parameter_sizes
from ziggurat.kernels.cuda.errors import BuildError, ImageError
from ziggurat.kernels.cuda.manifest import KernelRecord, Manifest, UnitRecord
from ziggurat.kernels.cuda.units import IMAGES, SOURCES, UNITS, Unit

# What the committed images are made with; another version makes other bytes from the same sources.
NVRTC = "13.0.88"
NVFATBIN = "13.0.85"


def build_unit(unit: Unit, sources: Path = SOURCES) -> tuple[bytes, UnitRecord]:
    """Compile `unit` for its targets; returns the fatbin and its record. Writes nothing.

    Raises BuildError: a source that does not compile, that gives warnings, or that has no kernel; a kernel whose
    parameter is empty.
    """
    texts = nvrtc.sources_of(unit.source, sources)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        compiled = dict(
            zip(
                unit.targets,
                pool.map(
                    lambda target: nvrtc.compile_source(unit.source, texts, target, unit.defines),
                    unit.targets,
                ),
                strict=True,
            )
        )
    targets: dict[str, dict[str, KernelRecord]] = {}
    for target, result in compiled.items():
        if result.warnings:
            raise BuildError(f"unit {unit.name} gives warnings for {target}:\n{result.warnings}")
        sizes = parameter_sizes(result.cubin)
        targets[target] = {
            name: KernelRecord.of(usage, sizes.get(name, 0)) for name, usage in result.usage.items()
        }
        if not targets[target]:
            raise BuildError(f"unit {unit.name} holds no kernel for {target}")
        if empty := sorted(name for name, record in targets[target].items() if not record.parameter):
            raise BuildError(f"unit {unit.name}: {empty[0]} takes no parameter for {target}")
    image = fatbin.bundle(unit.name, {target: result.cubin for target, result in compiled.items()})
    record = UnitRecord(
        image=f"{unit.name}.fatbin",
        sha256=hashlib.sha256(image).hexdigest(),
        size=len(image),
        defines=unit.defines,
        sources={name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(texts.items())},
        targets=targets,
        cubins={target: len(result.cubin) for target, result in compiled.items()},
    )
    return image, record


def build(
    names: Sequence[str] = (), units: Sequence[Unit] = UNITS, sources: Path = SOURCES, images: Path = IMAGES
) -> Manifest:
    """Compile the named units (default: all) and write their images and the manifest. Raises BuildError.

    Nothing is written unless all of them compile. The other units' images stay; images of units that no longer exist
    are removed.
    """
    _require_versions()
    chosen = _choose(names, units)
    made = {unit.name: build_unit(unit, sources) for unit in chosen}
    records: dict[str, UnitRecord] = {}
    if len(chosen) < len(units):
        records = {
            name: record
            for name, record in manifest.read(images).units.items()
            if any(unit.name == name for unit in units)
        }
    records |= {name: record for name, (_, record) in made.items()}
    _refuse_duplicates(records)
    images.mkdir(parents=True, exist_ok=True)
    for image, record in made.values():
        _write(images / record.image, image)
    result = Manifest(NVRTC, NVFATBIN, nvrtc.OPTIONS, dict(sorted(records.items())))
    _write(images / manifest.FILE, result.text().encode())
    for path in images.glob("*.fatbin"):
        if path.stem not in records:
            path.unlink()
    return result


def differences(
    names: Sequence[str] = (), units: Sequence[Unit] = UNITS, sources: Path = SOURCES, images: Path = IMAGES
) -> list[str]:
    """Rebuild the named units (default: all) and tell, one line each, what on disk is not what was rebuilt.

    Raises BuildError if they cannot be rebuilt here.
    """
    _require_versions()
    try:
        listed = manifest.read(images)
    except ImageError as error:
        return [str(error)]
    found: list[str] = []
    expected = Manifest(NVRTC, NVFATBIN, nvrtc.OPTIONS, {})
    if replace(listed, units={}) != expected:
        found.append(
            f"{manifest.FILE}: made by NVRTC {listed.nvrtc} and nvFatbin {listed.nvfatbin} with "
            f"{' '.join(listed.options)}; this release builds with {NVRTC}, {NVFATBIN}, {' '.join(nvrtc.OPTIONS)}"
        )
    if not names:
        known = {unit.name for unit in units}
        found += [f"{manifest.FILE}: unit {name} is gone" for name in sorted(listed.units.keys() - known)]
        expected_files = {f"{name}.fatbin" for name in known}
        found += [
            f"{path.name}: belongs to no unit"
            for path in sorted(images.glob("*.fatbin"))
            if path.name not in expected_files
        ]
    rebuilt: dict[str, UnitRecord] = {}
    for unit in _choose(names, units):
        image, rebuilt[unit.name] = build_unit(unit, sources)
        found += _unit_differences(unit, rebuilt[unit.name], image, listed, images)
    _refuse_duplicates({**listed.units, **rebuilt})
    return found


def _unit_differences(
    unit: Unit, record: UnitRecord, image: bytes, listed: Manifest, images: Path
) -> list[str]:
    old = listed.units.get(unit.name)
    if old is None:
        return [f"unit {unit.name}: not in {manifest.FILE}"]
    found = [
        f"unit {unit.name}: source {name} is not the one that the image was made of"
        for name in sorted(record.sources.keys() | old.sources.keys())
        if record.sources.get(name) != old.sources.get(name)
    ]
    if record.defines != old.defines:
        found.append(f"unit {unit.name}: defines {list(old.defines)} became {list(record.defines)}")
    found += [
        f"unit {unit.name}: kernels or their resources differ for {target}"
        for target in sorted(record.targets.keys() | old.targets.keys())
        if record.targets.get(target) != old.targets.get(target)
    ]
    try:
        on_disk = (images / record.image).read_bytes()
    except OSError as error:
        return [*found, f"{record.image}: {error.strerror}"]
    if on_disk != image:
        at = next(
            (i for i, (a, b) in enumerate(zip(on_disk, image, strict=False)) if a != b),
            min(len(on_disk), len(image)),
        )
        found.append(
            f"{record.image}: {len(on_disk)} bytes on disk, {len(image)} rebuilt, first difference at byte {at}"
        )
    if not found and old != record:
        found.append(f"unit {unit.name}: sizes or digests in {manifest.FILE} are not those of the image")
    return found


def _choose(names: Sequence[str], units: Sequence[Unit]) -> list[Unit]:
    known = [unit.name for unit in units]
    for name in names:
        if name not in known:
            raise BuildError(f"no unit is called {name!r}: there are {', '.join(known)}")
    return [unit for unit in units if not names or unit.name in names]


def _refuse_duplicates(records: dict[str, UnitRecord]) -> None:
    owner: dict[str, str] = {}
    for unit, record in records.items():
        for kernel in {name for kernels in record.targets.values() for name in kernels}:
            if owner.setdefault(kernel, unit) != unit:
                raise BuildError(f"kernel {kernel} is in units {owner[kernel]} and {unit}: names are unique")


def _require_versions() -> None:
    for wheel, have, want in (
        ("nvidia-cuda-nvrtc", nvrtc.version(), NVRTC),
        ("nvidia-nvfatbin", fatbin.version(), NVFATBIN),
    ):
        if have != want:
            raise BuildError(
                f"{wheel} {have} is installed and the images are made with {want}: pip install {wheel}=={want}"
            )


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
