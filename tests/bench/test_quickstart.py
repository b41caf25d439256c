"""The README's GPU quick start is made of commands that exist and a configuration that loads."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from bench.h200 import quickstart
from bench.served import free_port
from ziggurat.residency.config import TiersConfig

README = (quickstart.ROOT / "README.md").read_text(encoding="utf-8")


def test_the_commands_of_the_readme() -> None:
    lines = quickstart.lines_of(quickstart.section(README))
    words = [shlex.split(line) for line in lines]
    assert [line[:2] for line in words[:3]] == [
        ["ziggurat", "doctor"],
        ["ziggurat", "plan"],
        ["ziggurat", "serve"],
    ]
    assert [line[0] for line in words[3:]] == ["curl", "curl"]
    for line in words[:3]:
        assert line[line.index("-c") + 1] == "tiers.yaml"
    assert all((quickstart.ROOT / line[2]).is_dir() for line in words[1:3])
    assert "-d" in words[3]


def test_the_configuration_of_the_readme_is_for_a_gpu() -> None:
    tiers = TiersConfig.from_mapping(yaml.safe_load(quickstart.tiers_of(quickstart.section(README))))
    assert tiers.tiers.device.device != "cpu"
    assert str(tiers.tiers.device.size) == "25%"


def test_lines_that_go_on_and_sections_that_end() -> None:
    text = quickstart.section(
        f"# x\n\n{quickstart.HEADING}\n\n```\n$ one \\\n    two\n$ three\n```\n\n## Next\n$ four\n"
    )
    assert [shlex.split(line) for line in quickstart.lines_of(text)] == [["one", "two"], ["three"]]
    with pytest.raises(ValueError, match="no section"):
        quickstart.section("# x\n")
    with pytest.raises(ValueError, match="no YAML"):
        quickstart.tiers_of(text)


def test_commands_run_in_order_until_one_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert quickstart._run(["echo first > file", "cat file"], tmp_path) == 0
    assert "first\n" in capfd.readouterr().out
    assert quickstart._run(["false | cat", "touch never"], tmp_path) == 1
    assert not (tmp_path / "never").exists()


def test_a_server_runs_while_later_lines_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in = tmp_path / "bin" / "ziggurat"
    stand_in.parent.mkdir()
    stand_in.write_text(
        "#!/usr/bin/env python3\n"
        "from http.server import BaseHTTPRequestHandler, HTTPServer\n"
        "class Handler(BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "        self.wfile.write(b'alive in ' + __import__('os').getcwd().encode())\n"
        f"HTTPServer(('127.0.0.1', {(port := free_port())}), Handler).serve_forever()\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(stand_in.parent), prepend=":")
    monkeypatch.setattr(quickstart, "PORT", port)
    ask = f"python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/x').read())\""
    assert quickstart._run(["ziggurat serve model", ask], tmp_path) == 0
    assert f"alive in {tmp_path}" in capfd.readouterr().out
