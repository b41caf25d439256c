"""The trace format: what is written is read back, and what is no trace is refused by name and never executed."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.residency.simulation.errors import TraceError
from ziggurat.residency.simulation.importers import import_trace
from ziggurat.residency.simulation.statistics import describe
from ziggurat.residency.simulation.trace import make_trace, read_trace, write_trace

DEMO = Path(__file__).parents[3] / "bench/traces/demo_moe.npz"


def ids(*shape: int, experts: int = 8) -> np.typing.NDArray[np.int64]:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) % experts


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    trace = make_trace(
        ids(2, 5, 3, 2),
        experts=300,
        lengths=[5, 4],
        prompts=[2, 0],
        metadata={"model": "tiny", "layers": [3, 4, 7], "unknown": [1, {"a": None}]},
    )
    write_trace(tmp_path / "new/trace.npz", trace)
    again = read_trace(tmp_path / "new/trace.npz")
    assert np.array_equal(again.ids, trace.ids)
    assert again.lengths.tolist() == [5, 4]
    assert again.prompts.tolist() == [2, 0]
    assert (again.experts, again.tokens, again.layer_ids) == (300, 9, (3, 4, 7))
    assert again.metadata["unknown"] == [1, {"a": None}]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["trace.npz"]


def test_recorded_steps_are_read_back(tmp_path: Path) -> None:
    trace = make_trace(ids(1, 4, 2, 2), batches=[0, 3, 4], prefill=[True, True, False, False])
    write_trace(tmp_path / "t.npz", trace)
    again = read_trace(tmp_path / "t.npz")
    assert again.batches is not None
    assert again.prefill is not None
    assert again.batches.tolist() == [0, 3, 4]
    assert again.prefill.tolist() == [True, True, False, False]


def test_the_committed_trace_is_one() -> None:
    trace = read_trace(DEMO)
    assert (trace.sequences, trace.positions, trace.layers, trace.top_k, trace.experts) == (32, 512, 6, 4, 32)
    facts = describe(trace)
    assert facts["routed_pairs"] == 393216
    assert facts["repeat"] > 1.3 * np.mean([line["chance"] for line in facts["by_layer"]])


def test_a_disk_that_refuses_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(tmp_path / "file/trace.npz", make_trace(ids(1, 2, 1, 2)))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"counts": ids(3, 2, 8)}, "no topk_ids"),
        ({"topk_ids": ids(5, 3, 2)}, r"\[5, 3, 2\]; a trace is \[sequence, position, layer, k\]"),
        ({"topk_ids": ids(0, 3, 2, 2)}, "not empty"),
        ({"topk_ids": ids(1, 3, 2, 2).astype(np.float32)}, "float32, not integers"),
        ({"topk_ids": ids(1, 3, 2, 2) - 1}, "-1, which is no expert"),
        ({"topk_ids": ids(1, 3, 2, 2) + (1 << 40)}, "which is no expert"),
        ({"topk_ids": ids(1, 3, 2, 2), "lengths": np.array([4])}, "lengths holds 4"),
        ({"topk_ids": ids(1, 3, 2, 2), "lengths": np.array([1, 1])}, r"lengths is \[2\]"),
        ({"topk_ids": ids(1, 3, 2, 2), "lengths": np.array([1.5])}, "lengths is float64"),
        ({"topk_ids": ids(1, 3, 2, 2), "lengths": np.array([1]), "prompts": np.array([2])}, "longer than"),
        ({"topk_ids": ids(1, 3, 2, 2), "batches": np.array([0, 2])}, "rise from 0 to the 3 positions"),
        ({"topk_ids": ids(1, 3, 2, 2), "batches": np.array([0, 2, 1, 3])}, "rise from 0"),
        ({"topk_ids": ids(2, 3, 2, 2), "batches": np.array([0, 3])}, "one sequence"),
        ({"topk_ids": ids(1, 3, 2, 2), "prefill": np.zeros(3, np.bool_)}, "prefill without batches"),
        (
            {"topk_ids": ids(1, 3, 2, 2), "batches": np.array([0, 3]), "prefill": np.zeros(2, np.bool_)},
            r"prefill is \[2\]",
        ),
        ({"topk_ids": ids(1, 3, 2, 2), "metadata": np.frombuffer(b"{", np.uint8)}, "no JSON"),
        ({"topk_ids": ids(1, 3, 2, 2), "metadata": np.frombuffer(b"[1]", np.uint8)}, "no JSON object"),
        ({"topk_ids": ids(1, 3, 2, 2), "metadata": np.array(["{}"])}, "bytes of a JSON object"),
        (
            {
                "topk_ids": ids(1, 3, 2, 2),
                "metadata": np.frombuffer(json.dumps({"num_experts": 2}).encode(), np.uint8),
            },
            "experts are 0..1",
        ),
        (
            {
                "topk_ids": ids(1, 3, 2, 2),
                "metadata": np.frombuffer(json.dumps({"num_experts": "8"}).encode(), np.uint8),
            },
            "num_experts is '8'",
        ),
    ],
)
def test_contradictions_are_named(tmp_path: Path, members: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "bad.npz", **members)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "bad.npz")


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (Path.touch, (Path("exploded"),))  # type: ignore[return-value]


def test_objects_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("bomb.npz", topk_ids=np.array([Bomb()], dtype=object))
    with pytest.raises(TraceError, match="Python objects, which are never loaded"):
        import_trace(Path("bomb.npz"))
    Path("raw.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(TraceError, match="is no trace"):
        import_trace(Path("raw.npz"))
    assert not Path("exploded").exists()


def test_a_member_that_unpacks_to_more_than_any_trace_is_not_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, ids(1, 2, 1, 2))
    path = tmp_path / "huge.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("topk_ids.npy", buffer.getvalue())
    data = bytearray(path.read_bytes())
    # The central directory's uncompressed size, which a reader would allocate.
    where = data.rindex(b"PK\x01\x02") + 24
    data[where : where + 4] = (0xFFFFFFF0).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(TraceError, match="unpacks to 4294967280 bytes"):
        read_trace(path)


def test_a_shape_that_its_bytes_do_not_hold_is_refused(tmp_path: Path) -> None:
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999, 99999, 9, 9), }"
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
    with zipfile.ZipFile(tmp_path / "lies.npz", "w") as archive:
        archive.writestr("topk_ids.npy", member)
    with pytest.raises(TraceError, match="is no trace"):
        read_trace(tmp_path / "lies.npz")


@settings(max_examples=80, deadline=None)
@given(where=st.integers(0, 5000), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_a_damaged_file_is_refused_or_is_a_trace(
    tmp_path_factory: pytest.TempPathFactory, where: int, value: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "t.npz"
    write_trace(path, make_trace(ids(2, 9, 2, 2), metadata={"model": "tiny"}))
    data = bytearray(path.read_bytes())
    data[where % len(data)] = value
    path.write_bytes(data[: len(data) - cut % len(data)])
    try:
        found = read_trace(path)
    except TraceError:
        return
    assert found.ids.shape == (2, 9, 2, 2)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no trace"):
        read_trace(tmp_path / "none.npz")


# -- importers -----------------------------------------------------------------------------------------------------


def test_ids_of_sequences_are_imported_with_their_layers(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz", ids=ids(2, 4, 3, 2).astype(np.int8), num_experts=16, top_k=2, layers=[2, 3, 4]
    )
    trace = import_trace(tmp_path / "a.npz")
    assert (trace.sequences, trace.layers, trace.experts, trace.layer_ids) == (2, 3, 16, (2, 3, 4))


def test_ids_of_one_layer_are_one_sequence_of_tokens(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", ids=ids(20, 4))
    trace = import_trace(tmp_path / "a.npz")
    assert trace.ids.shape == (1, 20, 1, 4)
    assert "unknown sequences" in trace.metadata["order"]


def test_arrays_of_several_requests_become_sequences(tmp_path: Path) -> None:
    """As vLLM returns them, [tokens, layers, k] for each request."""
    np.savez(
        tmp_path / "a.npz", routed_experts_0=ids(3, 2, 2).astype(np.int16), routed_experts_1=ids(5, 2, 2)
    )
    trace = import_trace(tmp_path / "a.npz")
    assert trace.ids.shape == (2, 5, 2, 2)
    assert trace.lengths.tolist() == [3, 5]


def test_counts_without_order_are_no_trace(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", counts=ids(5, 2, 8))
    with pytest.raises(TraceError, match="not in what order"):
        import_trace(tmp_path / "a.npz")


def test_other_files_say_what_they_hold(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", weights=ids(2, 2), bias=ids(2))
    with pytest.raises(TraceError, match=r"bias, weights"):
        import_trace(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", ids=ids(2, 2), num_experts=np.array([1, 2]))
    with pytest.raises(TraceError, match="not one number"):
        import_trace(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", routed_experts_0=ids(3, 2, 2), routed_experts_1=ids(5, 3, 2))
    with pytest.raises(TraceError, match=r"\[5, 3, 2\]"):
        import_trace(tmp_path / "c.npz")
