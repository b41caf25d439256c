"""How a tiers configuration travels to every vLLM process.

vLLM pickles ``additional_config`` to each of its processes and hashes it into the compile-cache key, so the validated
configuration goes there as a plain mapping. Processes never look at files or environment variables again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.integration.vllm.errors import SetupError
from ziggurat.residency.config import TiersConfig

KEY = "ziggurat"
LOAD_FORMAT = "ziggurat"
_DEBUG_KEYS = frozenset(
    {"capture_logits", "replay", "consensus", "shuffle_slots", "kernels", "record_routing"}
)


@dataclass(frozen=True, slots=True)
class DebugOptions:
    """Switches of the determinism tests and of `ziggurat trace record`; none changes what a healthy run answers.

    capture_logits: folder that receives every step's logits, bit for bit (see ``capture.py``).
    replay: False leaves missing experts out (negative control: results are then wrong).
    consensus: False lets each tensor-parallel rank decide alone (negative control: ranks then diverge or hang).
    shuffle_slots: seed for the order in which free slots are handed out.
    record_routing: folder that receives `routing.npz`, where every token of every layer went (see ``recording.py``).
    kernels: run the layers of a CPU the way those of a GPU run, behind kernels and static tensors.
    """

    capture_logits: Path | None = None
    replay: bool = True
    consensus: bool = True
    shuffle_slots: int | None = None
    kernels: bool = False
    record_routing: Path | None = None

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> DebugOptions:
        unknown = sorted(set(raw) - _DEBUG_KEYS)
        if unknown:
            raise SetupError(
                f"additional_config.{KEY}.debug: unknown key {unknown[0]!r}; known: {sorted(_DEBUG_KEYS)}"
            )
        folder = raw.get("capture_logits")
        routing = raw.get("record_routing")
        seed = raw.get("shuffle_slots")
        return cls(
            capture_logits=None if folder is None else Path(str(folder)),
            replay=bool(raw.get("replay", True)),
            consensus=bool(raw.get("consensus", True)),
            shuffle_slots=None if seed is None else int(seed),
            kernels=bool(raw.get("kernels", False)),
            record_routing=None if routing is None else Path(str(routing)),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``additional_config["ziggurat"]`` says."""

    config: TiersConfig
    debug: DebugOptions


def to_additional_config(config: TiersConfig, debug: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The mapping to pass as vLLM's ``additional_config``."""
    payload: dict[str, Any] = {"config": config.model_dump(mode="json")}
    if debug:
        payload["debug"] = dict(debug)
    return {KEY: payload}


def tiers_requested(vllm_config: Any) -> bool:
    """True if this engine was configured to tier its experts."""
    extra = vllm_config.additional_config
    return isinstance(extra, Mapping) and KEY in extra


def read_settings(vllm_config: Any) -> Settings:
    """Parse the settings of an engine; :class:`SetupError` or ``ConfigError`` if they are absent or wrong."""
    if not tiers_requested(vllm_config):
        raise SetupError(
            f"--load-format {LOAD_FORMAT} needs a tiers configuration: start the server with "
            "`ziggurat serve MODEL -c tiers.yaml`, which passes it in --additional-config"
        )
    payload = vllm_config.additional_config[KEY]
    if not isinstance(payload, Mapping) or set(payload) - {"config", "debug"} or "config" not in payload:
        raise SetupError(
            f'additional_config.{KEY} must be {{"config": {{…}}, "debug": {{…}}}}, got {payload!r}'
        )
    return Settings(
        config=TiersConfig.from_mapping(payload["config"]),
        debug=DebugOptions.from_mapping(payload.get("debug") or {}),
    )
