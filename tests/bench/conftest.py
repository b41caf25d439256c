"""`bench` is no installed package; its scripts put the repository's root on the path, and so do its tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
