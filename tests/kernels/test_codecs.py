"""Whole rows: every codec against the scalar implementation, slices, round trips, refusals."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import scalar_codec as scalar
from support import weights as source
from ziggurat.kernels.codecs.base import Codec
from ziggurat.kernels.codecs.encoder import RowEncoder
from ziggurat.kernels.codecs.registry import codec_names, get_codec
from ziggurat.kernels.errors import CodecError, NonFiniteWeightError, WeightRangeError
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.sources import dequantize_source

CODECS = ("w2", "fp4", "bf16")
SIZES = [(32, 32), (64, 32), (96, 64), (160, 96), (32, 160)]


def encoded(codec: Codec, expert: source.Expert, tp_size: int = 1, guard: int = 0xEE) -> list[torch.Tensor]:
    """Rows of all ranks; fails if a byte beside them is touched."""
    whole = ExpertGeometry(expert.w1.shape[1], expert.w1.shape[0])
    nbytes = codec.row_bytes(whole.shard(tp_size))
    backing = {r: torch.full((nbytes + 2,), guard, dtype=torch.uint8) for r in range(tp_size)}
    codec.encode(expert, tp_size, {r: b[1:-1] for r, b in backing.items()})
    assert all(b[0] == guard and b[-1] == guard for b in backing.values())
    return [b[1:-1] for b in backing.values()]


def scalar_bf16(value: scalar.Weight) -> int:
    """Nearest bfloat16 by search among its neighbours, ties to the even pattern."""
    magnitude = value[0]
    low, high = 0, 0x7F7F
    while high - low > 1:
        middle = (low + high) // 2
        if source.finite(scalar.bf16(middle))[0] <= magnitude:
            low = middle
        else:
            high = middle
    best = min((low, high), key=lambda b: (abs(source.finite(scalar.bf16(b))[0] - magnitude), b & 1))
    return best | (0x8000 if value[1] else 0)


def scalar_row(codec: str, expert: source.Expert) -> bytes:
    """The row of one rank, by the scalar implementation alone."""
    parts = bytearray()
    for names in (("w1", "w3"), ("w2",)):
        codes: list[list[int]] = []
        scales: list[list[int]] = []
        for name in names:
            weight: source.Weight = getattr(expert, name)
            if codec == "bf16":
                for row in source.scalar_values(weight):
                    for value in row:
                        parts += scalar_bf16(value).to_bytes(2, "little")
                continue
            if weight.format == "mxfp4":
                assert weight.scale is not None
                nibbles = [[(b >> s) & 15 for b in row for s in (0, 4)] for row in weight.data.tolist()]
                levels = [[scalar.W2_CODES[scalar.mxfp4_level(n)] for n in row] for row in nibbles]
                codes += levels if codec == "w2" else nibbles
                scales += weight.scale.view(torch.uint8).tolist()
            else:
                new_codes, new_scales = scalar.quantize_matrix(source.scalar_values(weight), codec)
                codes += new_codes
                scales += new_scales
        if codec != "bf16":
            for plane in scalar.write_matrix(codes, scales, codec):
                parts += plane
    return bytes(parts)


@pytest.mark.parametrize("format", source.FORMATS)
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_are_the_scalar_ones(seed: int, format: str, codec: str) -> None:
    hidden, intermediate = [(32, 32), (64, 32), (32, 96)][seed % 3]
    expert = source.awkward_expert(np.random.default_rng(seed), format, hidden, intermediate)
    (row,) = encoded(get_codec(codec), expert)
    assert row.numpy().tobytes() == scalar_row(codec, expert)


@pytest.mark.parametrize("format", source.FORMATS)
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_decoded_row_encodes_to_the_same_numbers(seed: int, format: str, codec: str) -> None:
    hidden, intermediate = SIZES[seed % len(SIZES)]
    expert = source.awkward_expert(np.random.default_rng(seed), format, hidden, intermediate)
    implementation, geometry = get_codec(codec), ExpertGeometry(hidden, intermediate)
    (row,) = encoded(implementation, expert)
    once = implementation.decode(row, geometry)

    def weight(values: torch.Tensor) -> source.Weight:
        return source.Weight("again", "f32", (values.shape[0], values.shape[1]), values.contiguous())

    (again,) = encoded(
        implementation,
        source.Expert(weight(once.w13[:intermediate]), weight(once.w13[intermediate:]), weight(once.w2)),
    )
    twice = implementation.decode(again, geometry)
    assert torch.equal(once.w13.view(torch.int32), twice.w13.view(torch.int32))
    assert torch.equal(once.w2.view(torch.int32), twice.w2.view(torch.int32))


@pytest.mark.parametrize("format", source.FORMATS)
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tp_size=st.sampled_from([2, 3, 4]))
def test_rank_rows_are_slices_of_the_whole(seed: int, format: str, codec: str, tp_size: int) -> None:
    hidden, inner = [(64, 32), (160, 32), (32, 96)][seed % 3]
    expert = source.awkward_expert(np.random.default_rng(seed), format, hidden, tp_size * inner)
    implementation = get_codec(codec)
    whole = implementation.decode(encoded(implementation, expert)[0], ExpertGeometry(hidden, tp_size * inner))
    rows = encoded(implementation, expert, tp_size)
    gate, up = whole.w13.chunk(2)
    for rank, row in enumerate(rows):
        part = implementation.decode(row, ExpertGeometry(hidden, inner))
        mine = slice(rank * inner, (rank + 1) * inner)
        assert torch.equal(part.w13.view(torch.int32), torch.cat([gate[mine], up[mine]]).view(torch.int32))
        assert torch.equal(part.w2.view(torch.int32), whole.w2[:, mine].contiguous().view(torch.int32))
    nbytes = rows[0].numel()
    only = torch.zeros(nbytes, dtype=torch.uint8)
    implementation.encode(expert, tp_size, {tp_size - 1: only})
    assert torch.equal(only, rows[-1])


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_decode_reads_every_code_and_scale_at_its_place(codec: str, hidden: int, intermediate: int) -> None:
    implementation, geometry = get_codec(codec), ExpertGeometry(hidden, intermediate)
    row = np.random.default_rng(hidden).integers(0, 253, implementation.row_bytes(geometry)).astype(np.uint8)
    decoded = implementation.decode(torch.from_numpy(row), geometry)
    starts = {s.name: s.offset for s in implementation.sections(geometry)}
    levels = {code: float(level) for level, code in scalar.W2_CODES.items()}
    if codec == "fp4":
        levels = {nibble: scalar.as_float(scalar.e2m1(nibble)) for nibble in range(16)}
    place = scalar.w2_place if codec == "w2" else scalar.fp4_place
    for name, matrix in (("w13", decoded.w13), ("w2", decoded.w2)):
        N, K = matrix.shape
        expected = torch.empty(N, K, dtype=torch.float64)
        for n in range(N):
            for k in range(K):
                offset, bits = place(n, k, K)
                code = scalar.get(int(row[starts[f"{name} codes"] + offset]), bits)
                byte = int(row[starts[f"{name} scales"] + scalar.scale_place(n, k // 32, K)])
                expected[n, k] = levels[code] * 2.0 ** (byte - 127)
        assert torch.equal(matrix.double().view(torch.int64), expected.view(torch.int64))


@pytest.mark.parametrize("codec", CODECS)
def test_decode_reads_any_alignment_and_ignores_padding(codec: str) -> None:
    implementation, geometry = get_codec(codec), ExpertGeometry(96, 64)
    expert = source.awkward_expert(np.random.default_rng(1), "bf16", 96, 64)
    (row,) = encoded(implementation, expert)
    reference = implementation.decode(row, geometry)
    for offset in range(1, 18):
        shifted = torch.full((offset + row.numel() + 100,), 0xFF, dtype=torch.uint8)
        shifted[offset : offset + row.numel()] = row
        decoded = implementation.decode(shifted[offset:], geometry)
        assert torch.equal(decoded.w13, reference.w13)
        assert torch.equal(decoded.w2, reference.w2)


@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_every_scale_byte_decodes_to_its_power_of_two(codec: str) -> None:
    """Also 2^-127, which float32 holds only as a subnormal number."""
    implementation, geometry = get_codec(codec), ExpertGeometry(32, 128)
    scales = np.arange(256, dtype=np.uint8)
    ones = np.full((128, 16), 0x22, np.uint8)  # 1.0 twice
    scales[scales > 252] = 0

    def weight(rows: int, cols: int) -> source.Weight:
        values = np.resize(scales, rows * cols // 32).reshape(rows, cols // 32)
        return source.mxfp4(np.resize(ones, (rows, cols // 2)), values)

    expert = source.Expert(weight(128, 32), source.mxfp4(ones, scales[128:].reshape(128, 1)), weight(32, 128))
    (row,) = encoded(implementation, expert)
    decoded = implementation.decode(row, geometry)
    expected = torch.cat([dequantize_source(expert.w1), dequantize_source(expert.w3)])
    assert expected.min() == 2.0**-127
    assert torch.equal(decoded.w13.double(), expected)


@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_every_pair_of_mxfp4_nibbles(codec: str) -> None:
    pairs = np.arange(256, dtype=np.uint8).reshape(16, 16)
    up = source.mxfp4(np.concatenate([pairs, pairs[::-1]]), np.full((32, 1), 127, np.uint8))
    (row,) = encoded(get_codec(codec), source.Expert(up, up, up))
    decoded = get_codec(codec).decode(row, ExpertGeometry(32, 32))
    for n, bytes_ in enumerate(up.data.tolist()):
        for k in range(32):
            nibble = (bytes_[k // 2] >> (4 * (k % 2))) & 15
            value = scalar.mxfp4_level(nibble) if codec == "w2" else scalar.as_float(scalar.e2m1(nibble))
            assert decoded.w2[n, k].item() == value


def test_bf16_rows_are_the_checkpoints_bytes() -> None:
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 65536, (3, 64, 96))
    bits[(bits & 0x7F80) == 0x7F80] = 0x8000
    expert = source.Expert(
        source.from_bits("bf16", bits[0]),
        source.from_bits("bf16", bits[1]),
        source.from_bits("bf16", bits[2].T),
    )
    (row,) = encoded(get_codec("bf16"), expert)
    verbatim = np.concatenate([bits[0].ravel(), bits[1].ravel(), bits[2].T.ravel()]).astype(np.uint16)
    assert row.numpy().tobytes() == verbatim.tobytes()
    assert get_codec("bf16").decode(row, ExpertGeometry(96, 64)).w2.dtype == torch.float32


def test_an_upcast_mxfp4_model_packs_to_fp4_without_loss() -> None:
    rng = np.random.default_rng(6)
    native = source.awkward_expert(rng, "mxfp4", 64, 64)
    native = replace(
        native,
        **{n: replace(getattr(native, n), scale=getattr(native, n).scale % 250) for n in ("w1", "w3", "w2")},
    )
    upcast = source.Expert(
        *(
            source.Weight(
                n, "bf16", getattr(native, n).shape, dequantize_source(getattr(native, n)).bfloat16()
            )
            for n in ("w1", "w3", "w2")
        )
    )
    codec, geometry = get_codec("fp4"), ExpertGeometry(64, 64)
    from_native, from_upcast = (codec.decode(encoded(codec, e)[0], geometry) for e in (native, upcast))
    assert torch.equal(from_native.w13.view(torch.int32), from_upcast.w13.view(torch.int32))
    assert torch.equal(from_native.w2.view(torch.int32), from_upcast.w2.view(torch.int32))


@pytest.mark.parametrize("format", source.FORMATS)
@pytest.mark.parametrize("codec", CODECS)
def test_not_a_number_is_refused_by_name(codec: str, format: str) -> None:
    expert = source.awkward_expert(np.random.default_rng(8), format, 64, 64)
    bad = expert.w3
    if format in ("bf16", "f16", "f32"):
        bad.data[5, 6] = float("inf")
    elif format == "fp8_block":
        bad.data.view(torch.uint8)[5, 6] = 0x7F
    elif format == "nvfp4":
        assert bad.scale is not None
        bad.scale.view(torch.uint8)[5, 1] = 0x7F
    else:
        assert bad.scale is not None
        bad.scale[5, 1] = 255
    with pytest.raises(NonFiniteWeightError, match=r"layers\.0\.experts\.0\.w3\.weight.*\[5, [16]\]"):
        encoded(get_codec(codec), expert)


@pytest.mark.parametrize("codec", CODECS)
def test_a_value_beyond_float32_is_refused_by_name(codec: str) -> None:
    expert = source.awkward_expert(np.random.default_rng(9), "bf16", 32, 32)
    for bad in (
        source.mxfp4(np.full((32, 16), 0x77, np.uint8), np.full((32, 1), 254, np.uint8), "huge"),
        source.fp8(np.full((32, 32), 0x7E), torch.full((1, 1), 3e38), (32, 32), "huge"),
    ):
        with pytest.raises(WeightRangeError, match="tensor huge"):
            encoded(get_codec(codec), replace(expert, w1=bad))


def test_a_large_scale_over_small_levels_is_kept() -> None:
    expert = source.awkward_expert(np.random.default_rng(9), "bf16", 32, 32)
    fits = source.mxfp4(np.full((32, 16), 0x22, np.uint8), np.full((32, 1), 254, np.uint8), "large")
    for codec in ("w2", "fp4"):
        (row,) = encoded(get_codec(codec), replace(expert, w1=fits))
        assert (get_codec(codec).decode(row, ExpertGeometry(32, 32)).w13[:32] == 2.0**127).all()


@pytest.mark.parametrize("format", ["bf16", "fp8_block", "f32"])
def test_zero_mode_is_decided_for_the_whole_tensor(format: str) -> None:
    """All zeros of one rank's slice have one sign, but the other slice balances them: signs are kept."""
    dtype = (
        torch.float8_e4m3fn
        if format == "fp8_block"
        else source.from_bits(format, np.zeros((1, 1))).data.dtype
    )
    values = torch.ones(64, 64)
    values[:32, ::3] = 0.0
    values[32:, ::3] = -0.0
    scale = torch.ones(1, 1) if format == "fp8_block" else None
    block = (64, 64) if format == "fp8_block" else None
    weight = source.Weight("z", format, (64, 64), values.to(dtype), scale, None, block)
    codec = get_codec("w2")
    first, second = (
        codec.decode(row, ExpertGeometry(64, 32))
        for row in encoded(codec, source.Expert(weight, weight, weight), 2)
    )
    assert (first.w13[:32, ::3] > 0).all()
    assert (second.w13[:32, ::3] < 0).all()
    lopsided = replace(weight, data=values.abs().to(dtype))
    first, _ = (
        codec.decode(row, ExpertGeometry(64, 32))
        for row in encoded(codec, source.Expert(lopsided, weight, weight), 2)
    )
    assert (first.w13[:32, 0::6] > 0).all()  # even k
    assert (first.w13[:32, 3::6] < 0).all()  # odd k
    assert (first.w13[32:, ::3] > 0).all()  # w3 decides for itself


