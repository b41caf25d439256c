"""Find, load and keep the kernels: ``kernel(name, device)``.

Each image is loaded once per process, whatever the number of devices (library handles belong to no context), and each
kernel once per device. The driver loads code lazily, which fails or stalls inside a graph capture: ``warm`` makes sure
that everything named is loaded, and runs before any capture.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ziggurat.kernels.cuda import driver, manifest, nvrtc
from ziggurat.kernels.cuda.errors import (
    BuildError,
    CudaError,
    ImageError,
    UnknownKernelError,
    UnsupportedGpuError,
)
from ziggurat.kernels.cuda.launch import Kernel
from ziggurat.kernels.cuda.units import (
    IMAGES,
    MINIMUM_DRIVER,
    OLDEST_CAPABILITY,
    SOURCES,
    Unit,
    target_for,
    unit,
)

_log = logging.getLogger(__name__)


class Library:
    """One loaded image; its kernels by name and device."""

    def __init__(self, name: str, image: bytes) -> None:
        """Load `image` (a fatbin or a cubin). Raises UnsupportedGpuError or CudaError."""
        self.name = name
        self._image = image  # the driver may read it as long as the library is loaded
        self._handle: Any = driver.call(driver.api().cuLibraryLoadData, image, [], [], 0, [], [], 0)
        self._kernels: dict[tuple[str, int], Kernel] = {}
        self._lock = threading.Lock()

    def kernel(self, name: str, device: int) -> Kernel:
        """The kernel called `name`, loaded onto `device`. Raises UnknownKernelError or CudaError."""
        found = self._kernels.get((name, device))
        if found is not None:
            return found
        with self._lock:
            found = self._kernels.get((name, device))
            if found is None:
                found = self._kernels[name, device] = self._load(name, device)
        return found

    def _load(self, name: str, device: int) -> Kernel:
        api = driver.api()
        try:
            handle = driver.call(api.cuLibraryGetKernel, self._handle, name.encode())
        except CudaError as error:
            if error.code != "CUDA_ERROR_NOT_FOUND":
                raise
            raise UnknownKernelError(f"image {self.name} holds no kernel {name!r}") from error
        with driver.current(device):
            function = driver.call(api.cuKernelGetFunction, handle)
            driver.call(api.cuFuncLoad, function)
            return Kernel(name, device, handle, function)


class Images:
    """The images of one folder; loads what is asked for and keeps it."""

    def __init__(self, folder: Path = IMAGES, sources: Path = SOURCES) -> None:
        """Nothing is read or loaded before the first kernel is asked for."""
        self._folder = folder
        self._sources = sources
        self._lock = threading.Lock()
        self._manifest: manifest.Manifest | None = None
        self._libraries: dict[str, Library] = {}
        self._kernels: dict[tuple[str, int], Kernel] = {}

    def kernel(self, name: str, device: int) -> Kernel:
        """The kernel called `name`, loaded onto device number `device`.

        Raises UnknownKernelError, UnsupportedGpuError (no driver, driver too old, or no image for this GPU),
        ImageError (damaged images) or CudaError.
        """
        found = self._kernels.get((name, device))
        if found is None:
            with self._lock:
                found = self._library(name, device).kernel(name, device)
            self._kernels[name, device] = found
        return found

    def warm(self, names: Iterable[str], device: int) -> list[Kernel]:
        """Load every kernel named, in order. To be called before a graph is captured."""
        return [self.kernel(name, device) for name in names]

    def _library(self, kernel: str, device: int) -> Library:
        if self._manifest is None:
            self._manifest = manifest.read(self._folder)
        name, record = self._manifest.find(kernel)
        capability = driver.capability(device)
        target = target_for(capability, tuple(record.targets))
        if target is None:
            key = f"{name} for {capability[0]}.{capability[1]}"
            if key not in self._libraries:
                self._libraries[key] = self._compiled(name, kernel, device, tuple(record.targets))
            return self._libraries[key]
        if kernel not in record.targets[target]:
            having = [t for t, kernels in record.targets.items() if kernel in kernels]
            raise UnsupportedGpuError(_refusal(device, f"kernel {kernel}", having))
        if name not in self._libraries:
            self._libraries[name] = Library(name, self._read(record))
        return self._libraries[name]

    def _read(self, record: manifest.UnitRecord) -> bytes:
        try:
            image = (self._folder / record.image).read_bytes()
        except OSError as error:
            raise ImageError(
                f"{self._folder / record.image}: {error.strerror}; reinstall ziggurat"
            ) from error
        if len(image) != record.size:
            raise ImageError(
                f"{self._folder / record.image} has {len(image)} bytes and the manifest says {record.size}: "
                "reinstall ziggurat, or rebuild the images (python -m ziggurat.kernels.build)"
            )
        return image

    def _compiled(self, name: str, kernel: str, device: int, targets: Sequence[str]) -> Library:
        """For a GPU newer than the images: compile the same source for it, if NVRTC is there and knows it."""
        capability = driver.capability(device)
        refusal = _refusal(device, f"kernel {kernel}", targets)
        if capability < OLDEST_CAPABILITY:
            raise UnsupportedGpuError(refusal)
        target = f"sm_{capability[0]}{capability[1]}"
        try:
            library = compile_unit(unit(name), target, sources=self._sources)
        except (BuildError, LookupError) as error:
            raise UnsupportedGpuError(f"{refusal}; compiling it here failed: {error}") from error
        _log.warning(
            "no image of unit %s fits %s: compiled it for %s", name, driver.device_name(device), target
        )
        return library


def compile_unit(what: Unit, target: str, defines: Iterable[str] = (), *, sources: Path = SOURCES) -> Library:
    """Compile `what` with NVRTC for `target`, with `defines` (NAME or NAME=VALUE) added to its own, and load it.

    For tests and development, and for GPUs that no image fits. Raises BuildError, UnsupportedGpuError or CudaError.
    """
    driver.api()
    texts = nvrtc.sources_of(what.source, sources)
    compiled = nvrtc.compile_source(what.source, texts, target, (*what.defines, *defines))
    return Library(f"{what.name} ({target})", compiled.cubin)


def _refusal(device: int, what: str, targets: Sequence[str]) -> str:
    major, minor = driver.capability(device)
    return (
        f"{what} cannot run on GPU {device}, {driver.device_name(device)} (sm_{major}{minor}): images exist for "
        f"{', '.join(targets)} (driver {MINIMUM_DRIVER} or newer)"
    )


_images = Images()


def kernel(name: str, device: int) -> Kernel:
    """The kernel called `name` on device number `device`, from the images that come with this package.

    Loaded on first use, kept for the life of the process. Raises as Images.kernel does.
    """
    return _images.kernel(name, device)


def warm(names: Iterable[str], device: int) -> list[Kernel]:
    """Load every kernel named onto `device`, so that nothing is loaded during a capture."""
    return _images.warm(names, device)
