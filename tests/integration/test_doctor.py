"""`ziggurat doctor`: what it finds on this machine and in a configuration, and when it says that nothing can work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from ziggurat.allocators.limits import CgroupLimit, HostLimits
from ziggurat.allocators.topology import Gpu, GpuSurvey
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


def test_a_container_limit_is_shown_with_what_is_left() -> None:
    tight = CgroupLimit(2, Path("/sys/fs/cgroup/a"), 4 << 30, 3 << 30, 1 << 29)
    one = only(doctor._memory(limits(memlock=None, cgroup=tight)), "cgroup memory limit")
    assert one.status == "note"
    assert one.value.startswith("1.50 GiB of 4.00 GiB left (2.50 GiB used beside page cache; v2 ")
    roomy = CgroupLimit(1, Path("/sys/fs/cgroup/memory"), 64 << 30, 0, 0)
    assert only(doctor._memory(limits(memlock=None, cgroup=roomy)), "cgroup memory limit").status == "ok"


def test_gpus_are_listed_with_their_node() -> None:
    gpu = Gpu(0, "NVIDIA H200", "GPU-1", "00000000:1b:00.0", 1, 140 << 30, 139 << 30, (9, 0))
    one = only(doctor._gpus(GpuSurvey((gpu,), "570.1", None)), "GPU 0")
    assert one.value == "NVIDIA H200 (sm 9.0), 139.00 GiB of 140.00 GiB free, NUMA node 1, driver 570.1"
