"""Let a CUDA build of torch import on a machine without CUDA.

The package index serves a build of torch for Linux that is linked against a dozen CUDA libraries (4 GB of
wheels). On a CPU none of them is ever used, but the loader still insists on them. This module compiles an
empty stand-in for each one, a few tens of kilobytes in all, in which every function returns cudaErrorNoDevice
(100), a failure status in every one of those libraries. `torch.cuda.is_available()` is then False, as it is on
any machine without a GPU.

Only for the lanes of the test suite; a product installation brings the real libraries.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lanes.elf import SharedLibrary, read_shared_library

# Sonames of NVIDIA's libraries. Anything else that is missing is a fault of the machine and stays visible.
_CUDA_PREFIXES = ("libcu", "libnv", "libnccl")
# A symbol without a version names no library; these are the ones that belong to NVIDIA's.
_CUDA_SYMBOLS = ("cu", "__cu", "nccl", "pnccl", "nv")


class StubError(RuntimeError):
    """No stubs could be made; the message says what is missing."""


@dataclass(slots=True)
class Stub:
    """One library to make: its functions by symbol version (None: without a version)."""

    soname: str
    functions: dict[str | None, set[str]] = field(default_factory=lambda: defaultdict(set))

    def source(self) -> str:
        """C source that defines every function once."""
        names = sorted(set().union(*self.functions.values()))
        return "".join(f"int {name}(void) {{ return 100; }}\n" for name in names)

    def version_script(self) -> str:
        """Linker version script with the versioned functions; empty if none has a version."""
        return "".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
            for version, names in sorted((v, n) for v, n in self.functions.items() if v is not None)
        )


def find_compiler(environment: Mapping[str, str] | None = None) -> list[str] | None:
    """The C compiler's command: $CC, else the first of cc, gcc, clang on the path; None without one."""
    environment = os.environ if environment is None else environment
    if chosen := environment.get("CC"):
        command = shlex.split(chosen)
        return command if shutil.which(command[0], path=environment.get("PATH")) else None
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name, path=environment.get("PATH")):
            return [found]
    return None


def plan_stubs(site_packages: Path) -> list[Stub]:
    """Find the CUDA libraries that `import torch` needs under `site_packages` and that are not there."""
    folder = site_packages / "torch" / "lib"
    loaded = _closure(sorted((site_packages / "torch").glob("_C*.so")), folder)
    present = {path.name for path in site_packages.glob("nvidia/**/lib/*.so*")}
    missing = {
        soname
        for library in loaded
        for soname in library.needed
        if soname.startswith(_CUDA_PREFIXES) and soname not in present and not (folder / soname).exists()
    }
    stubs = {soname: Stub(soname) for soname in sorted(missing)}
    defined = frozenset().union(*(library.defined for library in loaded))
    for library in loaded:
        # The loader looks for a symbol without a version in everything loaded so far, so any stub that this
        # library itself pulls in may hold it.
        host = next((stubs[soname] for soname in library.needed if soname in stubs), None)
        for symbol in library.wanted:
            if symbol.library in stubs:
                stubs[symbol.library].functions[symbol.version].add(symbol.name)
            elif (
                host
                and symbol.library is None
                and not symbol.weak
                and symbol.name not in defined
                and symbol.name.startswith(_CUDA_SYMBOLS)
            ):
                host.functions[None].add(symbol.name)
    return list(stubs.values())


def build_stubs(site_packages: Path, compiler: list[str]) -> list[Path]:
    """Compile the missing libraries into torch's own library folder, which its loader path covers.

    Raises StubError with the compiler's words if one of them does not build; a library appears there whole or
    not at all.
    """
    folder = site_packages / "torch" / "lib"
    made: list[Path] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".stubs-") as scratch_name:
        scratch = Path(scratch_name)
        for stub in plan_stubs(site_packages):
            source, script, result = (scratch / f"{stub.soname}{end}" for end in (".c", ".map", ""))
            source.write_text(stub.source())
            script.write_text(stub.version_script())
            command = [*compiler, "-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{stub.soname}"]
            if script.stat().st_size:
                command.append(f"-Wl,--version-script={script}")
            done = subprocess.run(
                [*command, "-o", str(result), str(source)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise StubError(f"{stub.soname}: {' '.join(compiler)} failed:\n{done.stderr.strip()}")
            made.append(result.replace(folder / stub.soname))
    return made


def _closure(roots: list[Path], folder: Path) -> list[SharedLibrary]:
    """The libraries reachable from `roots` through needed names that lie in `folder`."""
    seen: dict[Path, SharedLibrary] = {}
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen[path] = read_shared_library(path)
        waiting += [folder / name for name in seen[path].needed if (folder / name).exists()]
    return list(seen.values())
