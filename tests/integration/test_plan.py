"""`ziggurat plan` on the demo model: the numbers, the refusals, and that nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from ziggurat.integration import estimates
from ziggurat.integration.cli import plan
from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.estimates import Given
from ziggurat.integration.packing import (
    PackingDeviceError,
    ensure_packs,
    pack_paths,
    plan_packing,
    wanted_headers,
)
from ziggurat.integration.preflight import plan_for
from ziggurat.kernels.cuda.errors import LayerError
from ziggurat.kernels.cuda.workspace import workspace_bytes
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.budget import MachineLimits
from ziggurat.residency.config import TiersConfig, load_config
from ziggurat.residency.errors import BudgetError, ConfigError
from ziggurat.residency.heat import HeatKey, HeatMap, save_heat
from ziggurat.residency.prediction import GATHER_SHARE, PredictionError
from ziggurat.stores.builder import peak_bytes
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.packformat import file_bytes

DEMO = Path(__file__).parents[2] / "bench/models/demo-moe-fp8"
ROWS = 192  # 6 layers of 32 experts
STRIDE = 28 * 1024  # w2: 3 * 256 * 128 weights in 2.25 bits are 27 KiB

app = typer.Typer()
app.callback()(lambda: None)
plan.register(app)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "packs").mkdir()
    return tmp_path


def write_config(folder: Path, **changes: Any) -> Path:
    """A configuration in `folder` with a quarter of the experts in the pool, changed by section."""
    values: dict[str, Any] = {
        "tiers": {
            "disk": {"path": "packs", **changes.pop("disk", {})},
            "host": {"size": "32 rows", **changes.pop("host", {})},
            "device": {"size": "25%", **changes.pop("device", {})},
        },
        **changes,
    }
    path = folder / "tiers.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_table_names_every_tier_its_rows_and_coverage(folder: Path) -> None:
    result = run(DEMO, "-c", write_config(folder))
    assert result.exit_code == 0, result.output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()]
    lines = {row[0]: row[1:] for row in cells if row}
    assert lines["disk"][:4] == ["0", "192", "5.25 MiB", "100.0%"]
    assert lines["host"][:4] == ["0", "32", "896.00 KiB", "16.7%"]
    assert lines["device"] == ["0", "48", "1.31 MiB", "25.0%", "cpu"]
    for check in ("pool floor", "arena floor", "host memory", "disk space"):
        assert lines[check][-1] == "ok"


def test_the_machine_readable_plan(folder: Path) -> None:
    result = run(DEMO, "-c", write_config(folder), "--tp", 2, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["ok"] is True
    assert values["refusal"] is None
    assert (values["rows"], values["tp_size"], values["codec"], values["device"]) == (ROWS, 2, "w2", "cpu")
    assert values["row_bytes"] * 2 == 27 * 1024
    assert values["stride"] == 16 * 1024
    assert [one["pool_rows"] for one in values["ranks"]] == [48, 48]
    assert [one["coverage"] for one in values["ranks"]] == [0.25, 0.25]
    assert [one["arena_bytes"] for one in values["ranks"]] == [32 * 16384, 32 * 16384]


def test_the_plan_bounds_the_memory_of_packing_until_the_packs_are_there(folder: Path) -> None:
    path = write_config(folder)
    config = load_config(path)
    with Checkpoint.open(DEMO) as checkpoint:
        how = plan_packing(checkpoint, config, 2, "cpu")
        assert how.peak_bytes == peak_bytes(checkpoint, how.encoder, 2, lanes=how.lanes)
        said = json.loads(run(DEMO, "-c", path, "--tp", "2", "--json").stdout)["packing"]
        assert said["peak_bytes"] > 0
        assert how.line() in run(DEMO, "-c", path, "--tp", "2").stdout or said["device"] != "cpu"
        ensure_packs(checkpoint, config, 2, device="cpu")
    assert json.loads(run(DEMO, "-c", path, "--tp", "2", "--json").stdout)["packing"] is None
    assert "packing on" not in run(DEMO, "-c", path, "--tp", "2").stdout


@pytest.mark.parametrize(
    ("device", "said"), [("gpu", "it can be auto, cpu or cuda:N"), ("cuda:99", "there is no cuda:99")]
)
def test_a_packing_device_that_cannot_be_is_refused(folder: Path, device: str, said: str) -> None:
    config = load_config(write_config(folder))
    with Checkpoint.open(DEMO) as checkpoint, pytest.raises(PackingDeviceError, match=said):
        ensure_packs(checkpoint, config, 1, device=device)
    assert list((folder / "packs").iterdir()) == []


def test_the_model_may_come_from_the_configuration_and_the_command_line_wins(folder: Path) -> None:
    in_config = write_config(folder, model={"path": str(DEMO)})
    assert run("-c", in_config).exit_code == 0
    wrong = write_config(folder, model={"path": str(folder / "nowhere")})
    assert run("-c", wrong).exit_code == 1
    assert run(DEMO, "-c", wrong).exit_code == 0


def test_the_environment_names_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_CONFIG", str(write_config(folder)))
    assert run(DEMO).exit_code == 0
    monkeypatch.delenv("ZIGGURAT_CONFIG")
    result = run(DEMO)
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"device": {"size": STRIDE - 1}},
            "pool floor: needs 1 row (28.00 KiB a row), has 0 rows, short by 1 row",
        ),
        ({"host": {"size": "7 rows"}}, "arena floor: needs 8 rows"),
        ({"disk": {"readers": 33}}, "arena floor: needs 33 rows"),
    ],
)
def test_what_cannot_work_is_one_line_with_the_number_and_the_key(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    path = write_config(folder, **changes)
    for arguments in ((), ("--json",)):
        result = run(DEMO, "-c", path, *arguments)
        assert result.exit_code == 1
        assert isinstance(result.exception, BudgetError)
        assert str(result.exception).startswith(said)
        assert "\n" not in str(result.exception)
        assert "tiers." in str(result.exception)
    values = json.loads(result.stdout)
    assert values["ok"] is False
    assert values["refusal"] == str(result.exception)


def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs on nodes 1 and 0, of a machine with two nodes."""

    def limits(
        config: TiersConfig, packs: list[Path], *, tp_size: int, workspace: int, headers: object
    ) -> MachineLimits:
        return MachineLimits(
            device="cuda:0",
            memory_available=64 << 30,
            device_free=32 << 30,
            device_workspace=workspace,
            nodes=(1, 0)[:tp_size],
            node_available=((0, 32 << 30), (1, 16 << 30)),
            notes=("something about this machine",),
        )

    monkeypatch.setattr("ziggurat.integration.preflight.machine_limits", limits)


