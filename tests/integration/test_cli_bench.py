"""`ziggurat bench` starts scripts of the checkout and says so where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ziggurat.integration.cli import bench
from ziggurat.integration.cli import main as cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ziggurat", "bench", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_the_checkout_is_found() -> None:
    assert (bench.checkout() / "bench" / "results_io.py").is_file()


def test_a_benchmark_gets_its_arguments_and_its_status_comes_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "bench" / "kernels.py"
    script.parent.mkdir()
    script.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    monkeypatch.setattr(bench, "checkout", lambda: tmp_path)
    assert run(monkeypatch, "kernels", "--shape", "demo", "--help") == 7
    assert "['--shape', 'demo', '--help']" in capfd.readouterr().out


def test_a_real_script_lists_its_options(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "harness", "--help") == 0
    assert "--coverage" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", "there is no benchmark 'nothing'"), ("kernels", "pip install -e .")]
)
def test_what_cannot_be_run_is_one_line(
    name: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(bench, "checkout", lambda: tmp_path)
    assert run(monkeypatch, name) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_without_a_name_the_benchmarks_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in bench.BENCHMARKS)
