"""`ziggurat export` and `import` as a user runs them, and every other command on a folder without experts."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from support.checkpoints import SizeArgs, write_checkpoint
from support.packfiles import cut, flip, unfinished
from ziggurat.integration.cli import main as cli
from ziggurat.integration.cli.doctor import examine
from ziggurat.integration.packing import ensure_packs, require_packs
from ziggurat.integration.portable import CONFIG_NAME, own_config
from ziggurat.integration.preflight import preflight
from ziggurat.residency.config import TiersConfig, load_config
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import PackIncompleteError, PackMissingError
from ziggurat.stores.manifest import MANIFEST_FILE

SIZES: SizeArgs = {"layers": 2, "experts": 4, "hidden": 64, "intermediate": 64, "vocab": 64}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: status, standard output, and the line on standard error that says why."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ziggurat", *map(str, arguments)])
        try:
            cli.main()
            status: object = 0
        except SystemExit as end:
            status = end.code or 0
        written = capsys.readouterr()
        lines = [line for line in written.err.splitlines() if line.startswith("ziggurat:")]
        assert isinstance(status, int)
        assert len(lines) == (1 if status else 0), lines
        return status, written.out, lines[0] if lines else ""

    return command


def tiers_file(folder: Path, *, codec: str = "bf16", **sections: object) -> Path:
    """A configuration of a machine whose packs lie beside it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"tiers-{codec}.yaml"
    values = {
        "tiers": {
            "disk": {"path": "packs", "readers": 2},
            "host": {"size": "25%"},
            "device": {"size": "25%", "device": "cpu"},
        },
        "codecs": {"base": codec},
        **sections,
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", shards=2, **SIZES)
    return tmp_path / "model"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tiers_file(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tiers_file(tmp_path / "there")


@pytest.fixture
def exported(run: Run, model: Path, here: Path, tmp_path: Path) -> Path:
    assert run("export", model, "-c", here, "--to", tmp_path / "exported")[0] == 0
    return tmp_path / "exported"


def identity_of(model: Path) -> str:
    with Checkpoint.open(model) as checkpoint:
        return checkpoint.identity


def packs_of(config: Path) -> list[Path]:
    return sorted((config.parent / "packs").glob("*.safetensors"))


def test_there_and_back(run: Run, model: Path, here: Path, there: Path, exported: Path) -> None:
    shutil.rmtree(model)
    status, out, _ = run("import", exported, "-c", there)
    assert status == 0
    assert "every row is good" in out
    assert [path.read_bytes() for path in packs_of(there)] == [path.read_bytes() for path in packs_of(here)]
    assert [path.name for path in packs_of(there)] == [path.name for path in packs_of(here)]
    for command in ("plan", "pack"):
        assert run(command, exported, "-c", there)[0] == 0
    preflight(exported, load_config(there), 1)
    status, out, _ = run("import", exported, "-c", there)
    assert status == 0
    assert "was there already" in out


def test_the_folder_serves_from_itself(run: Run, model: Path, here: Path, exported: Path) -> None:
    shutil.rmtree(model)
    shutil.rmtree(here.parent)
    config = exported / CONFIG_NAME
    tiers = load_config(config)
    assert tiers.model.path == exported
    assert tiers.tiers.disk.path == exported / "packs"
    assert (tiers.tiers.disk.readers, tiers.codecs.base) == (2, "bf16")
    preflight(exported, tiers, 1)
    status, out, _ = run("plan", "-c", config, "--json")
    assert status == 0
    assert json.loads(out)["ok"]
    status, out, _ = run("verify", exported)
    assert status == 0
    assert "files are as they were exported" in out
    assert "all 8 rows are good" in out
    # Importing it into itself checks it.
    assert "was there already" in run("import", exported, "-c", config)[1]


def test_serving_it_needs_no_model_on_the_command_line(
    run: Run, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then vLLM's first argument stands where MODEL would."""
    started: list[str] = []

    def execv(path: str, arguments: list[str]) -> None:
        started.extend(arguments)
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", execv)
    given = ["--enforce-eager", "--served-model-name", "a//b"]
    assert run("serve", "-c", exported / CONFIG_NAME, "--", *given)[0] == 0
    assert started[-3:] == given
    assert started[started.index("serve") + 1] == str(exported)
    assert run("serve", exported, "-c", exported / CONFIG_NAME, "--", "--served-model-name=a//b")[0] == 0
    assert started[-1] == "--served-model-name=a//b"
    assert run("serve", "-c", exported / CONFIG_NAME, "--", "--served-model-name=a//b")[0] == 0
    assert started[-1] == "--served-model-name=a//b"


def test_all_ranks_go_along(run: Run, model: Path, here: Path, there: Path, tmp_path: Path) -> None:
    for tp in (1, 2):
        assert run("export", model, "-c", here, "--to", tmp_path / "out", "--tp", tp)[0] == 0
    assert run("import", tmp_path / "out", "-c", there, "--tp", 2)[0] == 0
    assert len(packs_of(there)) == 2
    status, _, line = run("import", tmp_path / "out", "-c", there, "--tp", 4)
    assert status == 1
    assert "holds packs of tensor-parallel size 1, 2, not 4" in line
    assert run("import", tmp_path / "out", "-c", there)[0] == 0
    assert len(packs_of(there)) == 3
    next((tmp_path / "out" / "packs").glob("*.tp1of2.*")).unlink()
    status, _, line = run("import", tmp_path / "out", "-c", there)
    assert status == 1
    assert "rank 1 of 2 is not there" in line


def test_packs_alone(run: Run, model: Path, here: Path, there: Path, tmp_path: Path) -> None:
    out = tmp_path / "packs-only"
    assert run("export", model, "-c", here, "--to", out, "--packs-only")[0] == 0
    assert [path.name for path in out.iterdir()] == [path.name for path in packs_of(here)]
    status, _, line = run("import", out, "-c", there)
    assert status == 1
    assert "no model" in line
    assert run("import", out, model, "-c", there)[0] == 0
    shutil.rmtree(there.parent / "packs")
    assert run("import", next(out.iterdir()), model, "-c", there)[0] == 0
    assert len(packs_of(there)) == 1
    status, _, line = run("export", model, "-c", here, "--to", model, "--packs-only")
    assert status == 1
    assert "is a model's folder" in line


def test_foreign_packs_are_refused_with_both_identities(
    run: Run, model: Path, there: Path, exported: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, seed=1, **SIZES)
    status, _, line = run("import", exported, other, "-c", there)
    assert status == 1
    assert f"identity is {identity_of(model)}, but {identity_of(other)} is needed" in line
    assert not (there.parent / "packs").exists()
    # Renamed to fit, it is still another checkpoint's.
    (pack,) = (exported / "packs").iterdir()
    forged = pack.rename(pack.with_name(pack.name.replace(identity_of(model)[:20], identity_of(other)[:20])))
    assert run("import", exported, other, "-c", there)[0] == 1
    assert run("import", forged, other, "-c", there)[0] == 1
    assert not (there.parent / "packs").exists()


def test_a_folder_of_packs_of_several_models(
    run: Run, model: Path, here: Path, there: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, seed=1, **SIZES)
    for one in (model, other):
        assert run("pack", one, "-c", here)[0] == 0
    status, out, _ = run("import", here.parent / "packs", model, "-c", there)
    assert status == 0
    assert "left alone" in out
    assert identity_of(other) in out
    (pack,) = packs_of(there)
    assert identity_of(model)[:20] in pack.name


def test_another_codec(run: Run, exported: Path, tmp_path: Path) -> None:
    status, _, line = run("import", exported, "-c", tiers_file(tmp_path / "there", codec="w2"))
    assert status == 1
    assert "holds packs in bf16, but codecs.base is w2" in line


def test_a_damaged_row_is_named(run: Run, there: Path, exported: Path) -> None:
    (pack,) = (exported / "packs").iterdir()
    stride = 3 * 64 * 64 * 2
    flip(pack, 4096 + 6 * stride + 5)
    status, _, line = run("import", exported, "-c", there)
    assert status == 1
    assert f"layer 1 expert 2 of {pack}" in line
    assert not (there.parent / "packs").exists()
    status, out, line = run("verify", exported)
    assert status == 1
    assert "bad row: layer 1 expert 2" in out
    assert "`ziggurat import`" in line


def test_a_damaged_pack_that_is_there_already(run: Run, there: Path, exported: Path) -> None:
    assert run("import", exported, "-c", there)[0] == 0
    (pack,) = packs_of(there)
    flip(pack, 5000)
    status, _, line = run("import", exported, "-c", there)
    assert status == 1
    assert f"{pack}: is there already, and 1 of its 8 rows are bad (layer 0 expert 0" in line
    cut(pack)
    assert run("import", exported, "-c", there)[0] == 1
    pack.unlink()
    assert run("import", exported, "-c", there)[0] == 0


@pytest.mark.parametrize("what", ["nothing", "no pack", "unfinished"])
def test_what_cannot_be_imported(run: Run, exported: Path, there: Path, tmp_path: Path, what: str) -> None:
    source = tmp_path / "source"
    if what != "nothing":
        source.mkdir()
    if what == "unfinished":
        (pack,) = (exported / "packs").iterdir()
        unfinished(Path(shutil.copy(pack, source)))
    status, _, line = run("import", source, exported, "-c", there)
    assert status == 1
    said = {"nothing": "no such folder", "no pack": "no pack in it", "unfinished": "was not finished"}
    assert said[what] in line


def test_a_folder_without_experts_and_without_packs(
    run: Run, model: Path, there: Path, exported: Path
) -> None:
    """Every command says what is missing and what brings it, and leaves no folder."""
    tiers = load_config(there)
    for command in ("pack", "serve", "replay"):
        status, _, line = run(command, exported, "-c", there)
        assert status == 1
        assert "there is no such pack" in line
        assert f"{exported} holds no expert tensors" in line
        assert "`ziggurat import" in line
    status, out, line = run("plan", exported, "-c", there, "--json")
    assert status == 1
    assert not json.loads(out)["ok"]
    assert "1 of 1 are not in" in line
    assert "`ziggurat import" in line
    with Checkpoint.open(exported) as checkpoint:
        with pytest.raises(PackMissingError):
            ensure_packs(checkpoint, tiers, 1)
        with pytest.raises(PackMissingError):
            require_packs(checkpoint, tiers, 2)
    with pytest.raises(PackMissingError):
        preflight(exported, tiers, 1)
    assert run("export", exported, "-c", there, "--to", exported.with_name("again"))[0] == 1
    assert not (there.parent / "packs").exists()
    assert not exported.with_name("again").exists()


def test_an_import_that_was_not_finished(run: Run, there: Path, exported: Path) -> None:
    assert run("import", exported, "-c", there)[0] == 0
    unfinished(packs_of(there)[0])
    with pytest.raises(PackIncompleteError, match="`ziggurat import"):
        preflight(exported, load_config(there), 1)
    assert run("import", exported, "-c", there)[0] == 0
    preflight(exported, load_config(there), 1)


def test_an_export_from_an_export(run: Run, exported: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert run("export", "-c", exported / CONFIG_NAME, "--to", again)[0] == 0
    assert run("verify", again)[0] == 0
    assert identity_of(again) == identity_of(exported)


def test_an_export_that_was_changed(run: Run, exported: Path, tmp_path: Path) -> None:
    (exported / CONFIG_NAME).write_text("# mine\n" + (exported / CONFIG_NAME).read_text())
    status, out, line = run("verify", exported)
    assert status == 1
    assert f"changed since it was exported: {CONFIG_NAME}" in out
    assert "1 of 5 files" in line
    shard = next(exported.glob("*.safetensors"))
    flip(shard, shard.stat().st_size - 1)
    for command in ("plan", "serve", "import"):
        arguments = (exported,) if command == "import" else ()
        status, _, line = run(command, *arguments, "-c", exported / CONFIG_NAME)
        assert status == 1
        assert "is not the file that was exported" in line


def test_export_into_a_folder_of_somebody_else(
    run: Run, model: Path, here: Path, exported: Path, tmp_path: Path
) -> None:
    """It is refused before packs are built."""
    other = tmp_path / "other"
    write_checkpoint(other, seed=1, **SIZES)
    before = packs_of(here)
    for target, said in ((exported, "holds an export of checkpoint"), (model, "no export wrote it")):
        status, _, line = run("export", other, "-c", here, "--to", target)
        assert status == 1
        assert said in line
    assert packs_of(here) == before


def test_doctor(run: Run, exported: Path, there: Path) -> None:
    found = {one.name: one for one in examine(exported / CONFIG_NAME)}
    assert found["model"].value == f"{exported}, without experts"
    assert found["packs of the model"].value == "for tensor-parallel size 1"
    lacking = tiers_file(there.parent, model={"path": str(exported)})
    found = {one.name: one for one in examine(lacking)}
    assert found["packs of the model"].status == "fail"
    assert "`ziggurat import" in found["packs of the model"].advice
    (exported / MANIFEST_FILE).write_bytes(b"{}")
    found = {one.name: one for one in examine(lacking)}
    assert found["model"].status == "fail"
    assert MANIFEST_FILE in found["model"].value


def test_the_configuration_of_an_export() -> None:
    config = TiersConfig.from_mapping(
        {
            "model": {"path": "/models/m"},
            "tiers": {
                "disk": {"path": "/nvme/packs", "faults": "/x.json"},
                "device": {"size": ["2GiB", "3GiB"]},
            },
            "heat": {"path": "/var/heat", "warm_start": False},
        }
    )
    text = own_config(config)
    assert yaml.safe_load(text) == {
        "model": {"path": "."},
        "tiers": {"disk": {"path": "packs"}, "device": {"size": ["2GiB", "3GiB"]}},
        "heat": {"warm_start": False},
    }
    off = TiersConfig.from_mapping({"tiers": {"disk": {"path": "p"}}, "heat": {"path": None}})
    assert yaml.safe_load(own_config(off))["heat"] == {"path": None}