def test_on_gpus_the_plan_says_what_is_pinned_and_where(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch)
    result = run(DEMO, "-c", write_config(folder), "--tp", 2)
    assert result.exit_code == 0, result.output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()]
    hosts = [row[-1] for row in cells if row and row[0] == "host"]
    devices = [row[-1] for row in cells if row and row[0] == "device"]
    assert hosts == ["pinned, NUMA node 1", "pinned, NUMA node 0"]
    assert devices == ["cuda:0", "cuda:1"]
    checks = {row[0]: row[1:] for row in cells if row}
    for check in ("memory of NUMA node 0", "memory of NUMA node 1", "device memory"):
        assert checks[check][-1] == "ok"
    assert "note: something about this machine" in result.output
    values = json.loads(run(DEMO, "-c", write_config(folder), "--tp", 2, "--json").stdout)
    assert [(one["pinned_bytes"], one["numa_node"]) for one in values["ranks"]] == [
        (512 << 10, 1),
        (512 << 10, 0),
    ]


def test_a_graphs_batch_raises_the_floor_of_a_gpus_pool_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(folder, device={"size": "15 rows"})
    assert run(DEMO, "-c", path, "--graph-tokens", 4).exit_code == 0  # the host runs the layers of a CPU
    on_gpus(monkeypatch)
    assert run(DEMO, "-c", path).exit_code == 0
    refused = run(DEMO, "-c", path, "--graph-tokens", 4)
    assert refused.exit_code == 1
    assert "pool floor: needs 16 rows" in str(refused.exception)


