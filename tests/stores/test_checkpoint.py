"""Opening checkpoints: every layout and format, and every way in which one can be incomplete or wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file

from support.checkpoints import Format, Kind, SizeArgs, Written, expert_name, save_shards, write_checkpoint
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import CheckpointError
from ziggurat.stores.shards import SINGLE_FILE
from ziggurat.stores.stored import StoredWeight

SIZES: SizeArgs = {"layers": 3, "experts": 3, "top_k": 2, "hidden": 96, "intermediate": 64, "vocab": 32}
Tensors = dict[str, torch.Tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def raw_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a.reshape(-1)), bits(b.reshape(-1)))


def matrices(checkpoint: Checkpoint, layer: int, expert: int) -> dict[str, StoredWeight]:
    """Views of the file, which are the same as copies."""
    stored, copied = checkpoint.expert(layer, expert), checkpoint.expert(layer, expert, copied=True)
    for view, copy in ((stored.w1, copied.w1), (stored.w3, copied.w3), (stored.w2, copied.w2)):
        assert (view.name, view.shape, view.block) == (copy.name, copy.shape, copy.block)
        assert raw_equal(view.data, copy.data)
        assert view.data.untyped_storage().data_ptr() != copy.data.untyped_storage().data_ptr()
        for one, other in ((view.scale, copy.scale), (view.scale_2, copy.scale_2)):
            assert (one is None) == (other is None)
            assert one is None or other is None or raw_equal(one, other)
    return {"w1": stored.w1, "w3": stored.w3, "w2": stored.w2}


def check_weight(weight: StoredWeight, form: str, tensors: Tensors, name: str) -> None:
    """A stored weight holds the file's bits in the dtypes that StoredWeight promises."""
    assert (weight.name, weight.format) == (f"{name}.weight", form)
    n, k = weight.shape
    assert raw_equal(weight.data, tensors[f"{name}.weight"])
    scale = next((tensors[f"{name}.{s}"] for s in SCALES if f"{name}.{s}" in tensors), None)
    if form in ("bf16", "f16", "f32"):
        assert weight.data.shape == (n, k)
        assert weight.scale is None
        return
    assert weight.scale is not None
    assert scale is not None
    assert raw_equal(weight.scale, scale)
    if form == "fp8_block":
        assert (weight.data.dtype, weight.data.shape) == (torch.float8_e4m3fn, (n, k))
        assert weight.block == (64, 32)
        assert weight.scale.shape == (-(-n // 64), -(-k // 32))
    else:
        assert (weight.data.dtype, weight.data.shape) == (torch.uint8, (n, k // 2))
    if form == "mxfp4":
        assert (weight.scale.dtype, weight.scale.shape) == (torch.uint8, (n, k // 32))
    if form == "nvfp4":
        assert (weight.scale.dtype, weight.scale.shape) == (torch.float8_e4m3fn, (n, k // 16))
        assert weight.scale_2 is not None
        assert (weight.scale_2.dtype, weight.scale_2.shape) == (torch.float32, ())
        assert weight.scale_2 == tensors[f"{name}.weight_scale_2"]


SCALES = ("weight_scale_inv", "weight_scale", "scale")


@pytest.mark.parametrize("form", get_args(Format))
@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_and_format(tmp_path: Path, kind: Kind, form: Format) -> None:
    written = write_checkpoint(tmp_path, kind, form, shards=2, block=(64, 32), **SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        first = 1 if kind in ("deepseek2", "deepseek3") else 0
        assert checkpoint.layer_ids == tuple(range(first, 3))
        assert (checkpoint.experts, checkpoint.top_k) == (3, 2)
        assert (checkpoint.hidden, checkpoint.intermediate) == (96, 64)
        assert checkpoint.format == form
        assert checkpoint.dtype == {"f16": torch.float16, "f32": torch.float32}.get(form, torch.bfloat16)
        shapes = {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}
        for index, layer in enumerate(checkpoint.layer_ids):
            for expert in range(3):
                for matrix, weight in matrices(checkpoint, index, expert).items():
                    assert weight.shape == shapes[matrix]
                    check_weight(weight, form, written.tensors, expert_name(kind, layer, expert, matrix))
        assert checkpoint.expert_tensor_names == {n for n in written.tensors if ".experts." in n}


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_copy_for_another_process_is_the_same_checkpoint(tmp_path: Path, kind: Kind) -> None:
    form: Format = "bf16" if kind == "olmoe" else "fp8_block"
    write_checkpoint(tmp_path, kind, form, block=(64, 32), **SIZES)
    with Checkpoint.open(tmp_path) as opened, pickle.loads(pickle.dumps(opened)) as copy:
        assert copy.identity == opened.identity
        assert copy.expert_tensor_names == opened.expert_tensor_names
        same_weights(opened, copy)


@pytest.mark.parametrize("form", ["bf16", "f32", "fp8_block"])
def test_fused_is_per_expert(tmp_path: Path, form: Format) -> None:
    single = write_checkpoint(tmp_path / "single", format=form, block=(32, 32), **SIZES)
    fused = write_checkpoint(tmp_path / "fused", format=form, layout="fused", block=(32, 32), **SIZES)
    assert not any(".experts.0." in name for name in fused.tensors)
    with Checkpoint.open(single.folder) as a, Checkpoint.open(fused.folder) as b:
        same_weights(a, b)
        assert b.expert(1, 2).w3.name == "model.layers.1.mlp.experts.gate_up_proj[2]"
        assert b.layer_bytes(0) == a.layer_bytes(0)
        assert {n for n in fused.tensors if ".experts." in n} == b.expert_tensor_names


def test_transposed_fused_is_per_expert(tmp_path: Path) -> None:
    single = write_checkpoint(tmp_path / "single", **SIZES)
    fused = write_checkpoint(tmp_path / "fused", layout="fused-transposed", **SIZES)
    with Checkpoint.open(single.folder) as a, Checkpoint.open(fused.folder) as b:
        same_weights(a, b)


def same_weights(a: Checkpoint, b: Checkpoint) -> None:
    assert a.layers == b.layers
    for layer in range(a.layers):
        for expert in range(3):
            for one, other in zip(
                matrices(a, layer, expert).values(), matrices(b, layer, expert).values(), strict=True
            ):
                assert (one.shape, one.block) == (other.shape, other.block)
                assert raw_equal(one.data, other.data)
                assert (one.scale is None) == (other.scale is None)
                assert one.scale is None or other.scale is None or raw_equal(one.scale, other.scale)


def test_fused_orientation_that_shapes_cannot_tell(tmp_path: Path) -> None:
    square: SizeArgs = {**SIZES, "hidden": 128}
    write_checkpoint(tmp_path, layout="fused", **square)
    with pytest.raises(CheckpointError, match=r"gate_up_proj is \[3, 128, 128\].*ambiguous"):
        Checkpoint.open(tmp_path)


def test_fused_blocks_across_gate_and_up(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, format="fp8_block", layout="fused", block=(128, 32), **SIZES)
    with pytest.raises(CheckpointError, match="straddle gate and up of 64 rows"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_fused_four_bit_is_refused(tmp_path: Path, form: Format) -> None:
    write_checkpoint(tmp_path, format=form, layout="fused", **SIZES)
    with pytest.raises(CheckpointError, match=f"fused {form}"):
        Checkpoint.open(tmp_path)


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SIZES)
    checkpoint = Checkpoint.open(tmp_path)
    first, again = checkpoint.expert(0, 0).w1.data, checkpoint.expert(0, 0).w1.data
    assert first.data_ptr() == again.data_ptr()
    checkpoint.close()
    assert raw_equal(first, again)  # alive after close
    with pytest.raises(ValueError, match="is closed"):
        checkpoint.expert(0, 0)


def test_misaligned_tensors_are_read_right(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, format="f32", **SIZES)
    # The library aligns; a file of another writer need not.
    order = sorted(written.tensors)
    entries, data = {}, b""
    for name, tensor in {
        "pad": torch.ones(1, dtype=torch.uint8),
        **{n: written.tensors[n] for n in order},
    }.items():
        raw = bytes(bits(tensor.reshape(-1)).numpy())
        dtype = {torch.uint8: "U8", torch.float32: "F32"}[tensor.dtype]
        entries[name] = {
            "dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]
        }  # fmt: skip
        data += raw
    header = json.dumps(entries).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + data)
    with Checkpoint.open(tmp_path) as checkpoint:
        weight = checkpoint.expert(2, 1).w2
        assert raw_equal(weight.data, written.tensors[weight.name])


@pytest.mark.parametrize("scale", ["scale", "weight_scale"])
def test_mxfp4_scale_names_and_integer_types(tmp_path: Path, scale: str) -> None:
    written = write_checkpoint(tmp_path, "deepseek4", "mxfp4", **SIZES)
    tensors = {
        (n.removesuffix("scale") + scale if ".experts." in n and n.endswith(".scale") else n): t
        for n, t in written.tensors.items()
    }
    for name in [n for n in tensors if ".experts." in n]:
        tensors[name] = tensors[name].view(torch.int8 if name.endswith(".weight") else torch.uint8)
    save_file(tensors, tmp_path / SINGLE_FILE)
    with Checkpoint.open(tmp_path) as checkpoint:
        weight = checkpoint.expert(1, 2).w3
        assert weight.scale is not None
        assert (weight.data.dtype, weight.scale.dtype) == (torch.uint8, torch.uint8)
        assert raw_equal(weight.data, tensors["layers.1.ffn.experts.2.w3.weight"])
        assert raw_equal(weight.scale, tensors[f"layers.1.ffn.experts.2.w3.{scale}"])


def test_fp8_block_shape_without_config(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, format="fp8_block", block=(64, 32), **SIZES)
    del written.config["quantization_config"]["weight_block_size"]
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.block == (64, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_scales_of_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            tensors[name] = tensors[name].to(dtype)

    rewrite(write_checkpoint(tmp_path, format="fp8_block", block=(64, 32), **SIZES), change)
    with Checkpoint.open(tmp_path) as checkpoint:
        scale = checkpoint.expert(0, 0).w1.scale
        assert scale is not None
        assert scale.dtype == dtype


def test_tensors_behind_the_main_layers_are_no_main_experts(tmp_path: Path) -> None:
    sizes: SizeArgs = {**SIZES, "mtp_layers": 1}
    written = write_checkpoint(tmp_path, "deepseek3", **sizes)
    behind = "model.layers.3.mlp.experts.0.up_proj.weight"
    assert behind in written.tensors
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.layer_ids == (1, 2)
        assert behind not in checkpoint.expert_tensor_names
        assert checkpoint.is_ignored(behind)
        assert checkpoint.is_ignored("mtp.0.ffn.experts.1.w1.weight")
        assert not checkpoint.is_ignored("model.layers.2.mlp.experts.0.up_proj.weight")
        assert not checkpoint.is_ignored("visual.layers.9.experts.0.up_proj.weight")
        assert not checkpoint.is_ignored("lm_head.weight")


def test_a_nan_in_the_data_is_no_matter_of_headers(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.experts.0.up_proj.weight"][0, 0] = float("nan")

    rewrite(write_checkpoint(tmp_path, **SIZES), change)
    Checkpoint.open(tmp_path).close()


def test_index_out_of_range(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        for layer, expert in ((-1, 0), (3, 0), (0, -1), (0, 3)):
            with pytest.raises(IndexError, match="3 x 3"):
                checkpoint.expert(layer, expert)


def rewrite(written: Written, change: Callable[[Tensors], None], shards: int = 1) -> None:
    """Write the checkpoint's tensors anew after `change` edited them."""
    tensors = dict(written.tensors)
    change(tensors)
    save_shards(written.folder, tensors, shards)


UP = "model.layers.1.mlp.experts.2.up_proj.weight"


def _drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def _put(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, value)


def _drop_layer(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.startswith("model.layers.2.mlp.experts.")]:
        del tensors[name]


def _no_experts(tensors: Tensors) -> None:
    for name in [n for n in tensors if ".experts." in n]:
        del tensors[name]


def _transpose_all(tensors: Tensors) -> None:
    for name in [n for n in tensors if ".experts." in n]:
        tensors[name] = tensors[name].T.contiguous()


@pytest.mark.parametrize(
    ("form", "change", "says"),
    [
        ("bf16", _drop(UP), f"1 expert tensor missing: {UP}"),
        ("bf16", _drop_layer, "9 expert tensors missing: model.layers.2.mlp.experts.0.gate_proj.weight, "),
        ("bf16", _drop_layer, " and 6 more"),
        ("bf16", _no_experts, "no routed-expert tensor found"),
        ("bf16", _put(UP, torch.zeros(64, 95).bfloat16()), f"1 expert tensor misshapen: {UP} ([64, 95], not [64, 96])"),
        ("bf16", _put(UP, torch.zeros(96, 64).bfloat16()), f"misshapen: {UP} ([96, 64], not [64, 96])"),
        ("bf16", _transpose_all, "27 expert tensors misshapen"),
        ("bf16", _put(UP, torch.zeros(64, 96)), f"1 expert tensor not bf16 like the others: {UP} (f32)"),
        ("bf16", _put(UP, torch.zeros(64, 96).to(torch.float8_e4m3fn)), f"without scale: {UP}"),
        ("bf16", _put(UP, torch.zeros(64, 96).to(torch.float8_e5m2)), f"unsupported format: {UP} (dtype F8_E5M2)"),
        ("bf16", _put(UP, torch.zeros(64, 96, dtype=torch.int32)), f"unsupported format: {UP} (dtype I32)"),
        ("bf16", _put(f"{UP}_scale_inv", torch.ones(1, 1)), f"of unknown meaning: {UP}_scale_inv"),
        ("bf16", _put("model.layers.1.mlp.experts.2.up_proj.bias", torch.ones(3)), "unsupported kind: model.layers.1"),
        ("bf16", _put(UP.replace(".2.", ".3."), torch.ones(64, 96)), "beyond the 3 experts of config.json: model"),
        ("bf16", _put(f"language_model.{UP}", torch.zeros(64, 96).bfloat16()), "1 expert tensor doubled: "),
        ("bf16", _put("model.layers.1.mlp.experts.down_proj", torch.ones(3, 96, 64)), "doubled: model.layers.1"),
        ("fp8_block", _drop(f"{UP}_scale_inv"), f"1 expert tensor without scale: {UP} (F8_E4M3 weights need one)"),
        ("fp8_block", _put(f"{UP}_scale_inv", torch.ones(2, 3)), f"misshapen: {UP}_scale_inv ([2, 3], not [1, 3])"),
        ("fp8_block", _put(f"{UP}_scale_inv", torch.ones(())), f"misshapen: {UP}_scale_inv ([], not [1, 3])"),
        ("fp8_block", _put(f"{UP}_scale_inv", torch.ones(1, 3).double()), f"{UP}_scale_inv (dtype F64 as FP8 scale)"),
        ("fp8_block", _put(f"{UP}_scale", torch.ones(1, 3)), f"doubled: {UP}_scale"),
        ("fp8_block", _put(UP, torch.zeros(64, 96).bfloat16()), f"unknown meaning: {UP}_scale_inv"),
        ("fp8_block", _drop(UP), f"missing: {UP}"),
        ("nvfp4", _drop(f"{UP}_scale_2"), f"1 expert tensor without second scale: {UP}"),
        ("nvfp4", _drop(f"{UP}_scale"), f"1 expert tensor without scale: {UP}"),
        ("nvfp4", _put(f"{UP}_scale_2", torch.ones(2)), f"misshapen: {UP}_scale_2 ([2], not a single number)"),
        ("nvfp4", _put(f"{UP}_scale_2", torch.ones(()).half()), f"{UP}_scale_2 (dtype F16, not F32)"),
        ("nvfp4", _put(UP, torch.zeros(64, 96).byte()), f"misshapen: {UP} ([64, 96], not [64, 48])"),
        ("mxfp4", _drop(f"{UP}_scale"), f"1 expert tensor without scale: {UP}"),
        ("mxfp4", _put(f"{UP}_scale", torch.zeros(64, 6).byte()), f"misshapen: {UP}_scale ([64, 6], not [64, 3])"),
        ("mxfp4", _put(f"{UP}_scale_2", torch.ones(())), f"of unknown meaning: {UP}_scale_2"),
        ("mxfp4", _put(f"{UP}_scale", torch.zeros(64, 3)), f"{UP}_scale (dtype F32 as scale of U8 weights)"),
    ],
)  # fmt: skip
def test_fault_is_named(tmp_path: Path, form: Format, change: Callable[[Tensors], None], says: str) -> None:
    written = write_checkpoint(tmp_path, format=form, block=(64, 32), **SIZES)
    for shards in (1, 2):
        rewrite(written, change, shards)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(tmp_path)
        assert says in str(caught.value)
        assert str(caught.value).startswith(str(tmp_path))
        assert len(str(caught.value).splitlines()) == 1
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()


def test_all_tensors_at_fault_are_listed(tmp_path: Path) -> None:
    rewrite(write_checkpoint(tmp_path, **SIZES), _drop_layer)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert len(caught.value.tensors) == 9


def test_expert_of_a_dense_layer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config={"mlp_only_layers": [1]}, **SIZES)
    with pytest.raises(CheckpointError, match=r"9 expert tensors in a layer that config\.json says is dense"):
        Checkpoint.open(tmp_path)


def test_mxfp4_needs_whole_groups(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, format="mxfp4", **SIZES)
    written.config["hidden_size"] = 80
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    with pytest.raises(CheckpointError, match="80 columns are not a multiple of 32"):
        Checkpoint.open(tmp_path)


def test_dtype_without_config(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, format="f16", **SIZES)
    del written.config["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.dtype == torch.float16


def test_the_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, format="nvfp4", **SIZES)
    assert (tmp_path / "a" / SINGLE_FILE).read_bytes() == (tmp_path / "b" / SINGLE_FILE).read_bytes()