@pytest.mark.parametrize("first_rows", ["one sign", "both signs", "none"])
@pytest.mark.parametrize("rest", ["one sign", "both signs", "none"])
def test_zero_mode_of_a_large_tensor_does_not_depend_on_the_first_rows(first_rows: str, rest: str) -> None:
    signs = {"one sign": [0.0, 0.0], "both signs": [0.0, -0.0], "none": [1.0, 1.0]}
    values = torch.empty(512, 32)
    values[:16, 0::2], values[:16, 1::2] = signs[first_rows]
    values[16:, 0::2], values[16:, 1::2] = signs[rest]
    weight = source.Weight("z", "bf16", (512, 32), values.bfloat16())
    down = source.Weight("d", "bf16", (32, 512), torch.ones(32, 512).bfloat16())
    (row,) = encoded(get_codec("w2"), source.Expert(weight, weight, down))
    gate = get_codec("w2").decode(row, ExpertGeometry(32, 512)).w13[:512]
    zeros = values == 0
    negative = int((zeros & values.signbit()).sum())
    alternate = scalar.zeros_alternate([(Fraction(0), i < negative) for i in range(int(zeros.sum()))])
    odd = torch.arange(32).expand(512, 32) % 2 == 1
    expected = torch.where(zeros, odd if alternate else values.signbit(), values.signbit())
    assert torch.equal(gate < 0, expected)