def test_the_kernels_memory_of_a_gpu_counts_and_depends_on_the_largest_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch)

    def device_memory(*more: object) -> int:
        values = json.loads(run(DEMO, "-c", write_config(folder), "--json", *more).stdout)
        (check,) = [one for one in values["checks"] if one["name"] == "device memory"]
        (rank,) = values["ranks"]
        return int(check["needed"]) - int(rank["pool_bytes"]) - int(rank["ring_bytes"])

    sizes = {tokens: workspace_bytes(ExpertGeometry(256, 128), 32, 4, tokens) for tokens in (64, 8192)}
    assert 0 < sizes[64] < sizes[8192]
    assert device_memory("--max-tokens", 64) == sizes[64]
    assert device_memory() == sizes[8192]


def test_sizes_that_no_kernel_of_a_gpu_can_compute_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(folder, codecs={"base": "bf16"})
    assert run(DEMO, "-c", path, "--tp", 8).exit_code == 0  # 16 of 128 channels: fine for a CPU
    on_gpus(monkeypatch)
    refused = run(DEMO, "-c", path, "--tp", 8)
    assert isinstance(refused.exception, LayerError)
    assert "intermediate size of each rank must be a multiple of 32 on a GPU, not 16" in str(
        refused.exception
    )


def test_a_list_of_pool_sizes_is_one_per_rank(folder: Path) -> None:
    path = write_config(folder, device={"size": ["40 rows", "5 rows"]})
    result = run(DEMO, "-c", path, "--tp", 2, "--json")
    assert [one["pool_rows"] for one in json.loads(result.stdout)["ranks"]] == [40, 5]
    refused = run(DEMO, "-c", path)
    assert refused.exit_code == 1
    assert "lists 2 sizes for 1 tensor-parallel ranks" in str(refused.exception)


@pytest.mark.parametrize("tp", [3, 64])
def test_a_tensor_parallel_size_the_experts_do_not_allow(folder: Path, tp: int) -> None:
    result = run(DEMO, "-c", write_config(folder), "--tp", tp)
    assert result.exit_code == 1
    assert result.exception is not None
    assert "\n" not in str(result.exception)
    assert str(tp) in str(result.exception) or "multiple" in str(result.exception)


def test_a_device_that_is_not_here_is_refused(folder: Path) -> None:
    result = run(DEMO, "-c", write_config(folder, device={"device": "cuda:99"}))
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)
    assert "tiers.device.device: there is no cuda:99 that torch and vLLM can use" in str(result.exception)


def test_a_pack_folder_that_is_a_file_is_refused(folder: Path) -> None:
    (folder / "file").write_bytes(b"")
    result = run(DEMO, "-c", write_config(folder, disk={"path": "file"}))
    assert result.exit_code == 1
    assert str(result.exception).startswith("tiers.disk.path: ")


def test_a_built_pack_needs_no_more_space_and_a_part_of_one_less(folder: Path) -> None:
    path = write_config(folder)
    config = load_config(path)

    def needed() -> int:
        values = json.loads(run(DEMO, "-c", path, "--json").stdout)
        (check,) = [one for one in values["checks"] if one["name"] == "disk space"]
        return int(check["needed"])

    whole = needed()
    with Checkpoint.open(DEMO) as checkpoint:
        (pack,) = pack_paths(checkpoint, config, 1)
        (header,) = wanted_headers(checkpoint, config, 1)
    assert ROWS * STRIDE < file_bytes(header) <= whole < file_bytes(header) + (128 << 10)
    unfinished = pack.with_name(pack.name + ".building")
    unfinished.write_bytes(bytes(1 << 20))
    assert needed() == whole - unfinished.stat().st_blocks * 512
    unfinished.rename(pack)
    assert needed() == 0


