"""`ziggurat doctor`: what it finds on this machine and in a configuration, and when it says that nothing can work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from ziggurat.allocators.limits import CgroupLimit, HostLimits
from ziggurat.allocators.topology import Gpu, GpuSurvey, NumaNode, PcieLink
from ziggurat.integration.cli import doctor
from ziggurat.integration.cli.doctor import Finding

app = typer.Typer()
app.callback()(lambda: None)
doctor.register(app)


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZIGGURAT_CONFIG", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def found(*arguments: object) -> dict[str, Finding]:
    result = run(*arguments, "--json")
    values = json.loads(result.stdout)
    findings = [Finding(**one) for one in values["findings"]]
    assert values["ok"] is all(one.status != "fail" for one in findings)
    assert result.exit_code == (0 if values["ok"] else 1)
    assert all(one.advice for one in findings if one.status == "fail")
    assert len({one.name for one in findings}) == len(findings)
    return {one.name: one for one in findings}


def write_config(folder: Path, disk: str, more: str = "") -> Path:
    path = folder / "tiers.yaml"
    path.write_text(f"tiers: {{disk: {{{disk}}}}}\n{more}")
    return path


def test_this_machine_can_serve_and_every_part_is_named() -> None:
    findings = found()
    assert {
        "python",
        "torch",
        "vLLM",
        "vLLM plugin",
        "memory",
        "cgroup memory limit",
        "locked memory",
    } <= set(findings)
    assert findings["torch"] == Finding("torch", "ok", version("torch"))
    assert findings["vLLM"].status == "ok"
    assert findings["vLLM plugin"] == Finding(
        "vLLM plugin", "ok", "ziggurat.integration.vllm.plugin:register"
    )
    assert "GiB" in findings["memory"].value
    assert "ZIGGURAT_CONFIG" in findings["configuration"].advice
    assert "pack folder" not in findings


def test_a_configuration_is_checked_with_its_pack_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, "path: not/yet")
    findings = found("-c", path)
    assert findings["configuration"].value == str(path)
    assert findings["pack folder"].value == f"{tmp_path}/not/yet (will be made in {tmp_path.resolve()})"
    assert findings["pack filesystem"].value
    assert findings["pack free space"].value.endswith("B")
    assert findings["direct I/O"].status in ("ok", "note")
    assert findings["rows are read by"].value.startswith(("io_uring", "pread, a pool of threads: "))
    assert sorted(tmp_path.iterdir()) == [path]
    monkeypatch.setenv("ZIGGURAT_CONFIG", str(path))
    assert found()["configuration"].value == str(path)


@pytest.mark.parametrize(
    ("disk", "more", "name", "said"),
    [
        ("path: p, read: 8", "", "configuration", 'unknown key "tiers.disk.read"'),
        ("path: tiers.yaml", "", "pack folder", "Not a directory"),
        ("path: /proc/self/fdinfo", "", "pack folder", "not writable and holds no packs"),
        ("path: p", "model: {path: nowhere}", "model", "has no config.json"),
    ],
)
def test_what_makes_serving_impossible_is_a_failure(
    tmp_path: Path, disk: str, more: str, name: str, said: str
) -> None:
    findings = found("-c", write_config(tmp_path, disk, more))
    assert findings[name].status == "fail"
    assert said in findings[name].value


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file" in found("-c", tmp_path / "none.yaml")["configuration"].value


def test_direct_always_fails_where_the_filesystem_has_none(tmp_path: Path) -> None:
    always = found("-c", write_config(tmp_path, "path: /proc/self/fdinfo, direct: always"))
    assert always["pack folder"].status == "fail"
    here = found("-c", write_config(tmp_path, "path: p, direct: always"))["direct I/O"]
    assert here.status in ("ok", "fail")  # as this filesystem has it; never only a note
    assert here.status == "ok" or here.advice.startswith("set tiers.disk.direct to auto")


def test_the_table_shows_advice_and_the_exit_code_follows(tmp_path: Path) -> None:
    result = run("-c", write_config(tmp_path, "path: p, read: 8"))
    assert result.exit_code == 1
    assert "fail  configuration" in result.output
    assert "→ see docs/configuration.md" in result.output
    assert run().exit_code == 0


def test_a_plugin_that_vllm_is_told_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert found()["vLLM plugin"].status == "fail"
    monkeypatch.setenv("VLLM_PLUGINS", "other,ziggurat")
    assert found()["vLLM plugin"].status == "ok"


def limits(*, memlock: int | None, exempt: bool = False, cgroup: CgroupLimit | None = None) -> HostLimits:
    return HostLimits(64 << 30, 32 << 30, cgroup, memlock, memlock, exempt)


def only(findings: Iterator[Finding], name: str) -> Finding:
    (one,) = [one for one in findings if one.name == name]
    return one


def test_a_locked_memory_limit_matters_where_there_is_a_gpu() -> None:
    assert doctor._locked_memory(limits(memlock=None), needed=True).status == "ok"
    assert doctor._locked_memory(limits(memlock=8 << 20, exempt=True), needed=True).status == "ok"
    assert doctor._locked_memory(limits(memlock=8 << 20), needed=False).status == "ok"
    short = doctor._locked_memory(limits(memlock=8 << 20), needed=True)
    assert (short.status, short.value) == ("note", "8.00 MiB, hard 8.00 MiB")
    assert "LimitMEMLOCK=infinity" in short.advice
    counted = doctor._locked_memory(limits(memlock=8 << 20), needed=True, counts=True)
    assert (counted.status, counted.advice) == ("note", short.advice)
    free = doctor._locked_memory(limits(memlock=8 << 20), needed=True, counts=False)
    assert (free.status, free.advice) == ("ok", "")
    assert "does not count: tried" in free.value


def test_a_container_limit_is_shown_with_what_is_left() -> None:
    tight = CgroupLimit(2, Path("/sys/fs/cgroup/a"), 4 << 30, 3 << 30, 1 << 29)
    one = only(doctor._memory(limits(memlock=None, cgroup=tight)), "cgroup memory limit")
    assert one.status == "note"
    assert one.value.startswith("1.50 GiB of 4.00 GiB left (2.50 GiB used beside page cache; v2 ")
    roomy = CgroupLimit(1, Path("/sys/fs/cgroup/memory"), 64 << 30, 0, 0)
    assert only(doctor._memory(limits(memlock=None, cgroup=roomy)), "cgroup memory limit").status == "ok"


def gpu(**changes: Any) -> Gpu:
    link = PcieLink(1, 16, 5, 16)  # an idle GPU lets its link slow down
    one = Gpu(0, "NVIDIA H200", "GPU-1", "00000000:1b:00.0", 1, 140 << 30, 139 << 30, (9, 0), link)
    return replace(one, **changes)


def survey(one: Gpu, driver: str = "580.1") -> GpuSurvey:
    return GpuSurvey((one,), driver, None)


def test_gpus_are_listed_with_their_node_and_link() -> None:
    found = {one.name: one for one in doctor._gpus(survey(gpu()))}
    assert found["GPU 0"].value == (
        "NVIDIA H200 (sm 9.0), 139.00 GiB of 140.00 GiB free, NUMA node 1, driver 580.1"
    )
    assert found["GPU 0 link"].value == "PCIe 5 x16, at generation 1 now"
    assert found["GPU driver"].value == "580.1"
    assert {one.status for one in found.values()} == {"ok"}


def test_what_is_worth_knowing_of_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = only(doctor._gpus(survey(gpu(link=PcieLink(4, 8, 4, 16)))), "GPU 0 link")
    assert (narrow.status, narrow.value) == ("note", "PCIe 4 x8 of x16")
    assert only(doctor._gpus(survey(gpu(link=None))), "GPU 0 link").status == "note"
    old = only(doctor._gpus(survey(gpu(compute_capability=(7, 5)))), "GPU 0")
    assert (old.status, "sm 8.0" in old.advice) == ("note", True)
    driver = only(doctor._gpus(survey(gpu(), "570.86")), "GPU driver")
    assert (driver.status, "driver 580" in driver.advice) == ("note", True)
    monkeypatch.setattr(doctor, "numa_nodes", lambda: (NumaNode(0, (0,), 1, 1), NumaNode(1, (1,), 1, 1)))
    node = only(doctor._gpus(survey(gpu(numa_node=None))), "GPU 0 NUMA node")
    assert (node.status, "tiers.host.numa" in node.advice) == ("note", True)


def test_memory_that_may_grow_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    one = only(doctor._memory(replace(limits(memlock=None), memory_may_grow=True)), "memory")
    assert one.status == "ok"
    assert "may read low" in one.value


def test_a_device_or_node_that_is_not_here_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path, "path: p}, device: {device: cuda:99")
    assert "there is no cuda:99" in found("-c", path)["device"].value
    path = write_config(tmp_path, "path: p}, host: {numa: 77")
    assert found("-c", path)["device"].status == "ok" or torch.cuda.is_available()
    monkeypatch.setattr(doctor, "resolve_device", lambda wanted: "cuda:0")
    assert "there is no node 77" in found("-c", path)["device"].value


def test_where_an_arena_will_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "resolve_device", lambda wanted: "cuda:0")
    monkeypatch.setattr(doctor, "gpus", lambda: survey(gpu()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    arena = found("-c", write_config(tmp_path, "path: p"))["arena"]
    assert (arena.status, arena.value) == ("ok", "pinned, bound to NUMA node 1")
    nowhere = found("-c", write_config(tmp_path, "path: p}, host: {numa: none"))["arena"]
    assert nowhere.value == "pinned, bound to no NUMA node"
