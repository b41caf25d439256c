"""`ziggurat doctor`: what this machine offers, and for each shortfall what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ziggurat.allocators.disk import DiskFacts
from ziggurat.allocators.errors import NumaError
from ziggurat.allocators.limits import HostLimits
from ziggurat.allocators.memlock_trial import registration_counts
from ziggurat.allocators.shared.errors import SharedArenaError
from ziggurat.allocators.shared.lease import ask_status
from ziggurat.allocators.topology import Gpu, GpuSurvey, choose_node, gpus, numa_nodes, visible_gpus
from ziggurat.integration.cli.options import ConfigOption
from ziggurat.integration.device import resolve_device
from ziggurat.integration.packing import IMPORT_ADVICE, complete_sizes
from ziggurat.integration.preflight import REFUSALS
from ziggurat.integration.vllm.compat import check_version, vllm_version
from ziggurat.integration.vllm.errors import UnsupportedVllmError
from ziggurat.kernels.cuda.units import MINIMUM_DRIVER, OLDEST_CAPABILITY
from ziggurat.residency.config import CONFIG_VARIABLE, TiersConfig, find_config, load_config
from ziggurat.residency.errors import ConfigError
from ziggurat.residency.sizes import format_bytes
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.manifest import MANIFEST_FILE
from ziggurat.stores.readers.ring import problem

__all__ = ["Finding", "examine", "register"]

Status = Literal["ok", "note", "fail"]
_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "fail": "bold red"}
_NETWORK_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre"})
_LITTLE_MEMORY = 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. "note": it works, but something is worth knowing; "fail": serving is impossible until it is changed.

    `advice` says what to do and is empty where nothing is to be done.
    """

    name: str
    status: Status
    value: str
    advice: str = ""


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("doctor")(doctor)