def test_planning_leaves_nothing_behind(folder: Path) -> None:
    path = write_config(folder, disk={"path": "not/yet/made"})
    before = sorted(folder.rglob("*"))
    assert run(DEMO, "-c", path).exit_code == 0
    assert run(DEMO, "-c", path, "--json").exit_code == 0
    assert sorted(folder.rglob("*")) == before


def test_the_command_prints_one_line_and_exits_with_1(folder: Path) -> None:
    for text, said in (
        (
            '{"tiers": {"disk": {"path": "p"}, "hots": {}}}',
            'unknown key "tiers.hots"; did you mean "tiers.host"?',
        ),
        ('{"tiers": {"disk": {"path": "p"}, "device": {"size": 1}}}', "pool floor: needs 1 row"),
    ):
        path = folder / "tiers.yaml"
        path.write_text(text)
        command = [sys.executable, "-m", "ziggurat.integration.cli.main", "plan", str(DEMO), "-c", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 1
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_on_gpus_the_plan_names_staging_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch)
    path = write_config(folder, device={"size": "25%", "staging": "16 rows"})
    result = run(DEMO, "-c", path)
    assert result.exit_code == 0, result.output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()]
    lines = {row[0]: row[1:] for row in cells if row}
    assert lines["staging"] == ["0", "16", "448.00 KiB", "8.3%", "cuda:0, in 4 parts"]
    assert lines["staging floor"][-1] == "ok"


def test_the_plan_says_how_many_tokens_a_chunk_should_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch)
    path = write_config(folder)
    rates = ("--link", 50, "--compute", "0.01")
    lines = run(DEMO, "-c", path, *rates).output.splitlines()
    (line,) = [one for one in lines if one.startswith("prompts: ")]
    assert line.startswith("prompts: --max-num-batched-tokens 256: ")
    prompts = json.loads(run(DEMO, "-c", path, *rates, "--json").stdout)["prompts"]
    assert prompts["tokens"] == 256
    assert prompts["stream_ms"] == pytest.approx(24 * STRIDE / 50e9 * 1e3)
    whole = write_config(folder, device={"size": "100%"})
    assert json.loads(run(DEMO, "-c", whole, *rates, "--json").stdout)["prompts"] is None
    assert json.loads(run(DEMO, "-c", path, "--json").stdout)["prompts"] is None


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        (("--compute", 50), "--link is missing"),
        (("--link", 0, "--compute", 1), "--link: a rate is a number greater than 0, not 0.0"),
        (("--link", 1, "--compute", "nan"), "--compute: a rate is a number greater than 0, not nan"),
        (("--link", "inf", "--compute", 1), "--link: a rate is a number greater than 0, not inf"),
        (("--step-ms", 0), "--step-ms: a time is a number greater than 0, not 0.0"),
    ],
)
def test_rates_that_cannot_be_are_refused(folder: Path, rates: tuple[object, ...], said: str) -> None:
    result = run(DEMO, "-c", write_config(folder), *rates)
    assert isinstance(result.exception, CliError)
    assert said in str(result.exception)


TRACE = DEMO.parents[1] / "traces" / "demo_moe.npz"


def decode_of(path: Path, *options: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(DEMO, "-c", path, *options, "--json").stdout)["decode"]
    return found


