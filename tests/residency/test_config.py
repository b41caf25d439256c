"""The configuration file: what it accepts, and that each mistake is one line that names the key and what to do."""

from __future__ import annotations

import os
import pickle
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.residency.config import TiersConfig, find_config, load_config
from ziggurat.residency.config_errors import known_keys
from ziggurat.residency.errors import ConfigError
from ziggurat.residency.sizes import Size, format_bytes, row_stride
from ziggurat.residency.strict_yaml import MAX_BYTES, MAX_DEPTH, MAX_VALUES, parse_yaml

SMALLEST = "tiers: {disk: {path: packs}}\n"


def load(text: str) -> TiersConfig:
    return TiersConfig.from_mapping(parse_yaml(text, name="tiers.yaml"), name="tiers.yaml")


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return str(caught.value)


def with_key(path: str, value: str) -> str:
    """A configuration that is right but for `path: value`."""
    text = value
    for key in reversed(path.split(".")):
        text = f"{{{key}: {text}}}"
    if path.startswith("tiers.disk."):
        return text.replace("disk: {", "disk: {path: packs, ")
    if path.startswith("tiers."):
        return text.replace("tiers: {", "tiers: {disk: {path: packs}, ")
    return text[:-1] + ", tiers: {disk: {path: packs}}}"


def test_the_example_of_the_documentation_is_accepted() -> None:
    config = load(
        """
        model: {path: /models/DeepSeek-V4-Flash}
        tiers:
          disk:   {path: /nvme/packs, direct: auto, readers: 8, verify: first-read}
          host:   {size: 20GiB, numa: gpu-local, on_limit: refuse}
          device: {size: 14GiB, device: auto}
        codecs: {base: w2, delta: null}
        policy: {eviction: lfu-decay, prefetch: []}
        miss:   {mode: auto, max_replays: 2, then: exact}
        metrics: {port: null}
        """
    )
    assert config.model.path == Path("/models/DeepSeek-V4-Flash")
    assert config.tiers.host.size == Size("bytes", Fraction(20 << 30))
    assert config.tiers.device.size == Size("bytes", Fraction(14 << 30))


def test_every_key_has_its_paragraph_with_its_default_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    headings = dict(re.findall(r"^### `(.+)` \((?:default: )?(.+)\)$", text, re.MULTILINE))
    sections = {
        "model",
        "tiers",
        "tiers.disk",
        "tiers.host",
        "tiers.device",
        "codecs",
        "policy",
        "miss",
        "heat",
        "metrics",
    }
    assert set(headings) == set(known_keys(TiersConfig)) - sections
    for key, said in headings.items():
        value: Any = load(SMALLEST).model_dump(mode="json")
        for part in key.split("."):
            value = value[part]
        if key == "tiers.disk.path":
            assert said == "required"
        elif key == "model.path":
            assert (said, value) == ("none", None)
        else:
            assert parse_yaml(said.strip("`"), name=key) == value