def doctor(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Report what this machine offers and what to do about each shortfall; status 1 if serving is impossible."""
    findings = tuple(examine(config))
    possible = all(one.status != "fail" for one in findings)
    if as_json:
        typer.echo(json.dumps({"ok": possible, "findings": [asdict(one) for one in findings]}, indent=2))
    else:
        _print(findings)
    if not possible:
        raise typer.Exit(1)


def examine(config_path: Path | None) -> Iterator[Finding]:
    """Every finding, in the order in which they are shown. Without a configuration no pack folder is looked at."""
    yield from _software()
    limits = HostLimits.read()
    survey = gpus()
    yield from _gpus(survey)
    yield from _memory(limits)
    yield from _numa()
    counts = registration_counts() if survey.gpus and limits.memlock is not None else None
    yield _locked_memory(limits, needed=bool(survey.gpus), counts=counts)
    if config_path is None and not os.environ.get(CONFIG_VARIABLE):
        yield Finding(
            "configuration", "note", "none given", f"give -c FILE or set {CONFIG_VARIABLE} to check it too"
        )
        return
    try:
        path = find_config(config_path)
        config = load_config(path)
    except ConfigError as error:
        for problem in error.problems:
            yield Finding("configuration", "fail", problem, "see docs/configuration.md")
        return
    yield Finding("configuration", "ok", str(path))
    yield from _device(config)
    yield from _arena_process(config)
    yield from _model(config)
    yield from _pack_folder(config)


def _software() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    try:
        yield Finding("torch", "ok", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding("torch", "fail", "not installed", "install the torch that your vLLM needs")
    try:
        check_version()
        yield Finding("vLLM", "ok", vllm_version())
    except UnsupportedVllmError as error:
        yield Finding("vLLM", "fail", vllm_version(), str(error))
    yield _plugin()


def _plugin() -> Finding:
    points = importlib.metadata.entry_points(group="vllm.general_plugins", name="ziggurat")
    if not points:
        advice = "install this package into vLLM's environment (pip install .)"
        return Finding("vLLM plugin", "fail", "no entry point named ziggurat", advice)
    (point, *others) = points
    if importlib.util.find_spec(point.module) is None:
        return Finding(
            "vLLM plugin", "fail", f"{point.value} cannot be imported", "install this package again"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "ziggurat" not in allowed.split(","):
        advice = "add ziggurat to VLLM_PLUGINS or unset it"
        return Finding("vLLM plugin", "fail", f"VLLM_PLUGINS={allowed} leaves it out", advice)
    if any(other.value != point.value for other in others):
        return Finding(
            "vLLM plugin", "note", "two are installed", "uninstall one of the two copies of this package"
        )
    return Finding("vLLM plugin", "ok", point.value)


def _gpus(survey: GpuSurvey) -> Iterator[Finding]:
    if not survey.gpus:
        yield Finding(
            "GPU", "note", f"none: {survey.reason}", "layers run on the CPU (tiers.device.device: cpu)"
        )
        return
    yield _driver(survey)
    for gpu in survey.gpus:
        node = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
        capability = ".".join(str(part) for part in gpu.compute_capability)
        value = (
            f"{gpu.name} (sm {capability}), {format_bytes(gpu.memory_free)} of {format_bytes(gpu.memory_total)} free"
            f"{node}, driver {survey.driver}"
        )
        if gpu.compute_capability < OLDEST_CAPABILITY:
            advice = "kernels exist for sm 8.0 and newer: use another GPU or tiers.device.device: cpu"
            yield Finding(f"GPU {gpu.index}", "note", value, advice)
        else:
            yield Finding(f"GPU {gpu.index}", "ok", value)
        if gpu.numa_node is None and len(numa_nodes()) > 1:
            advice = "set tiers.host.numa to the node it is attached to (nvidia-smi topo -m)"
            yield Finding(f"GPU {gpu.index} NUMA node", "note", "the firmware does not say", advice)
        yield _link(gpu)
    try:
        yield Finding("layers run on", "ok", resolve_device("auto"))
    except ConfigError as error:
        yield Finding("layers run on", "note", str(error))


def _driver(survey: GpuSurvey) -> Finding:
    number = (survey.driver or "").partition(".")[0]
    if number.isdecimal() and int(number) < int(MINIMUM_DRIVER):
        advice = f"kernels and copies need CUDA 13: install driver {MINIMUM_DRIVER} or newer"
        return Finding("GPU driver", "note", str(survey.driver), advice)
    return Finding("GPU driver", "ok", str(survey.driver))


def _link(gpu: Gpu) -> Finding:
    name, link = f"GPU {gpu.index} link", gpu.link
    if link is None:
        return Finding(
            name, "note", "NVML does not say", "`ziggurat plan` is right all the same; measure the link"
        )
    value = (
        f"PCIe {link.max_generation} x{link.width}"
        + ("" if link.width == link.max_width else f" of x{link.max_width}")
        + ("" if link.generation == link.max_generation else f", at generation {link.generation} now")
    )
    if link.width < link.max_width:
        return Finding(
            name,
            "note",
            value,
            "rows come at the width of the link: look for a wider slot or a riser at fault",
        )
    return Finding(name, "ok", value)


def _memory(limits: HostLimits) -> Iterator[Finding]:
    if limits.memory_available is None or limits.memory_total is None:
        yield Finding(
            "memory", "note", "unknown", "mount /proc so that limits can be checked before allocating"
        )
    else:
        value = f"{format_bytes(limits.memory_available)} of {format_bytes(limits.memory_total)} available"
        if limits.memory_may_grow:
            value += " (this virtual machine's host may add memory as it is used: both may read low)"
        yield _enough("memory", value, limits.memory_available, "stop other programs or use a larger machine")
    if limits.cgroup is None:
        yield Finding("cgroup memory limit", "ok", "none")
    else:
        group = limits.cgroup
        value = (
            f"{format_bytes(group.headroom)} of {format_bytes(group.limit)} left"
            f" ({format_bytes(group.usage - group.reclaimable)} used beside page cache; v{group.version} {group.path})"
        )
        yield _enough("cgroup memory limit", value, group.headroom, "raise the container's memory limit")


def _enough(name: str, value: str, available: int, advice: str) -> Finding:
    return Finding(name, "note", value, advice) if available < _LITTLE_MEMORY else Finding(name, "ok", value)


def _numa() -> Iterator[Finding]:
    nodes = numa_nodes()
    if not nodes:
        yield Finding("NUMA", "note", "the kernel shows no nodes", "tiers.host.numa has no effect here")
    for node in nodes:
        memory = (
            "memory unknown" if node.memory_total is None else f"{format_bytes(node.memory_total)} memory"
        )
        yield Finding(f"NUMA node {node.node}", "ok", f"{len(node.cpus)} CPUs, {memory}")


def _locked_memory(limits: HostLimits, *, needed: bool, counts: bool | None = None) -> Finding:
    """needed: there is a GPU. counts: whether memory registered with CUDA counts against the limit, None: not known."""
    if limits.memlock is None:
        how = " (CAP_IPC_LOCK)" if limits.memlock_exempt and limits.memlock_soft is not None else ""
        return Finding("locked memory", "ok", f"no limit{how}")
    value = f"{format_bytes(limits.memlock)}, hard " + (
        "unlimited" if limits.memlock_hard is None else format_bytes(limits.memlock_hard)
    )
    if not needed:
        return Finding("locked memory", "ok", f"{value} (not needed: arenas are pageable without a GPU)")
    if counts is False:
        return Finding("locked memory", "ok", f"{value} (memory registered with CUDA does not count: tried)")
    if counts:
        value += " (memory registered with CUDA counts: tried)"
    advice = (
        "for pinned arenas raise it: ulimit -l unlimited, memlock in limits.conf, LimitMEMLOCK=infinity for a service,"
        " --ulimit memlock=-1 for a container; or set tiers.host.on_limit: pageable"
    )
    return Finding("locked memory", "note", value, advice)


def _arena_process(config: TiersConfig) -> Iterator[Finding]:
    path = config.tiers.host.share
    if path is None:
        return
    try:
        found = ask_status(path)
    except SharedArenaError as error:
        advice = f"start `ziggurat arena --socket {path}`; without it an engine has an arena of its own"
        yield Finding("arena process", "note", str(error), advice)
        return
    held = sum(one.bytes for one in found.arenas)
    yield Finding(
        "arena process",
        "ok",
        f"process {found.pid} keeps {len(found.arenas)} arenas of {format_bytes(held)}, at most"
        f" {format_bytes(found.limit)}",
    )


def _device(config: TiersConfig) -> Iterator[Finding]:
    try:
        device = resolve_device(config.tiers.device.device)
        if device != "cpu":
            choice = choose_node(config.tiers.host.numa, _node_of(device), numa_nodes())
            where = "no NUMA node" if choice.node is None else f"NUMA node {choice.node}"
            status: Status = "ok" if choice.note is None else "note"
            yield Finding("arena", status, f"pinned, bound to {where}", choice.note or "")
    except (ConfigError, NumaError) as error:
        yield Finding(
            "device",
            "fail",
            str(error),
            "see tiers.device.device and tiers.host.numa in docs/configuration.md",
        )
        return
    yield Finding("device", "ok", f"{config.tiers.device.device}: {device}" if device != config.tiers.device.device
                  else device)  # fmt: skip


def _node_of(device: str) -> int | None:
    visible, number = visible_gpus(gpus()), int(device.removeprefix("cuda:"))
    return visible[number].numa_node if number < len(visible) else None


def _model(config: TiersConfig) -> Iterator[Finding]:
    folder = config.model.path
    if folder is None:
        return
    if not (folder / "config.json").is_file():
        yield Finding(
            "model", "fail", f"{folder} has no config.json", "point model.path at a checkpoint folder"
        )
    elif (folder / MANIFEST_FILE).is_file():
        yield from _stripped_model(folder, config)
    else:
        yield Finding("model", "ok", str(folder))


def _stripped_model(folder: Path, config: TiersConfig) -> Iterator[Finding]:
    """A folder that may be without experts: then packs must be there."""
    try:
        with Checkpoint.open(folder) as checkpoint:
            whole = checkpoint.has_experts
            sizes = [] if whole else complete_sizes(checkpoint, config)
    except REFUSALS as error:
        advice = "serve from a sound export, or from the whole checkpoint"
        yield Finding("model", "fail", str(error), advice)
        return
    yield Finding("model", "ok", f"{folder}" if whole else f"{folder}, without experts")
    if sizes:
        listed = ", ".join(map(str, sizes))
        yield Finding("packs of the model", "ok", f"for tensor-parallel size {listed}")
    elif not whole:
        value = f"no {config.codecs.base} pack of it is in {config.tiers.disk.path}"
        yield Finding("packs of the model", "fail", value, IMPORT_ADVICE)


def _pack_folder(config: TiersConfig) -> Iterator[Finding]:
    disk = config.tiers.disk
    try:
        facts = DiskFacts.probe(disk.path)
    except OSError as error:
        yield Finding(
            "pack folder", "fail", f"{disk.path}: {error.strerror}", "point tiers.disk.path at a folder"
        )
        return
    where = str(disk.path) if facts.exists else f"{disk.path} (will be made in {facts.probed})"
    if facts.writable:
        yield Finding("pack folder", "ok", where)
    elif facts.exists and any(disk.path.glob("*.safetensors")):
        yield Finding(
            "pack folder", "note", f"{where}, read-only", "packs that are there can be served, none built"
        )
    else:
        advice = "make it writable or point tiers.disk.path elsewhere"
        yield Finding("pack folder", "fail", f"{where} is not writable and holds no packs", advice)
    filesystem = facts.fs_type or "unknown filesystem"
    if facts.fs_type in _NETWORK_FILESYSTEMS:
        yield Finding("pack filesystem", "note", filesystem, "a local disk serves rows with far less delay")
    elif facts.fs_type in ("tmpfs", "ramfs"):
        yield Finding(
            "pack filesystem", "note", filesystem, "packs here take memory and are gone after a reboot"
        )
    else:
        yield Finding("pack filesystem", "ok", filesystem)
    yield Finding("pack free space", "ok", format_bytes(facts.free))
    yield _direct_io(config, facts)
    yield _reader(config, facts)


def _direct_io(config: TiersConfig, facts: DiskFacts) -> Finding:
    wanted = config.tiers.disk.direct
    if facts.direct_io:
        return Finding("direct I/O", "ok", f"supported, blocks of {facts.direct_alignment} bytes")
    if facts.direct_io is None:
        return Finding("direct I/O", "note", "not tried: nothing there to read and no way to write")
    if wanted == "always":
        return Finding(
            "direct I/O", "fail", "not supported", "set tiers.disk.direct to auto or move tiers.disk.path"
        )
    return Finding("direct I/O", "note", "not supported: rows are read through the page cache")


def _reader(config: TiersConfig, facts: DiskFacts) -> Finding:
    wanted, reason = config.tiers.disk.reader, problem()
    if wanted == "pread":
        return Finding("rows are read by", "ok", "pread, a pool of threads")
    cached = facts.direct_io is False or config.tiers.disk.direct == "never"
    if wanted == "auto" and cached and reason is None:
        return Finding("rows are read by", "ok", "pread, a pool of threads: faster through the page cache")
    if reason is None:
        return Finding("rows are read by", "ok", "io_uring")
    advice = "nothing needs to be done; set tiers.disk.reader to pread to have it said no more"
    return Finding("rows are read by", "note", f"pread, a pool of threads: {reason}", advice)


def _print(findings: tuple[Finding, ...]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for one in findings:
        style = _STYLES[one.status]
        table.add_row(f"[{style}]{one.status}[/]", escape(one.name), escape(one.value))
        if one.advice:
            table.add_row("", "", f"[{style}]→ {escape(one.advice)}[/]")
    Console(highlight=False).print(table)
