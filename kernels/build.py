"""``python -m ziggurat.kernels.build``: compile the CUDA kernels to images, or check the ones that are there."""

from __future__ import annotations

import argparse
import sys
import time

from ziggurat.kernels.cuda import images, manifest
from ziggurat.kernels.cuda.errors import BuildError, ImageError
from ziggurat.kernels.cuda.units import IMAGES, UNITS


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 if something differs, 2 if it cannot be built."""
    parser = argparse.ArgumentParser(
        prog="python -m ziggurat.kernels.build",
        description="Compile the CUDA kernels with NVRTC; needs no compiler and no GPU.",
    )
    parser.add_argument("--check", action="store_true", help="rebuild and compare, write nothing")
    parser.add_argument(
        "--unit",
        action="append",
        default=[],
        metavar="NAME",
        help=f"only this unit (repeatable): {', '.join(unit.name for unit in UNITS)}",
    )
    parser.add_argument("--list", action="store_true", help="list kernels and what they use; builds nothing")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        if options.list:
            _list()
            return 0
        if options.check:
            found = images.differences(options.unit)
            for line in found:
                print(f"differs: {line}", file=sys.stderr)
            if found:
                print("rebuild and commit: python -m ziggurat.kernels.build", file=sys.stderr)
                return 1
            print(f"the images are what the sources give ({time.monotonic() - started:.1f} s)")
            return 0
        made = images.build(options.unit)
    except (BuildError, ImageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, record in made.units.items():
        total = sum(record.cubins.values())
        print(
            f"{name}: {len(record.targets)} targets, {total} bytes of code, {record.size} in {record.image}"
        )
    print(f"built in {time.monotonic() - started:.1f} s")
    return 0


def _list() -> None:
    print(
        f"{'kernel':40} {'target':8} {'registers':>9} {'shared':>7} {'stack':>6} {'spills':>7} {'params':>6}"
    )
    for record in manifest.read(IMAGES).units.values():
        for target, kernels in record.targets.items():
            for name, kernel in kernels.items():
                spills = kernel.spill_stores + kernel.spill_loads
                print(
                    f"{name:40} {target:8} {kernel.registers:9} {kernel.shared:7} {kernel.stack:6} "
                    f"{spills:7} {kernel.parameter:6}"
                )


if __name__ == "__main__":
    sys.exit(main())
