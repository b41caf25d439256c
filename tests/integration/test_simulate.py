"""`ziggurat simulate` and `ziggurat trace` on the committed trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from ziggurat.integration.cli import plot, simulate, trace
from ziggurat.integration.cli.failures import CliError
from ziggurat.residency.simulation.errors import SimulationError, TraceError
from ziggurat.residency.simulation.importers import import_trace
from ziggurat.residency.simulation.trace import read_trace, write_trace

DEMO = Path(__file__).parents[2] / "bench/traces/demo_moe.npz"

app = typer.Typer()
simulate.register(app)
trace.register(app)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sequences of the committed trace."""
    path = tmp_path_factory.mktemp("trace") / "short.npz"
    write_trace(path, read_trace(DEMO).part(0, 2, "short"))
    return path


def test_arenas_below_each_pool(short: Path) -> None:
    asked = ["simulate", short, "--policy", "lru,device", "--coverage", "25", "--pool", "shared"]
    arenas = ["--host", "25,100", "--host-policy", "lru,belady"]
    found = json.loads(run(*asked, *arenas, "--json").stdout)
    assert [line["policy"] for line in found["runs"]] == ["lru", "device"]
    for line in found["runs"]:
        assert [(one["size"], one["policy"]) for one in line["host"]] == [
            (25.0, "lru"), (25.0, "belady"), (100.0, "lru"), (100.0, "belady")
        ]  # fmt: skip
        assert {one["asked"] for one in line["host"]} == {line["all"]["rows"]}
        read = [one["read"] for one in line["host"]]
        assert read[0] >= read[1] > read[2] == read[3]
    page = run(*asked, *arenas, "--host-floor", "50").stdout
    assert "below device, batch 1, 25 %" in page
    assert "25 %, belady" in page
    assert "host" not in json.loads(run(*asked, "--json").stdout)["runs"][0]


def test_json_has_every_run_and_what_it_costs(short: Path) -> None:
    done = run(
        "simulate", short, "--policy", "lru,belady", "--coverage", "25,50", "--batch", "1,2", "--json",
        "--row-size", "1MiB", "--link", "50", "--resident-ms", "5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(r["policy"], r["batch"], r["coverage"]) for r in found["runs"]] == [
        (policy, batch, coverage)
        for batch in (1, 2)
        for policy in ("lru", "belady")
        for coverage in (25.0, 50.0)
    ]
    assert found["cost"] == {"row_bytes": 2**20, "link_gb_per_s": 50.0, "resident_ms": 5.0}
    for line in found["runs"]:
        for field in ("steps", "pairs", "hits", "rows"):
            assert line["cold"][field] + line["steady"][field] == line["all"][field]
        assert line["all"]["pairs"] == 2 * 512 * 24
        assert line["steady"]["bytes_per_step"] == pytest.approx(
            line["steady"]["rows_per_step"] * 2**20, rel=1e-3
        )
        rows = line["steady"]["rows_per_step"]
        assert line["step_ms"]["mean"] == pytest.approx(1.08 * (5 + rows * 2**20 / 50e6), rel=0.03)


def test_the_table_names_policies_and_slots(short: Path) -> None:
    done = run("simulate", short, "--policy", "sieve,device", "--coverage", "50", "--pool", "shared")
    assert done.exit_code == 0, done.output
    assert "50 % = 96 slots" in done.stdout
    for name in ("sieve", "device"):
        assert name in done.stdout


def test_rounds_are_less_strict_than_events(short: Path) -> None:
    arguments = ("simulate", short, "--policy", "lfu-decay", "--coverage", "25", "--pool", "shared", "--json")
    atomic, rounds = (json.loads(run(*arguments, *more).stdout)["runs"][0] for more in ((), ("--rounds",)))
    assert atomic["all"]["hits"] != rounds["all"]["hits"]


