"""Folders without experts: how they are written, and that no changed or foreign one passes for what was exported."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from support.building import snapshot
from support.checkpoints import Format, Kind, Layout, SizeArgs, write_checkpoint
from support.kill_everywhere import run_script
from support.packfiles import flip, row_start
from support.verbatim import VerbatimEncoder
from ziggurat.stores import identity
from ziggurat.stores.builder import build_pack, expected_header
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import (
    CheckpointError,
    DiskFullError,
    ExpertsAbsentError,
    ExportError,
    ManifestError,
    RowReadError,
)
from ziggurat.stores.exporting import changed_files, export_checkpoint
from ziggurat.stores.headers import read_header
from ziggurat.stores.manifest import (
    MANIFEST_FILE,
    UNFINISHED_MANIFEST,
    FileFacts,
    manifest_bytes,
    read_manifest,
)
from ziggurat.stores.pack import Pack
from ziggurat.stores.rebuild import CheckpointRows
from ziggurat.stores.shards import INDEX_FILE, SINGLE_FILE
from ziggurat.stores.stripping import StrippedShard, write_stripped

SIZES: SizeArgs = {"layers": 3, "experts": 3, "top_k": 2, "hidden": 96, "intermediate": 64, "vocab": 32}


WITH_MTP: SizeArgs = {**SIZES, "mtp_layers": 1}
SHARDS = 12
FIRST, LAST = "model-00001-of-00012.safetensors", "model-00012-of-00012.safetensors"


def export(model: Path, folder: Path, *packs: Path) -> None:
    opened = [Pack.open(path, verify="always") for path in packs]
    with Checkpoint.open(model) as checkpoint:
        export_checkpoint(checkpoint, opened, folder)
    for pack in opened:
        pack.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """In so many files that some hold nothing but experts, some a part, and some none."""
    write_checkpoint(tmp_path / "model", shards=SHARDS, **SIZES)
    for name in ("tokenizer.json", "pytorch_model.bin", ".hidden", "consolidated.safetensors"):
        (tmp_path / "model" / name).write_text(name)
    (tmp_path / "model" / "original").mkdir()
    return tmp_path / "model"


@pytest.fixture
def exported(model: Path, tmp_path: Path) -> Path:
    export(model, tmp_path / "exported")
    return tmp_path / "exported"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != "consolidated.safetensors":
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


CASES = [
    *((kind, "bf16", "per-expert") for kind in get_args(Kind)),
    *(("qwen3", form, "per-expert") for form in get_args(Format)),
    *(("qwen3", "fp8_block", layout) for layout in get_args(Layout)[:2]),
]


@pytest.mark.parametrize(("kind", "form", "layout"), CASES)
@pytest.mark.parametrize("shards", [1, 3])
def test_everything_but_the_experts_is_there(
    tmp_path: Path, kind: Kind, form: Format, layout: Layout, shards: int
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    write_checkpoint(model, kind, form, layout, shards=shards, block=(32, 32), **WITH_MTP)
    export(model, out)
    with Checkpoint.open(model) as whole, Checkpoint.open(out) as stripped:
        assert whole.has_experts
        assert not stripped.has_experts
        left = {name: t for name, t in tensors(model).items() if name not in whole.expert_tensor_names}
        found = tensors(out)
        assert found.keys() == left.keys()
        assert all(same(found[name], tensor) for name, tensor in left.items())
        for name in (
            "identity",
            "architecture",
            "layer_ids",
            "experts",
            "hidden",
            "intermediate",
            "top_k",
            "format",
            "block",
            "dtype",
            "experts_stored",
        ):
            assert getattr(stripped, name) == getattr(whole, name), name
        assert stripped.expert_tensor_names == frozenset()
        assert whole.experts_stored.tensors == len(whole.expert_tensor_names)
        assert whole.experts_stored.nbytes >= sum(whole.layer_bytes(layer) for layer in range(whole.layers))
        encoder = VerbatimEncoder(whole)
        assert expected_header(stripped, VerbatimEncoder(stripped)) == expected_header(whole, encoder)


def test_the_files_of_an_export(model: Path, exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    shards = {path.name: read_header(path).tensors for path in model.glob("model-*.safetensors")}
    left = {name for name, tensors in shards.items() if any(".experts." not in tensor for tensor in tensors)}
    assert 0 < len(left) < SHARDS
    assert names == {"config.json", "tokenizer.json", INDEX_FILE, MANIFEST_FILE, "packs"} | left
    manifest = read_manifest(exported)
    assert manifest is not None
    assert manifest.files.keys() == names - {MANIFEST_FILE, "packs"}
    for name, facts in manifest.files.items():
        content = (exported / name).read_bytes()
        assert (facts.nbytes, facts.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    index = json.loads((exported / INDEX_FILE).read_text())
    found = tensors(exported)
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())


def test_what_is_not_taken_along_is_said(model: Path, tmp_path: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        done = export_checkpoint(checkpoint, [], tmp_path / "out", extra={"notes.txt": b"more"})
    assert done.left_out == ["original", "pytorch_model.bin"]
    assert (tmp_path / "out" / "notes.txt").read_bytes() == b"more"
    assert "notes.txt" in done.manifest.files


def test_tensors_stay_aligned(tmp_path: Path) -> None:
    """Odd tensors of narrow types in front must not move wide ones off their boundary."""
    model = write_checkpoint(tmp_path / "model", format="nvfp4", **SIZES)
    odd = {"a.odd": torch.ones(3, dtype=torch.uint8), "b.wide": torch.ones(3, dtype=torch.float64)}
    save_file({**model.tensors, **odd}, tmp_path / "model" / SINGLE_FILE)
    export(model.folder, tmp_path / "out")
    header = read_header(tmp_path / "out" / SINGLE_FILE)
    assert header.data_start % 8 == 0
    assert header.tensors["b.wide"].begin % 8 == 0
    assert same(tensors(tmp_path / "out")["b.wide"], odd["b.wide"])


def test_a_shard_without_experts_is_copied_as_it_is(model: Path, exported: Path) -> None:
    assert (exported / LAST).read_bytes() == (model / LAST).read_bytes()


def test_an_export_of_an_export_is_the_same(exported: Path, tmp_path: Path) -> None:
    export(exported, tmp_path / "again")
    assert snapshot(tmp_path / "again") == snapshot(exported)


def test_packs_come_along(small_model: Path, small_pack_file: Path, tmp_path: Path) -> None:
    export(small_model, tmp_path / "out", small_pack_file)
    assert (tmp_path / "out" / "packs" / small_pack_file.name).read_bytes() == small_pack_file.read_bytes()


def test_experts_are_asked_for_in_vain(exported: Path) -> None:
    with Checkpoint.open(exported) as checkpoint:
        for call in (
            lambda: checkpoint.expert(0, 0),
            lambda: checkpoint.layer_bytes(0),
            lambda: checkpoint.ranges(0, 0),
            lambda: build_pack(checkpoint, VerbatimEncoder(checkpoint), exported / "packs"),
        ):
            with pytest.raises(ExpertsAbsentError, match="holds no expert tensors") as caught:
                call()
            assert checkpoint.identity in str(caught.value)
        with pytest.raises(IndexError):
            checkpoint.expert(3, 0)
    assert not list((exported / "packs").iterdir())


def test_a_damaged_row_cannot_be_made_anew(small_model: Path, pack_copy: Path, tmp_path: Path) -> None:
    export(small_model, tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        header = expected_header(checkpoint, VerbatimEncoder(checkpoint))
    flip(pack_copy, row_start(pack_copy, header, 1, 2))
    rows = CheckpointRows(tmp_path / "out", header, VerbatimEncoder)
    pack = Pack.open(pack_copy, expect=header, rebuild=rows)
    with pytest.raises(RowReadError, match=r"layer 1 expert 2 .* cannot be made anew") as caught:
        pack.read_row(1, 2)
    pack.close()
    assert "holds no expert tensors" in str(caught.value)
    assert "`ziggurat import`" in str(caught.value)


def refused(folder: Path, error: type[CheckpointError] = ManifestError) -> str:
    with pytest.raises(error) as caught:
        Checkpoint.open(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_changed_shard_is_refused(exported: Path) -> None:
    path = exported / LAST
    start, raw = read_header(path).data_start, path.read_bytes()
    for at in (start, (start + len(raw)) // 2, len(raw) - 1):
        flip(path, at)
        assert f"{path.name} is not the file that was exported" in refused(exported)
        flip(path, at)
    path.write_bytes(raw.replace(b'"format":"pt"', b'"format":"np"', 1))
    assert "is not the file that was exported" in refused(exported)
    path.write_bytes(raw[:-1])
    assert "fewer than its header says" in refused(exported, CheckpointError)
    path.write_bytes(raw)
    Checkpoint.open(exported).close()


def test_a_missing_or_added_shard_is_refused(exported: Path) -> None:
    path = exported / LAST
    path.rename(exported / "elsewhere")
    assert f"{path.name} is not there" in refused(exported)
    (exported / "elsewhere").rename(path)
    index = json.loads((exported / INDEX_FILE).read_text())
    index["weight_map"]["another"] = "another.safetensors"
    (exported / INDEX_FILE).write_text(json.dumps(index))
    shutil.copy(path, exported / "another.safetensors")
    assert "another.safetensors was not exported with the others" in refused(exported)


def test_a_manifest_without_shards_is_refused(exported: Path) -> None:
    manifest = read_manifest(exported)
    assert manifest is not None
    (exported / MANIFEST_FILE).write_bytes(manifest_bytes(replace(manifest, files={})))
    for path in [*exported.glob("*.safetensors"), exported / INDEX_FILE]:
        path.unlink()
    assert "lists no shard" in refused(exported)


def test_the_export_of_another_checkpoint_is_refused(exported: Path, tmp_path: Path) -> None:
    """Same shape, other numbers: neither its manifest fits these shards, nor its shards this manifest."""
    write_checkpoint(tmp_path / "other", shards=SHARDS, seed=1, **SIZES)
    export(tmp_path / "other", tmp_path / "foreign")
    shutil.copy(tmp_path / "foreign" / MANIFEST_FILE, exported / MANIFEST_FILE)
    assert "is not the file that was exported" in refused(exported)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_experts", 4, "number of experts in config.json is 4, but 3 was exported"),
        ("hidden_size", 128, "hidden size in config.json is 128, but 96"),
        ("moe_intermediate_size", 32, "expert intermediate size in config.json is 32, but 64"),
        ("mlp_only_layers", [1], "MoE layers in config.json is [0, 2], but [0, 1, 2]"),
        (
            "quantization_config",
            {"weight_block_size": [64, 64]},
            "weight_block_size in config.json is [64, 64]",
        ),
    ],
)
def test_a_config_of_another_shape_is_refused(exported: Path, key: str, value: object, said: str) -> None:
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, key: value}))
    assert said in refused(exported)


def test_other_settings_may_change(exported: Path) -> None:
    manifest = read_manifest(exported)
    assert manifest is not None
    assert changed_files(exported, manifest) == []
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    Checkpoint.open(exported).close()
    (exported / "tokenizer.json").unlink()
    assert set(changed_files(exported, manifest)) == {"config.json", "tokenizer.json"}


@pytest.mark.parametrize("what", ["whole", "none"])
def test_an_index_that_still_lists_the_experts(model: Path, exported: Path, what: str) -> None:
    if what == "whole":
        shutil.copy(model / INDEX_FILE, exported / INDEX_FILE)
    else:
        (exported / INDEX_FILE).unlink()
    with Checkpoint.open(exported) as checkpoint:
        assert not checkpoint.has_experts
        assert [path.name for path in checkpoint.shards] == sorted(
            path.name for path in exported.glob("*.safetensors")
        )


def test_a_folder_that_was_completed_is_whole_again(model: Path, exported: Path) -> None:
    for path in [*model.glob("model-*.safetensors"), model / INDEX_FILE]:
        shutil.copy(path, exported)
    with Checkpoint.open(exported) as checkpoint, Checkpoint.open(model) as whole:
        assert checkpoint.has_experts
        assert checkpoint.identity == whole.identity
    (exported / "model-00003-of-00012.safetensors").unlink()
    assert "not there" in refused(exported, CheckpointError)


def test_a_manifest_beside_a_whole_checkpoint_changes_nothing(
    model: Path, exported: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "other", shards=SHARDS, seed=1, **SIZES)
    with Checkpoint.open(tmp_path / "other") as checkpoint:
        before = checkpoint.identity
    shutil.copy(exported / MANIFEST_FILE, tmp_path / "other" / MANIFEST_FILE)
    with Checkpoint.open(tmp_path / "other") as checkpoint:
        assert checkpoint.has_experts
        assert checkpoint.identity == before


def test_without_its_manifest_it_is_no_checkpoint(exported: Path) -> None:
    (exported / MANIFEST_FILE).unlink()
    assert MANIFEST_FILE in refused(exported, CheckpointError)


def test_large_shards_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WHOLE_BELOW", 0)
    monkeypatch.setattr(identity, "SAMPLED_PAGES", 3)
    write_checkpoint(tmp_path / "model", **SIZES)
    export(tmp_path / "model", tmp_path / "out")
    path = tmp_path / "out" / SINGLE_FILE
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    flip(path, read_header(path).data_start + 6000)  # not in a sample
    Checkpoint.open(tmp_path / "out").close()
    assert changed_files(tmp_path / "out", manifest) == [SINGLE_FILE]


def test_folders_that_are_somebody_elses(model: Path, exported: Path, tmp_path: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        with pytest.raises(ExportError, match="the checkpoint's own folder"):
            export_checkpoint(checkpoint, [], model)
        write_checkpoint(tmp_path / "other", shards=SHARDS, seed=1, **SIZES)
        before = snapshot(tmp_path / "other")
        with pytest.raises(ExportError, match=r"config\.json is there already, and no export wrote it"):
            export_checkpoint(checkpoint, [], tmp_path / "other")
        assert snapshot(tmp_path / "other") == before
    before = snapshot(exported)
    with Checkpoint.open(tmp_path / "other") as other:
        with pytest.raises(ExportError, match="holds an export of checkpoint") as caught:
            export_checkpoint(other, [], exported)
        assert checkpoint.identity in str(caught.value)
        assert other.identity in str(caught.value)
    assert snapshot(exported) == before


def test_space_is_checked_first(small_model: Path, small_pack_file: Path, small_tmpfs: Path) -> None:
    with pytest.raises(DiskFullError):
        export(small_model, small_tmpfs / "out", small_pack_file)
    assert not list(small_tmpfs.iterdir())


def test_a_checkpoint_that_changes_meanwhile(model: Path, tmp_path: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        path = model / FIRST
        flip(path, path.stat().st_size - 1)
        with pytest.raises(ExportError, match="changed while it was being exported"):
            export_checkpoint(checkpoint, [], tmp_path / "out")
    assert "was not finished" in refused(tmp_path / "out", CheckpointError)


def test_finished_files_are_not_written_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    written: list[str] = []
    stop_after = 2

    def counted(shard: StrippedShard, folder: Path, advance: Callable[[int], None]) -> FileFacts:
        if len(written) == stop_after:
            raise KeyboardInterrupt
        written.append(shard.name)
        return write_stripped(shard, folder, advance)

    monkeypatch.setattr("ziggurat.stores.exporting.write_stripped", counted)
    with pytest.raises(KeyboardInterrupt):
        export(model, out)
    assert (out / UNFINISHED_MANIFEST).exists()
    assert "its export was not finished" in refused(out, CheckpointError)
    good, bad = written
    flip(out / bad, (out / bad).stat().st_size - 1)
    written, stop_after = [], SHARDS
    export(model, out)
    assert good not in written
    assert bad in written
    assert not (out / UNFINISHED_MANIFEST).exists()
    written = []
    export(model, out)
    assert written == []
    export(model, tmp_path / "whole")
    assert snapshot(out) == snapshot(tmp_path / "whole")


KILLED = """
import sys
from pathlib import Path
from support.kill_everywhere import CHANGES, kill_everywhere
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.exporting import export_checkpoint

model, out = map(Path, sys.argv[1:])

def export(folder):
    with Checkpoint.open(model) as checkpoint:
        export_checkpoint(checkpoint, [], folder)

def look(folder):
    if (folder / "ziggurat-checkpoint.json").exists():
        Checkpoint.open(folder).close()  # everything else is there

print(kill_everywhere(export, out, (*CHANGES, "write", "mkdir"), look))
"""


def test_killed_at_every_system_call(small_model: Path, tmp_path: Path) -> None:
    """Without packs, whose copies have this test of their own."""
    killed = tmp_path / "killed"
    killed.mkdir()
    assert run_script(KILLED, small_model, killed) > 20
    export(small_model, tmp_path / "whole")
    expected = snapshot(tmp_path / "whole")
    for folder in killed.iterdir():
        found = {name: content for name, content in snapshot(folder).items() if not name.endswith(".lock")}
        assert found == expected, folder
