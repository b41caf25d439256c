"""Every refusal a user can meet: one clear line, status 1, and files as they were."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from support.checkpoints import SizeArgs, write_checkpoint
from ziggurat.integration.cli import main as cli

Run = Callable[..., tuple[int, str]]
SIZES: SizeArgs = {"layers": 2, "experts": 4, "hidden": 64, "intermediate": 64}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: status and standard error's last line."""

    def command(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["ziggurat", *map(str, arguments)])
        try:
            cli.main()
            status: object = 0
        except SystemExit as end:
            status = end.code or 0
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ziggurat:")]
        assert isinstance(status, int)
        assert len(lines) == (1 if status else 0), lines
        return status, lines[0] if lines else ""

    return command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_checkpoint(folder, kind="qwen3", **SIZES)
    return folder


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    folder = tmp_path / "packs"
    folder.mkdir()
    return folder


def tiers_file(
    folder: Path, packs: Path, *, codec: str = "bf16", pool: str = "25%", arena: str = "25%"
) -> Path:
    path = folder / f"tiers-{len(list(folder.glob('tiers-*')))}.yaml"
    values = {
        "tiers": {
            "disk": {"path": str(packs), "readers": 2},
            "host": {"size": arena},
            "device": {"size": pool, "device": "cpu"},
        },
        "codecs": {"base": codec},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def state(folder: Path) -> dict[str, str]:
    """Names and content of a folder's files, without locks that a builder took and gave back."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def build(run: Run, model: Path, config: Path, packs: Path, *more: object) -> Path:
    assert run("pack", model, "-c", config, *more)[0] == 0
    return sorted(packs.glob("*.safetensors"))[0]


def test_pack_verify_dump(run: Run, model: Path, packs: Path, tmp_path: Path) -> None:
    pack = build(run, model, tiers_file(tmp_path, packs), packs)
    assert run("verify", pack) == (0, "")
    assert run("dump", pack, "--layer", 1, "--expert", 3, "-o", tmp_path / "e.npz")[0] == 0
    weights = load_file(model / "model.safetensors")
    with np.load(tmp_path / "e.npz") as dumped:
        for name, key in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            stored = weights[f"model.layers.1.mlp.experts.3.{key}.weight"].float().numpy()
            assert dumped[name].dtype == np.float32
            assert np.array_equal(dumped[name], stored)


@pytest.mark.parametrize("what", ["layer", "expert", "folder"])
def test_dump_of_what_is_not_there(run: Run, model: Path, packs: Path, tmp_path: Path, what: str) -> None:
    pack = build(run, model, tiers_file(tmp_path, packs), packs)
    layer, expert = (7 if what == "layer" else 0), (9 if what == "expert" else 0)
    output = tmp_path / ("absent/e.npz" if what == "folder" else "e.npz")
    status, line = run("dump", pack, "--layer", layer, "--expert", expert, "-o", output)
    assert status == 1
    assert {"layer": "no layer 7", "expert": "no expert 9", "folder": "cannot write"}[what] in line
    assert not list(tmp_path.glob("*.npz*"))


def test_truncated_pack(run: Run, model: Path, packs: Path, tmp_path: Path) -> None:
    config = tiers_file(tmp_path, packs)
    pack = build(run, model, config, packs)
    os.truncate(pack, pack.stat().st_size - 5000)
    before = state(packs)
    for command in (("verify", pack), ("serve", model, "-c", config), ("pack", model, "-c", config)):
        status, line = run(*command)
        assert status == 1
        assert pack.name in line
        assert "5000 fewer" in line
    assert state(packs) == before


def test_one_flipped_bit(
    run: Run, model: Path, packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = build(run, model, tiers_file(tmp_path, packs), packs)
    data = bytearray(pack.read_bytes())
    stride = 3 * 64 * 64 * 2
    data[4096 + 5 * stride + 100] ^= 8  # row 5 is expert 1 of the second layer
    pack.write_bytes(data)
    before = state(packs)
    status, line = run("verify", pack)
    assert status == 1
    assert "1 of 8 rows are bad" in line
    status, line = run("dump", pack, "--layer", 1, "--expert", 1, "-o", tmp_path / "e.npz")
    assert status == 1
    assert "layer 1 expert 1" in line
    assert state(packs) == before


def test_verify_names_the_bad_row(run: Run, model: Path, packs: Path, tmp_path: Path) -> None:
    pack = build(run, model, tiers_file(tmp_path, packs), packs)
    data = bytearray(pack.read_bytes())
    data[4096 + 1] ^= 1
    pack.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-m", "ziggurat.integration.cli.main", "verify", str(pack)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "bad row: layer 0 expert 0" in done.stdout


def test_verify_mends_from_the_checkpoint(run: Run, model: Path, packs: Path, tmp_path: Path) -> None:
    first = build(run, model, tiers_file(tmp_path, packs), packs, "--tp", 2)
    second = sorted(packs.glob("*.safetensors"))[1]
    sound = state(packs)
    for pack, at in ((first, 4096 + 1), (second, second.stat().st_size - 8)):  # a row, and a row's checksum
        data = bytearray(pack.read_bytes())
        data[at] ^= 1
        pack.write_bytes(data)
    damaged = state(packs)

    status, line = run("verify", first, second)
    assert status == 1
    assert "1 of 8 rows are bad" in line
    assert "1 more packs are bad" in line

    other = tmp_path / "other"
    write_checkpoint(other, kind="qwen3", seed=1, **SIZES)
    status, line = run("verify", first, "--rebuild", other)
    assert status == 1
    assert "is of another checkpoint than" in line
    assert state(packs) == damaged

    os.truncate(second, second.stat().st_size - 1)
    status, line = run("verify", first, second, "--rebuild", model)  # the first one is mended all the same
    assert status == 1
    assert second.name in line
    assert "1 fewer" in line
    assert state(packs)[first.name] == sound[first.name]

    with second.open("ab") as file:
        file.write(bytes([data[-1]]))
    assert run("verify", first, second, "--rebuild", model) == (0, "")
    assert state(packs) == sound


def test_verify_does_not_mend_what_it_cannot_prove(
    run: Run, model: Path, packs: Path, tmp_path: Path
) -> None:
    pack = build(run, model, tiers_file(tmp_path, packs), packs)
    data = bytearray(pack.read_bytes())
    data[4096 + 1] ^= 1
    data[-8 * 8] ^= 1  # the same row's checksum
    pack.write_bytes(data)
    damaged = state(packs)
    status, line = run("verify", pack, "--rebuild", model)
    assert status == 1
    assert "1 of 8 rows are bad; see above why" in line
    assert state(packs) == damaged


@pytest.mark.parametrize("rebuild", [False, True])
def test_verify_can_be_interrupted(run: Run, model: Path, packs: Path, tmp_path: Path, rebuild: bool) -> None:
    """Ctrl-C while rows are read: status 130 and nothing but whole rows written."""
    pack = build(run, model, tiers_file(tmp_path, packs), packs)
    before = state(packs)
    script = (
        "import os, signal, sys\n"
        "from ziggurat.integration.cli.main import main\n"
        "from ziggurat.integration.cli.progress import RowProgress\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores it\n"
        "real = RowProgress.advance\n"
        "def advance(self, rows, nbytes):\n"
        "    real(self, rows, nbytes)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "RowProgress.advance = advance\n"
        "main()\n"
    )
    more = ["--rebuild", str(model)] if rebuild else []
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(pack), *more],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "rows are good" not in done.stdout
    assert state(packs) == before


def test_pack_of_another_model_with_the_same_geometry(
    run: Run, model: Path, packs: Path, tmp_path: Path
) -> None:
    config = tiers_file(tmp_path, packs)
    pack = build(run, model, config, packs)
    other = tmp_path / "other"
    write_checkpoint(other, kind="qwen3", seed=1, **SIZES)
    theirs = build(run, other, tiers_file(tmp_path, tmp_path / "theirs"), tmp_path / "theirs")
    assert theirs.name != pack.name
    theirs.replace(pack)  # whoever renames a pack to make it fit
    before = state(packs)
    status, line = run("serve", model, "-c", config)
    assert status == 1
    assert "identity" in line
    assert "another checkpoint" in line
    assert state(packs) == before


def test_pack_of_another_tensor_parallel_size(run: Run, model: Path, packs: Path, tmp_path: Path) -> None:
    config = tiers_file(tmp_path, packs)
    pack = build(run, model, config, packs)
    pack.replace(packs / pack.name.replace("tp0of1", "tp0of2"))
    status, line = run("serve", model, "-c", config, "--", "--tensor-parallel-size", "2")
    assert status == 1
    assert "tp_size is 1, but 2 is needed" in line


def test_unknown_key(run: Run, model: Path, packs: Path, tmp_path: Path) -> None:
    config = tiers_file(tmp_path, packs)
    config.write_text(config.read_text(encoding="utf-8").replace("host:", "hots:"), encoding="utf-8")
    for command in ("plan", "pack", "serve", "replay"):
        status, line = run(command, model, "-c", config)
        assert status == 1
        assert '"tiers.hots"; did you mean "tiers.host"?' in line


@pytest.mark.parametrize(
    ("changes", "key"), [({"pool": "0 rows"}, "tiers.device.size"), ({"arena": "900 TiB"}, "tiers.host.size")]
)
def test_a_budget_that_cannot_work(
    run: Run, model: Path, packs: Path, tmp_path: Path, changes: dict[str, str], key: str
) -> None:
    config = tiers_file(tmp_path, packs, **changes)
    for command in ("plan", "serve"):
        status, line = run(command, model, "-c", config)
        assert status == 1
        assert key in line
        assert "short by" in line
    assert not state(packs)


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def test_missing_expert_tensor(run: Run, model: Path, packs: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    rewrite(model, lambda weights: weights.pop(name))
    status, line = run("pack", model, "-c", tiers_file(tmp_path, packs))
    assert status == 1
    assert name in line
    assert not state(packs)


def test_nan_scale(run: Run, packs: Path, tmp_path: Path) -> None:
    model = tmp_path / "fp8"
    write_checkpoint(model, kind="qwen3", format="fp8_block", block=(32, 32), **SIZES)
    name = "model.layers.1.mlp.experts.2.down_proj.weight_scale_inv"

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights[name][0, 1] = float("nan")

    rewrite(model, spoil)
    for codec in ("w2", "fp4", "bf16"):
        status, line = run("pack", model, "-c", tiers_file(tmp_path, packs, codec=codec))
        assert status == 1
        assert "model.layers.1.mlp.experts.2.down_proj" in line
        assert not state(packs)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"tmpfs{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("mounting a tmpfs is not allowed here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_read_only_pack_folder(run: Run, model: Path, tmp_path: Path, tmpfs: Callable[[str], Path]) -> None:
    folder = tmpfs("ro")
    for command in ("pack", "serve"):
        status, line = run(command, model, "-c", tiers_file(tmp_path, folder))
        assert status == 1
        assert f"{folder} is not writable" in line


def test_full_disk(run: Run, model: Path, tmp_path: Path, tmpfs: Callable[[str], Path]) -> None:
    folder = tmpfs("size=64k")
    status, line = run("pack", model, "-c", tiers_file(tmp_path, folder))
    assert status == 1
    assert "disk space" in line
    assert "short by" in line
    assert not state(folder)


def test_wrong_use_of_serve(run: Run, model: Path, packs: Path, tmp_path: Path) -> None:
    config = tiers_file(tmp_path, packs)
    wrong = {
        "--load-format": ["--load-format", "auto"],
        "needs a positive number": ["-tp", "two"],
        "not JSON": ["--additional-config", "{"],
        "already has": ["--additional-config", '{"ziggurat": {}}'],
    }
    for text, arguments in wrong.items():
        status, line = run("serve", model, "-c", config, "--", *arguments)
        assert status == 1
        assert text in line
    assert not state(packs)


def test_a_hidden_plugin_is_refused(
    run: Run, model: Path, packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    status, line = run("serve", model, "-c", tiers_file(tmp_path, packs))
    assert status == 1
    assert "VLLM_PLUGINS" in line
