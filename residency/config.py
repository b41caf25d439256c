"""The configuration: one YAML file, checked completely before anything else happens.

`load_config(path)` reads a file, `TiersConfig.from_mapping(values)` takes a mapping; both raise ConfigError
with one line per mistake. The meaning of every key is in docs/configuration.md. No environment variable
changes behaviour, except that ZIGGURAT_CONFIG names the file when the command line does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
)

from ziggurat.kernels.lookahead import MOST_GUESSES
from ziggurat.residency.config_errors import explain
from ziggurat.residency.errors import ConfigError
from ziggurat.residency.sizes import Size, shorten
from ziggurat.residency.strict_yaml import read_yaml_file

__all__ = [
    "CONFIG_VARIABLE",
    "CodecsConfig",
    "DeviceTierConfig",
    "DiskTierConfig",
    "HeatConfig",
    "HostTierConfig",
    "MetricsConfig",
    "MissConfig",
    "ModelConfig",
    "PolicyConfig",
    "TierSetConfig",
    "TiersConfig",
    "find_config",
    "load_config",
]

CONFIG_VARIABLE = "ZIGGURAT_CONFIG"


class _Section(BaseModel):
    # strict: "8" is not a number and true is not 1; frozen: a configuration does not change under its users.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _read_path(written: object, info: ValidationInfo) -> Path:
    if isinstance(written, str) and not written.strip():
        raise ValueError("a path is not empty")
    if not isinstance(written, str | Path):
        raise ValueError(f"expected a path, not {shorten(written)}")
    if "\0" in str(written):
        raise ValueError("a path holds no NUL character")
    path = Path(written)
    try:
        path = path.expanduser()
    except RuntimeError:
        raise ValueError(f"no home directory for {shorten(str(written))}") from None
    base = (info.context or {}).get("base")
    return path if base is None else Path(base) / path


def _read_sizes(written: object) -> Size | tuple[Size, ...]:
    if not isinstance(written, list | tuple):
        return Size.parse(written)
    if not written:
        raise ValueError("a list of sizes has one size per tensor-parallel rank, not none")
    return tuple(Size.parse(one) for one in written)


def _write_sizes(sizes: Size | tuple[Size, ...]) -> str | list[str]:
    return str(sizes) if isinstance(sizes, Size) else [str(one) for one in sizes]


def _read_device(written: object) -> str:
    if isinstance(written, str) and re.fullmatch(r"auto|cpu|cuda:[0-9]{1,3}", written):
        return written
    raise ValueError(f"expected auto, cpu or cuda:N (N a number), not {shorten(written)}")


def _read_numa(written: object) -> str | int:
    if written in ("gpu-local", "none") or (
        isinstance(written, int) and not isinstance(written, bool) and written >= 0
    ):
        assert isinstance(written, str | int)
        return written
    raise ValueError(f"expected gpu-local, none or the number of a NUMA node, not {shorten(written)}")


def _read_staging(written: object) -> Size:
    size = Size.parse(written)
    if size.kind == "percent":
        raise ValueError(f"expected bytes, rows or auto, not the share {shorten(written)}")
    return size


def _read_layers(written: object) -> tuple[int, ...]:
    if not isinstance(written, list | tuple):
        raise ValueError(f"expected a list of layer numbers, not {shorten(written)}")
    for one in written:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            raise ValueError(f"a layer is a number, 0 or more, not {shorten(one)}")
        if written.count(one) > 1:
            raise ValueError(f"layer {shorten(one)} is listed twice")
    return tuple(written)


def _read_heat_path(written: object, info: ValidationInfo) -> Path | Literal["auto"] | None:
    if written is None or written == "auto":
        return "auto" if written == "auto" else None
    return _read_path(written, info)


def _read_delta(written: object) -> None:
    if written is not None:
        raise ValueError(
            f"a second precision is not implemented yet; only null is accepted, not {shorten(written)}"
        )


def _read_prefetch(written: object) -> tuple[str, ...]:
    if not isinstance(written, list | tuple):
        raise ValueError(f"expected a list, not {shorten(written)}")
    if written:
        raise ValueError(f"prefetcher {shorten(written[0])} is not implemented yet; only [] is accepted")
    return ()


ConfigPath = Annotated[Path, BeforeValidator(_read_path), PlainSerializer(str)]
OptionalPath = Annotated[
    Path | None,
    BeforeValidator(lambda written, info: None if written is None else _read_path(written, info)),
    PlainSerializer(lambda path: None if path is None else str(path)),
]
HeatPath = Annotated[
    Path | Literal["auto"] | None,
    BeforeValidator(_read_heat_path),
    PlainSerializer(lambda path: None if path is None else str(path)),
]


ConfigSize = Annotated[Size, BeforeValidator(Size.parse), PlainSerializer(str)]
ConfigSizes = Annotated[Size | tuple[Size, ...], BeforeValidator(_read_sizes), PlainSerializer(_write_sizes)]


StagingSize = Annotated[Size, BeforeValidator(_read_staging), PlainSerializer(str)]


class ModelConfig(_Section):
    """Where the checkpoint is; a MODEL on the command line wins."""

    path: OptionalPath = None


class DiskTierConfig(_Section):
    """The pack folder and how rows are read from it."""

    path: ConfigPath
    direct: Literal["auto", "always", "never"] = "auto"
    readers: Annotated[int, Field(ge=1, le=256)] = 8
    reader: Literal["auto", "io_uring", "pread"] = "auto"
    read_timeout: Annotated[float, Field(gt=0, le=86400)] | None = 120.0
    verify: Literal["always", "first-read", "never"] = "first-read"
    rebuild: bool = True
    faults: OptionalPath = None


class HostTierConfig(_Section):
    """The arena: rows kept in host memory, a cache over the pack."""

    size: ConfigSize = Size("auto")
    numa: Annotated[str | int, BeforeValidator(_read_numa)] = "gpu-local"
    on_limit: Literal["refuse", "shrink", "pageable"] = "refuse"
    share: OptionalPath = None


class DeviceTierConfig(_Section):
    """The pool: the rows that a layer can compute with."""

    size: ConfigSizes = Size("auto")
    device: Annotated[str, BeforeValidator(_read_device)] = "auto"
    staging: StagingSize = Size("auto")
    direct_layers: Annotated[tuple[int, ...], BeforeValidator(_read_layers)] = ()

    def size_of(self, rank: int, tp_size: int) -> Size:
        """The size for one tensor-parallel rank. ConfigError if a list has another length than `tp_size`."""
        if isinstance(self.size, Size):
            return self.size
        if len(self.size) != tp_size:
            raise ConfigError(
                f"tiers.device.size: lists {len(self.size)} sizes for {tp_size} tensor-parallel ranks"
            )
        return self.size[rank]


class TierSetConfig(_Section):
    disk: DiskTierConfig
    host: HostTierConfig = HostTierConfig()
    device: DeviceTierConfig = DeviceTierConfig()


class CodecsConfig(_Section):
    base: Literal["w2", "fp4", "bf16"] = "w2"
    delta: Annotated[None, BeforeValidator(_read_delta)] = None


class PolicyConfig(_Section):
    eviction: Literal[
        "arc",
        "clock",
        "heat-weighted",
        "lfru",
        "lfu-decay",
        "lru",
        "next-use",
        "s3-fifo",
        "sieve",
        "slru",
        "w-tinylfu",
    ] = "lfu-decay"
    host: Literal[
        "arc",
        "clock",
        "heat-weighted",
        "lfru",
        "lfu-decay",
        "lru",
        "s3-fifo",
        "sieve",
        "slru",
        "w-tinylfu",
    ] = "heat-weighted"
    host_floor: Annotated[int, Field(ge=0, le=100)] | None = None
    prefetch: Annotated[tuple[str, ...], BeforeValidator(_read_prefetch)] = ()


class MissConfig(_Section):
    """What happens to a routed expert that is not in the pool when its layer runs."""

    mode: Literal["auto", "inline", "replay"] = "auto"
    max_replays: Annotated[int, Field(ge=0, le=64)] = 2
    then: Literal["exact"] = "exact"
    tolerance: Annotated[int, Field(ge=0)] = 0
    lookahead: Annotated[int, Field(ge=0, le=MOST_GUESSES)] = 0


class HeatConfig(_Section):
    """How often each expert was routed to, kept over restarts."""

    path: HeatPath = "auto"
    save_every_steps: Annotated[int, Field(ge=1)] = 256
    warm_start: bool = True


class MetricsConfig(_Section):
    port: Annotated[int, Field(ge=1, le=65535)] | None = None


class TiersConfig(_Section):
    """A whole configuration. `model_dump(mode="json")` gives a mapping that `from_mapping` reads back."""

    model: ModelConfig = ModelConfig()
    tiers: TierSetConfig
    codecs: CodecsConfig = CodecsConfig()
    policy: PolicyConfig = PolicyConfig()
    miss: MissConfig = MissConfig()
    heat: HeatConfig = HeatConfig()
    metrics: MetricsConfig = MetricsConfig()

    @classmethod
    def from_mapping(cls, values: object, *, name: str = "configuration", base: Path | None = None) -> Self:
        """Checks `values`, the mapping a YAML file would give. Raises ConfigError, one line per mistake.

        `name` starts each line of an error; relative paths are taken from the folder `base` (from the working
        directory if None).
        """
        if not isinstance(values, Mapping):
            what = "is empty" if values is None else f"holds {_kind(values)}"
            raise ConfigError(
                f"{name}: {what}; expected a mapping with the keys {', '.join(cls.model_fields)}"
            )
        try:
            return cls.model_validate(dict(values), context={"base": base})
        except ValidationError as error:
            raise ConfigError(*explain(error, cls, name)) from None


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else f"only {shorten(value)}"


def load_config(path: Path | str) -> TiersConfig:
    """Reads and checks the file at `path`. Relative paths in it are taken from the folder the file is in."""
    path = Path(path)
    return TiersConfig.from_mapping(read_yaml_file(path), name=str(path), base=path.absolute().parent)


def find_config(given: Path | None, environment: Mapping[str, str] = os.environ) -> Path:
    """The file to read: `given`, else the one ZIGGURAT_CONFIG names. ConfigError if neither is set."""
    if given is not None:
        return given
    named = environment.get(CONFIG_VARIABLE, "")
    if not named:
        raise ConfigError(f"no configuration: give -c FILE or set {CONFIG_VARIABLE}")
    return Path(named)