def test_defaults() -> None:
    config = load(SMALLEST)
    assert config.model_dump(mode="json") == {
        "model": {"path": None},
        "tiers": {
            "disk": {
                "path": "packs",
                "direct": "auto",
                "readers": 8,
                "reader": "auto",
                "read_timeout": 120.0,
                "verify": "first-read",
                "rebuild": True,
                "faults": None,
            },
            "host": {"size": "auto", "numa": "gpu-local", "on_limit": "refuse", "share": None},
            "device": {"size": "auto", "device": "auto", "staging": "auto", "direct_layers": []},
        },
        "codecs": {"base": "w2", "delta": None},
        "policy": {
            "eviction": "lfu-decay",
            "host": "heat-weighted",
            "host_floor": None,
            "prefetch": [],
        },
        "miss": {"mode": "auto", "max_replays": 2, "then": "exact", "tolerance": 0, "lookahead": 0},
        "heat": {"path": "auto", "save_every_steps": 256, "warm_start": True},
        "metrics": {"port": None},
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.path", "m"),
        ("tiers.disk.direct", "never"),
        ("tiers.disk.readers", "1"),
        ("tiers.disk.verify", "always"),
        ("tiers.disk.faults", "rules.json"),
        ("tiers.host.size", "0"),
        ("tiers.host.numa", "1"),
        ("tiers.host.numa", "none"),
        ("tiers.host.on_limit", "pageable"),
        ("tiers.device.size", "[14GiB, 1.5 GB, '25.5%', 5 rows, 17, auto]"),
        ("tiers.device.device", "cuda:1"),
        ("tiers.device.staging", "256MiB"),
        ("tiers.device.staging", "12 rows"),
        ("tiers.device.direct_layers", "[3, 40]"),
        ("codecs.base", "bf16"),
        ("policy.eviction", "lru"),
        ("miss.mode", "replay"),
        ("miss.max_replays", "0"),
        ("miss.tolerance", "3"),
        ("miss.lookahead", "16"),
        ("heat.path", "null"),
        ("heat.path", "heat.json"),
        ("heat.save_every_steps", "1"),
        ("heat.warm_start", "false"),
        ("metrics.port", "9100"),
    ],
)
def test_a_value_is_kept_over_a_dump_and_over_pickling(path: str, value: str) -> None:
    config = load(with_key(path, value))
    assert config != load(SMALLEST)
    assert TiersConfig.from_mapping(config.model_dump(mode="json")) == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tiers: {disk: {path: x}, hots: {}}", 'unknown key "tiers.hots"; did you mean "tiers.host"?'),
        ("tiers: {disk: {path: x, rders: 8}}", 'unknown key "tiers.disk.rders"; did you mean "tiers.disk.readers"?'),
        (SMALLEST + "polcy: {}", 'unknown key "polcy"; did you mean "policy"?'),
        (SMALLEST + "host: {size: 1GiB}", 'unknown key "host"; did you mean "tiers.host"?'),
        (SMALLEST + "max_replay: 3", 'unknown key "max_replay"; did you mean "miss.max_replays"?'),
        (
            SMALLEST + "miss: {zzz: 3}",
            'unknown key "miss.zzz"; known here: mode, max_replays, then, tolerance, lookahead',
        ),
        (
            SMALLEST + "a.b: 3",
            'unknown key "a.b"; known keys: model, tiers, codecs, policy, miss, heat, metrics',
        ),
    ],
)  # fmt: skip
def test_an_unknown_key_names_its_path_and_the_nearest_key(text: str, line: str) -> None:
    assert refusal(text) == f"tiers.yaml: {line}"