def test_prompts_are_scans(short: Path) -> None:
    done = run("simulate", short, "--policy", "lru", "--coverage", "50", "--prompt", "500", "--json")
    (line,) = json.loads(done.stdout)["runs"]
    assert line["all"]["steps"] == 2 * 13
    assert line["all"]["decode_pairs"] == 2 * 12 * 24


def test_a_plot_is_a_png_of_both_batches(short: Path, tmp_path: Path) -> None:
    done = run(
        "simulate", short, "--policy", "lru,belady", "--batch", "1,2", "--plot", tmp_path / "p/out.png"
    )
    assert done.exit_code == 0, done.output
    image = pytest.importorskip("PIL.Image")
    with image.open(tmp_path / "p/out.png") as drawn:
        pixels = np.asarray(drawn.convert("RGB"))
    assert pixels.shape[2] == 3
    colours = {tuple(colour) for colour in pixels.reshape(-1, 3)[::7].tolist()}
    assert (0, 0x72, 0xB2) in colours, "the line of the first policy"
    assert pixels.shape[1] > 1.5 * pixels.shape[0], "two panels side by side"


def test_a_plot_that_cannot_be_written_is_a_refusal(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    panel = plot.Panel("t", "x", "y", (plot.Line("a", ((1.0, 5.0), (2.0, 7.0))),))
    (tmp_path / "file").touch()
    with pytest.raises(CliError, match="cannot be written"):
        plot.draw_panels(tmp_path / "file/out.png", "t", [panel])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--policy", "lruu"], CliError, "there is no 'lruu'; there are arc"),
        (["--policy", ","], CliError, "names nothing"),
        (["--coverage", "half"], CliError, "'half' is no number"),
        (["--coverage", "0"], CliError, "not greater than 0"),
        (["--coverage", "101"], SimulationError, "coverage of 101"),
        (["--batch", "1.5"], CliError, "fraction of a sequence"),
        (["--pool", "own"], CliError, "layer or shared"),
        (["--host", "0"], CliError, "not greater than 0"),
        (["--host", "101"], CliError, "more than all experts"),
        (["--host", "25", "--host-policy", "next-use"], CliError, "no 'next-use' for an arena"),
        (["--row-size", "25%"], CliError, "no number of bytes"),
        (["--row-size", "big"], CliError, "--row-size"),
        (["--half-life", "-1"], CliError, "half-life is -1"),
        (["--policy", "device"], CliError, "--pool shared"),
    ],
)
def test_wrong_options_are_one_line(
    short: Path, arguments: list[str], error: type[Exception], message: str
) -> None:
    done = run("simulate", short, *arguments)
    assert isinstance(done.exception, error)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)


def test_what_is_left_out_is_said(short: Path) -> None:
    done = run("simulate", short, "--policy", "lru,device", "--coverage", "50")
    assert done.exit_code == 0, done.output
    assert "device is left out" in done.stderr
    assert (
        "device is left out"
        not in run("simulate", short, "--policy", "lru,device", "--pool", "shared").output
    )


def test_info_tells_sizes_and_repetition() -> None:
    done = run("trace", "info", DEMO, "--json")
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["routed_pairs"] == 32 * 512 * 6 * 4
    assert len(facts["by_layer"]) == 6
    assert "routed_pairs: 393216" in run("trace", "info", DEMO).stdout


def test_info_of_what_is_no_trace_is_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"nothing")
    done = run("trace", "info", tmp_path / "x.npz")
    assert isinstance(done.exception, TraceError)


def test_import_writes_our_own_format(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", ids=np.arange(24).reshape(2, 3, 2, 2) % 7, num_experts=8)
    done = run("trace", "import", tmp_path / "a.npz", "-o", tmp_path / "b.npz")
    assert done.exit_code == 0, done.output
    assert "2 sequences, 6 tokens, 2 layers" in done.stdout
    again = read_trace(tmp_path / "b.npz")
    assert np.array_equal(again.ids, import_trace(tmp_path / "a.npz").ids)
    assert again.experts == 8
