"""Builds that are killed, and how much memory a build takes: in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.checkpoints import SizeArgs, write_checkpoint
from support.kill_everywhere import TESTS, run_script
from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint

KILLED = """
import sys
from pathlib import Path
from support.kill_everywhere import kill_everywhere
from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint

model, out = map(Path, sys.argv[1:])

def build(folder):
    with Checkpoint.open(model) as checkpoint:
        build_pack(checkpoint, VerbatimEncoder(checkpoint), folder, 2, lanes=2)

print(kill_everywhere(build, out))
"""


def test_killed_at_every_system_call(small_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    kills = run_script(KILLED, small_model, out)
    # 2 ranks x (create 2, rows 2, syncs and tables 2 x 2, finish 2 or more)
    assert kills > 20
    with Checkpoint.open(small_model) as checkpoint:
        build_pack(checkpoint, VerbatimEncoder(checkpoint), tmp_path / "whole", 2)
    expected = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    folders = sorted(out.iterdir())
    assert len(folders) == kills + 1
    for folder in folders:
        # Killed between its last rename and its end, a build leaves its lock file; the lock itself is gone.
        found = {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".lock"}
        assert found == expected, folder


BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint
with Checkpoint.open(Path(sys.argv[2])) as checkpoint:
    def before(name):
        print(name, flush=True)
        sys.stdin.readline()
    build_pack(checkpoint, VerbatimEncoder(checkpoint, before=before), Path(sys.argv[3]), lanes=1)
"""


def test_killed_from_outside(small_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(TESTS), str(small_model), str(tmp_path / "cut")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    for _ in range(4):
        assert child.stdout.readline().startswith("model.layers.")
        child.stdin.write("\n")
        child.stdin.flush()
    child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdin.close()
    child.stdout.close()
    names = {file.suffix for file in (tmp_path / "cut").iterdir()}
    assert names == {".building", ".lock"}
    with Checkpoint.open(small_model) as checkpoint:
        (cut,) = build_pack(checkpoint, VerbatimEncoder(checkpoint), tmp_path / "cut")
        (whole,) = build_pack(checkpoint, VerbatimEncoder(checkpoint), tmp_path / "whole")
    assert cut.read_bytes() == whole.read_bytes()
    assert list((tmp_path / "cut").iterdir()) == [cut]


MEASURE = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import build_pack, peak_bytes
from ziggurat.stores.checkpoint import Checkpoint

def status(field):
    text = Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", text)[1]) * 1024

with Checkpoint.open(Path(sys.argv[4])) as checkpoint:  # code that is loaded at its first use
    build_pack(checkpoint, VerbatimEncoder(checkpoint), Path(sys.argv[3]) / "first", lanes=2)
with Checkpoint.open(Path(sys.argv[2])) as checkpoint:
    encoder = VerbatimEncoder(checkpoint)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    build_pack(checkpoint, encoder, Path(sys.argv[3]), lanes=2)
    took = status("VmHWM") - before
    bound = peak_bytes(checkpoint, encoder, lanes=2)
    print(json.dumps([took, bound, sum(map(checkpoint.layer_bytes, range(checkpoint.layers)))]))
"""


def test_memory_stays_within_the_bound(small_model: Path, tmp_path: Path) -> None:
    sizes: SizeArgs = {
        "layers": 24,
        "experts": 24,
        "top_k": 2,
        "hidden": 256,
        "intermediate": 160,
        "vocab": 64,
    }
    write_checkpoint(tmp_path / "model", **sizes)
    places = [str(TESTS), str(tmp_path / "model"), str(tmp_path / "packs"), str(small_model)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *places], capture_output=True, text=True, check=True
    )
    took, bound, whole = json.loads(done.stdout)
    slack = 8 << 20  # thread stacks and the allocator's own
    assert bound + slack < whole / 2, "the model is too small to tell"
    assert took <= bound + slack
