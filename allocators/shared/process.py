"""`python -m ziggurat.allocators.shared.process SOCKET --limit BYTES`: the arena process, and nothing else in it.

`ziggurat arena` becomes this; it stays small since it imports neither torch nor numpy.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ziggurat.allocators.limits import HostLimits
from ziggurat.allocators.shared.errors import SharedArenaError
from ziggurat.allocators.shared.keeper import Keeper
from ziggurat.allocators.shared.segments import Segments

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Keep arenas until SIGTERM or SIGINT; status 1 and one line if that cannot begin."""
    parser = argparse.ArgumentParser(prog="ziggurat arena", description="Keep host arenas for engines.")
    parser.add_argument("socket", type=Path)
    parser.add_argument("--limit", type=int, help="bytes of all arenas; default: what the machine has")
    parser.add_argument(
        "--huge-pages", action="store_true", help="of reserved 2 MiB pages, if there are enough"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    limit = options.limit if options.limit is not None else HostLimits.read().memory_total or sys.maxsize
    try:
        keeper = Keeper(options.socket, Segments(limit, huge=options.huge_pages))
    except (SharedArenaError, OSError) as error:
        print(f"ziggurat arena: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not from the handler itself: it may run in the middle of what `close` waits for.
        signal.signal(number, lambda *_: threading.Thread(target=keeper.close).start())
    logging.info("listening at %s, at most %.2f GiB of arenas", options.socket, limit / 2**30)
    keeper.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