@pytest.mark.parametrize("key", [key for key in known_keys(TiersConfig) if "." in key])
def test_every_key_with_one_letter_missing_is_refused_and_recognised(key: str) -> None:
    section, _, leaf = key.rpartition(".")
    message = refusal(with_key(f"{section}.{leaf[1:]}", "1"))
    assert message.endswith(f'did you mean "{key}"?')


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("tiers.device.size", "-1", "a size is not negative: -1"),
        ("tiers.device.size", "'-3 GiB'", "expected a size such as"),
        ("tiers.device.size", "true", "such as 14GiB, 25%, 5 rows, auto or a number of bytes, not True"),
        ("tiers.device.size", ".nan", "not nan"),
        ("tiers.device.size", ".inf", "not inf"),
        ("tiers.device.size", "1e9", "not 1000000000.0"),
        ("tiers.device.size", "14G", "unknown unit 'G' in '14G'"),
        ("tiers.device.size", "101%", "a share is at most 100%, not '101%'"),
        ("tiers.device.size", "2.5 rows", "rows come whole"),
        ("tiers.device.size", "9223372036854775808", "a size is below 2^63"),
        ("tiers.device.size", "8388608 TiB", "a size is below 2^63"),
        ("tiers.device.size", "1:30", "not '1:30'"),
        ("tiers.device.size", "null", "not None"),
        ("tiers.device.size", "[]", "one size per tensor-parallel rank, not none"),
        ("tiers.device.size", "[1GiB, -2]", "a size is not negative: -2"),
        ("tiers.host.size", "[1GiB]", "expected a size such as"),
        ("tiers.device.device", "cuda", "expected auto, cpu or cuda:N (N a number), not 'cuda'"),
        ("tiers.device.staging", "10%", "expected bytes, rows or auto, not the share '10%'"),
        ("tiers.device.staging", "-1", "a size is not negative: -1"),
        ("tiers.device.staging", "[1GiB]", "expected a size such as"),
        ("tiers.device.direct_layers", "3", "expected a list of layer numbers, not 3"),
        ("tiers.device.direct_layers", "[3, 4, 3]", "layer 3 is listed twice"),
        ("tiers.device.direct_layers", "[true]", "a layer is a number, 0 or more, not True"),
        ("tiers.device.direct_layers", "[-1]", "a layer is a number, 0 or more, not -1"),
        ("tiers.device.direct_layers", "['3']", "a layer is a number, 0 or more, not '3'"),
        ("tiers.device.direct_layers", "[3.0]", "a layer is a number, 0 or more, not 3.0"),
        ("tiers.device.staging", "null", "expected a size such as"),
        ("tiers.device.staging", "1e400 rows", "expected a size such as"),
        ("tiers.host.numa", "true", "expected gpu-local, none or the number of a NUMA node, not True"),
        ("tiers.host.numa", "-1", "not -1"),
        ("tiers.host.on_limit", "shrnk", "expected refuse, shrink or pageable, not 'shrnk'"),
        ("tiers.disk.readers", "true", "expected a whole number, not True"),
        ("tiers.disk.readers", "'8'", "expected a whole number, not '8'"),
        ("tiers.disk.readers", "8.5", "expected a whole number, not 8.5"),
        ("tiers.disk.readers", "0", "at least 1, not 0"),
        ("tiers.disk.readers", "257", "at most 256, not 257"),
        ("tiers.disk.direct", "yes", "expected auto, always or never, not 'yes'"),
        ("tiers.disk.direct", "true", "expected auto, always or never, not True"),
        ("tiers.disk.reader", "uring", "expected auto, io_uring or pread, not 'uring'"),
        ("tiers.disk.faults", "3", "expected a path, not 3"),
        ("model.path", "''", "a path is not empty"),
        ("model.path", r'"a\0b"', "a path holds no NUL character"),
        ("codecs.base", "fp8", "expected w2, fp4 or bf16, not 'fp8'"),
        ("codecs.delta", "fp4", "a second precision is not implemented yet; only null is accepted, not 'fp4'"),
        ("policy.eviction", "lfu", "sieve, slru or w-tinylfu, not 'lfu'"),
        ("policy.prefetch", "[layer-stream]", "prefetcher 'layer-stream' is not implemented yet; only [] is accepted"),
        ("policy.prefetch", "layer-stream", "expected a list, not 'layer-stream'"),
        ("miss.then", "fail", "expected exact, not 'fail'"),
        ("miss.tolerance", ".nan", "expected a whole number, not nan"),
        ("miss.tolerance", "-1", "at least 0, not -1"),
        ("miss.lookahead", "17", "at most 16, not 17"),
        ("miss.max_replays", "10000000000000000000000", "at most 64"),
        ("heat.warm_start", "1", "expected true or false, not 1"),
        ("heat.save_every_steps", "0", "at least 1, not 0"),
        ("metrics.port", "70000", "at most 65535, not 70000"),
        ("metrics.port", "'9100'", "expected a whole number, not '9100'"),
        ("heat", "null", "is empty; remove the key or give it a mapping"),
        ("heat", "[1]", "expected a mapping, not [1]"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_that_names_the_key(path: str, value: str, said: str) -> None:
    message = refusal(with_key(path, value))
    assert message.startswith(f"tiers.yaml: {path}: ")
    assert said in message
    assert "\n" not in message


def test_each_mistake_has_its_own_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load("tiers: {disk: {readers: 0}}\nmodell: {}\n")
    assert caught.value.problems == (
        'tiers.yaml: key "tiers.disk.path" is missing',
        "tiers.yaml: tiers.disk.readers: at least 1, not 0",
        'tiers.yaml: unknown key "modell"; did you mean "model"?',
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tiers.yaml: is empty; expected a mapping with the keys model, tiers,"),
        ("# only a comment\n", "tiers.yaml: is empty"),
        ("[1, 2]", "tiers.yaml: holds a list; expected a mapping"),
        ("hello", "tiers.yaml: holds only 'hello'; expected a mapping"),
        ("a: 1\nb: 2\na: 3\n", 'tiers.yaml:3:1: key "a" appears twice'),
        (SMALLEST + "miss: {mode: inline, mode: replay}", 'tiers.yaml:2:22: key "mode" appears twice'),
        ("a: !!python/object/apply:os.system [echo]", "tiers.yaml:1:4: tags are not supported"),
        ("a: !!int 3", "tiers.yaml:1:4: tags are not supported"),
        ("!!map {a: 1}", "tiers.yaml:1:1: tags are not supported"),
        ("<<: {a: 1}", "tiers.yaml:1:1: merge keys (<<) are not supported"),
        ("1: 2", "tiers.yaml:1:1: a key is a word, not 1"),
        ("? {a: 1}\n: 2", "tiers.yaml:1:3: a key is a word"),
        ("a: &a [*a]", "tiers.yaml:1:4: an alias refers to the value that holds it"),
        ("a: *missing", "tiers.yaml:1:4: not valid YAML: found undefined alias 'missing'"),
        ("a: [1", "tiers.yaml:1:6: not valid YAML"),
        ("a: 'x", "not valid YAML"),
        ("a: b: c", "tiers.yaml:1:5: not valid YAML"),
        ("a: \x07", "tiers.yaml: not valid YAML: unacceptable character #x0007"),
        ("--- {a: 1}\n--- {b: 2}\n", "tiers.yaml:2:1: not valid YAML: expected a single document"),
        ("%YAML 9.9\n---\na: 1", "tiers.yaml:1:1: not valid YAML"),
        ("[" * 200_000, f"nested more than {MAX_DEPTH} deep"),
        ("- " * 50_000 + "1", f"nested more than {MAX_DEPTH} deep"),
        ("{a: " * 50_000, f"nested more than {MAX_DEPTH} deep"),
        ("a: [" + "1," * (MAX_VALUES + 1) + "]", f"holds more than {MAX_VALUES} values"),
    ],
)
def test_hostile_yaml_is_refused_in_one_line(text: str, said: str) -> None:
    message = refusal(text)
    assert said in message
    assert "\n" not in message
    assert len(message) < 300