def test_zero_mode_leaves_mxfp4_alone() -> None:
    zeros = source.mxfp4(np.zeros((32, 16), np.uint8), np.full((32, 1), 127, np.uint8))
    (row,) = encoded(get_codec("w2"), source.Expert(zeros, zeros, zeros))
    assert (get_codec("w2").decode(row, ExpertGeometry(32, 32)).w13 == 1.0).all()


def test_sizes_of_the_models_in_the_field() -> None:
    w2, fp4 = get_codec("w2"), get_codec("fp4")
    for hidden, inner, base, better in (
        (4096, 2048, 7_077_888, 13_369_344),
        (6144, 2048, 10_616_832, 20_054_016),
        (7168, 2048, 12_386_304, 23_396_352),
    ):
        assert w2.row_bytes(ExpertGeometry(hidden, inner)) == base
        assert fp4.row_bytes(ExpertGeometry(hidden, inner)) == better
    assert [(s.name, s.nbytes) for s in w2.sections(ExpertGeometry(4096, 2048))] == [
        ("w13 codes", 4194304),
        ("w13 scales", 524288),
        ("w2 codes", 2097152),
        ("w2 scales", 262144),
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_sections_cover_the_row(codec: str) -> None:
    geometry = ExpertGeometry(160, 96)
    end = 0
    for section in get_codec(codec).sections(geometry):
        assert section.offset == end
        end += section.nbytes
    assert end == get_codec(codec).row_bytes(geometry)


def test_sizes_that_do_not_fit_are_named() -> None:
    for codec in ("w2", "fp4"):
        with pytest.raises(
            CodecError, match=f"codec {codec} needs the hidden size .* multiple of 32, not 80"
        ):
            get_codec(codec).check(ExpertGeometry(80, 64))
        with pytest.raises(
            CodecError, match=f"codec {codec} needs the intermediate size .* multiple of 32, not 48"
        ):
            get_codec(codec).row_bytes(ExpertGeometry(64, 48))
    get_codec("bf16").check(ExpertGeometry(7, 5))
    with pytest.raises(CodecError, match="intermediate size 96 does not divide by tensor-parallel size 5"):
        ExpertGeometry(64, 96).shard(5)
    with pytest.raises(CodecError, match="hidden=0"):
        ExpertGeometry(0, 4)


def test_bf16_of_odd_sizes() -> None:
    expert = source.Expert(
        *(source.Weight("w", "bf16", s, torch.randn(s).bfloat16()) for s in ((6, 7), (6, 7), (7, 6)))
    )
    rows = encoded(get_codec("bf16"), expert, 3)
    part = get_codec("bf16").decode(rows[1], ExpertGeometry(7, 2))
    assert torch.equal(part.w13, torch.cat([expert.w1.data[2:4], expert.w3.data[2:4]]).float())
    assert torch.equal(part.w2, expert.w2.data[:, 2:4].float())


def test_wrong_buffers_and_experts_are_named() -> None:
    codec = get_codec("w2")
    expert = source.awkward_expert(np.random.default_rng(2), "bf16", 64, 32)
    nbytes = codec.row_bytes(ExpertGeometry(64, 32))
    for outs, message in (
        ({1: torch.empty(nbytes, dtype=torch.uint8)}, "rank 1 does not exist"),
        ({0: torch.empty(nbytes + 1, dtype=torch.uint8)}, rf"buffer of rank 0 must be .* \[{nbytes}\]"),
        ({0: torch.empty(nbytes, dtype=torch.int8)}, "buffer of rank 0"),
        ({0: torch.empty(2 * nbytes, dtype=torch.uint8)[::2]}, "buffer of rank 0"),
    ):
        with pytest.raises(CodecError, match=message):
            codec.encode(expert, 1, outs)
    swapped = replace(expert, w2=expert.w1)
    with pytest.raises(CodecError, match=r"w1\.weight is \[32, 64\], but .* must be \[64, 32\]"):
        codec.encode(swapped, 1, {0: torch.empty(nbytes, dtype=torch.uint8)})
    with pytest.raises(CodecError, match=f"at least {nbytes} bytes"):
        codec.decode(torch.empty(nbytes - 1, dtype=torch.uint8), ExpertGeometry(64, 32))


def test_registry_offers_the_nearest_name() -> None:
    assert codec_names() == CODECS
    assert [get_codec(n).name for n in codec_names()] == list(CODECS)
    assert len({get_codec(n).version for n in codec_names()}) == len(CODECS)
    with pytest.raises(CodecError, match="unknown codec 'fp-4', did you mean 'fp4'"):
        get_codec("fp-4")


def test_row_encoder_binds_a_codec_to_a_model() -> None:
    expert = source.awkward_expert(np.random.default_rng(3), "bf16", 64, 128)
    encoder = RowEncoder(get_codec("w2"), ExpertGeometry(64, 128))
    assert (encoder.name, encoder.version) == ("w2", get_codec("w2").version)
    outs = {r: torch.empty(encoder.row_bytes(2), dtype=torch.uint8) for r in range(2)}
    encoder.encode(expert, 2, outs)
    assert all(torch.equal(outs[r], row) for r, row in enumerate(encoded(get_codec("w2"), expert, 2)))
    with pytest.raises(CodecError, match="multiple of 32, not 16"):
        encoder.row_bytes(8)


def test_the_scalar_bf16_rounds_half_to_even() -> None:
    one = source.finite(scalar.bf16(0x3F80))[0]
    assert scalar_bf16((one + Fraction(1, 256), False)) == 0x3F80
    assert scalar_bf16((one + Fraction(3, 256), True)) == 0xBF82
