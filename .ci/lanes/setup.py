"""Set up the lanes: `python3 .ci/lanes/setup.py [0.32] [0.24]` (default: 0.32).

A lane is one release of vLLM for the CPU with everything it imports. The heavy part is built once per
machine, under `${XDG_CACHE_HOME:-~/.cache}/ziggurat/lanes`; a clone gets a thin environment on top of it
(`.venv` for 0.32, `.venv-0.24` for 0.24) in which this clone is installed editable, so clones never disturb
each other.
"""

import os
import sys

# This file must parse under any Python, or nobody gets to read the message.
if sys.version_info < (3, 11):
    sys.exit(
        "error: Ziggurat needs Python 3.11 or newer, and %s is %d.%d.\n"
        "       Name another one: make PYTHON=python3.12 ..." % ((sys.executable,) + sys.version_info[:2])
    )

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from lanes.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