def test_the_plan_predicts_a_decode_step_from_a_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch)
    path = write_config(folder, device={"size": "50%"})
    rates = ("--link", 50, "--step-ms", 2)
    found = decode_of(path, "--trace", TRACE, *rates)
    assert found["tokens"] == 1
    assert found["fetch_ms"] == pytest.approx(found["missed_rows"] * STRIDE / (50e9 * GATHER_SHARE) * 1e3)
    assert found["step_ms"] == pytest.approx(2 + found["fetch_ms"])
    assert 0.1 < found["missed_share"] < 0.25
    smaller = decode_of(write_config(folder, device={"size": "25%"}), "--trace", TRACE, *rates)
    assert smaller["missed_share"] > found["missed_share"]
    several = decode_of(path, "--trace", TRACE, "--decode-tokens", 8, *rates)
    assert several["missed_rows"] > 2 * found["missed_rows"]
    lines = run(DEMO, "-c", path, "--trace", TRACE, *rates).output.splitlines()
    assert any(line.startswith("decode of 1 token: ") and line.endswith("ms a step") for line in lines)


def test_the_plan_predicts_from_heat_where_there_is_no_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch)
    path = write_config(folder, device={"size": "50%"})
    nothing = decode_of(path, "--link", 50)
    assert nothing["missed_rows"] is None
    assert "there is no heat file" in nothing["notes"][0]
    with Checkpoint.open(DEMO) as checkpoint:
        h = wanted_headers(checkpoint, load_config(path), 1)[0]
    heat = HeatMap(h.layers, h.experts)
    heat.counts[:, :16] = 3.0
    heat.counts[:, 16:] = 1.0
    key = HeatKey(h.identity, h.codec, h.codec_version, h.layers, h.experts, h.hidden, h.intermediate)
    assert save_heat(folder / "packs" / key.filename(0, 1), key, heat).done
    found = decode_of(path, "--link", 50)
    assert found["missed_share"] == pytest.approx(0.25)
    assert found["missed_rows"] == pytest.approx(6.0)
    assert found["step_ms"] is None


def test_a_trace_of_another_model_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch)
    np.savez(folder / "other.npz", ids=np.zeros((2, 8, 5, 4), dtype=np.uint8))
    result = run(DEMO, "-c", write_config(folder), "--trace", folder / "other.npz")
    assert isinstance(result.exception, PredictionError)
    assert "routes 5 layers to 4 of 1 experts; this model has 6 layers, top-4 of 32" in str(result.exception)


def test_rates_of_this_gpu_are_taken_from_result_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch)
    path = write_config(folder, device={"size": "50%"})
    results = folder / "results"
    (results / "card").mkdir(parents=True)
    monkeypatch.setattr(estimates, "gpus", lambda: SimpleNamespace(gpus=(SimpleNamespace(name="A card"),)))
    measured = {"machine": {"gpu": "A card"}, "transfers": {"peak_gb_per_s": 40.0}}
    (results / "card" / "transfers.json").write_text(json.dumps(measured))
    sizes = {"layers": 6, "experts": 32, "top_k": 4, "hidden": 256, "intermediate": 128, "codec": "w2"}
    cases = [{"tokens": 1, "resident_ms": {"mean": 0.5}}]
    (results / "card" / "inline.json").write_text(json.dumps({**sizes, "cases": cases}))
    with Checkpoint.open(DEMO) as checkpoint:
        config = load_config(path)
        plan_ = plan_for(checkpoint, config, 1)
        one = estimates.estimate(checkpoint, config, plan_, Given(trace=TRACE), results)
        two = estimates.estimate(checkpoint, config, plan_, Given(tokens=2, trace=TRACE), results)
        other = estimates.estimate(checkpoint, config, plan_, Given(trace=TRACE), folder)
    assert one is not None
    assert one.step is not None
    assert (one.step.link_gb_per_s, one.step.resident_ms) == (40.0, 0.5)
    assert "card/transfers.json" in one.notes[1]
    assert two is not None
    assert two.step is not None
    assert two.step.resident_ms is None
    assert other is not None
    assert other.step is None
    assert "--link" in other.notes[-1]