def test_a_billion_laughs_are_bounded() -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    message = refusal("\n".join(lines))
    assert f"holds more than {MAX_VALUES} values once its aliases are expanded" in message


def test_aliases_count_as_what_they_stand_for() -> None:
    hundred = f"a: &a [{', '.join('1' * 100)}]\n"
    parse_yaml(hundred + f"b: [{', '.join(['*a'] * 97)}]", name="x")
    with pytest.raises(ConfigError, match=f"x:1:.*: holds more than {MAX_VALUES} values once its aliases"):
        parse_yaml(hundred + f"b: [{', '.join(['*a'] * 100)}]", name="x")


def test_deep_nesting_through_aliases_is_bounded() -> None:
    lines = ["a0: &a0 [lol]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 100))]
    assert "deep once its aliases are expanded" in refusal("\n".join(lines))


def test_an_alias_may_be_used_where_it_stays_small() -> None:
    config = load("model: {path: &p /x}\ntiers: {disk: {path: *p}}\n")
    assert config.tiers.disk.path == config.model.path == Path("/x")


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "{a: on, b: 010, c: 0x1F, d: 0o17, e: 1_000, f: 1:30, g: .5, h: 1e3, i: True, j: ~, k: '8', l: 2024-01-01, m: -7}"  # fmt: skip # noqa: E501
    assert parse_yaml(text, name="x") == {
        "a": "on",
        "b": 10,
        "c": 31,
        "d": 15,
        "e": "1_000",
        "f": "1:30",
        "g": 0.5,
        "h": 1000.0,
        "i": True,
        "j": None,
        "k": "8",
        "l": "2024-01-01",
        "m": -7,
    }


@settings(max_examples=100, deadline=None)
@given(
    st.text(alphabet=st.sampled_from("ab:{}[],-&*!<>|?'\"#%@` \n\t0.~"), max_size=60) | st.text(max_size=60)
)
def test_any_text_is_accepted_or_refused_in_lines_that_name_the_file(text: str) -> None:
    problems: tuple[str, ...] = ()
    try:
        load(text)
    except ConfigError as error:
        problems = error.problems
    assert all(line.startswith("tiers.yaml") and "\n" not in line for line in problems)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "not UTF-8: byte 0xff at position 0"),
        (b"tiers: caf\xe9", "not UTF-8: byte 0xe9 at position 10"),
        (b"#" * (MAX_BYTES + 1), "larger than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "tiers.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_what_is_not_a_readable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"not a regular file|Is a directory"):
        load_config(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # must not wait for a writer
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config("/dev/zero")


def test_a_byte_order_mark_and_the_largest_file_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "tiers.yaml"
    body = b"\xef\xbb\xbf" + SMALLEST.encode()
    path.write_bytes(body + b"#" * (MAX_BYTES - len(body)))
    assert load_config(path).tiers.disk.path == tmp_path / "packs"


def test_relative_paths_start_at_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "tiers.yaml").write_text(
        "model: {path: ../m}\ntiers: {disk: {path: /abs}}\nheat: {path: h}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("conf/tiers.yaml")
    assert config.model.path == tmp_path / "conf" / ".." / "m"
    assert config.tiers.disk.path == Path("/abs")
    assert config.heat.path == tmp_path / "conf" / "h"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(with_key("model.path", "'~/m'")).model.path == tmp_path / "m"


def test_the_environment_names_the_file_only_where_the_command_line_does_not() -> None:
    named = {"ZIGGURAT_CONFIG": "/etc/tiers.yaml"}
    assert find_config(Path("mine.yaml"), named) == Path("mine.yaml")
    assert find_config(None, named) == Path("/etc/tiers.yaml")
    for empty in ({}, {"ZIGGURAT_CONFIG": ""}):
        with pytest.raises(ConfigError, match="no configuration: give -c FILE or set ZIGGURAT_CONFIG"):
            find_config(None, empty)


def test_sizes_of_ranks() -> None:
    device = load(with_key("tiers.device.size", "[1GiB, 5 rows]")).tiers.device
    assert device.size_of(1, 2) == Size("rows", Fraction(5))
    with pytest.raises(ConfigError, match="lists 2 sizes for 4 tensor-parallel ranks"):
        device.size_of(0, 4)
    assert load(with_key("tiers.device.size", "1GiB")).tiers.device.size_of(3, 4) == Size.parse("1GiB")


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("14GiB", Size("bytes", Fraction(14 << 30))),
        ("512 mib", Size("bytes", Fraction(512 << 20))),
        ("1.5 GB", Size("bytes", Fraction(1_500_000_000))),
        ("0.3 KiB", Size("bytes", Fraction(307))),
        ("17", Size("bytes", Fraction(17))),
        (17, Size("bytes", Fraction(17))),
        ("12.5%", Size("percent", Fraction(25, 2))),
        ("1 row", Size("rows", Fraction(1))),
        ("5rows", Size("rows", Fraction(5))),
        ("auto", Size("auto")),
    ],
)
def test_sizes(written: Any, size: Size) -> None:
    assert Size.parse(written) == size
    assert Size.parse(str(size)) == size


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.integers(0, 2**63 - 1).map(Size.parse),
        st.decimals(0, 100, places=3, allow_nan=False).map(lambda share: Size.parse(f"{share}%")),
        st.integers(0, 10**9).map(lambda rows: Size.parse(f"{rows} rows")),
    ),
    st.integers(1, 2**24).map(row_stride),
    st.integers(1, 100_000),
)
def test_a_size_survives_being_written_and_never_gives_more_than_it_says(
    size: Size, stride: int, total: int
) -> None:
    assert Size.parse(str(size)) == size
    rows = size.rows(stride=stride, total_rows=total)
    limit = {"bytes": size.amount / stride, "percent": size.amount * total / 100, "rows": size.amount}[
        size.kind
    ]
    assert rows <= limit < rows + 1


def test_a_share_is_exact_where_binary_fractions_are_not() -> None:
    assert Size.parse("29%").rows(stride=4096, total_rows=100) == 29
    assert Size.parse("0.7%").rows(stride=4096, total_rows=1000) == 7


def test_bytes_for_people() -> None:
    counts = (0, 1023, 1024, 7_077_888, (1 << 30) - 1, 1 << 40, -4096)
    assert [format_bytes(one) for one in counts] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "6.75 MiB",
        "1.00 GiB",
        "1.00 TiB",
        "-4.00 KiB",
    ]


def test_how_long_a_read_is_waited_for() -> None:
    assert load("tiers: {disk: {path: p, read_timeout: 30}}\n").tiers.disk.read_timeout == 30.0
    assert load("tiers: {disk: {path: p, read_timeout: 0.5}}\n").tiers.disk.read_timeout == 0.5
    assert load("tiers: {disk: {path: p, read_timeout: null}}\n").tiers.disk.read_timeout is None
    for wrong in ("0", "-1", "90000", '"30"', "true", ".inf"):
        with pytest.raises(ConfigError, match=r"tiers\.disk\.read_timeout"):
            load(f"tiers: {{disk: {{path: p, read_timeout: {wrong}}}}}\n")
