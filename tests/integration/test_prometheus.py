"""A real Prometheus takes the rules, scrapes a service at work, and has an answer to every query of the dashboard."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lanes.prometheus import PrometheusError, prometheus_folder
from support.fake_moe import FakeModel, make_packs
from support.processes import running
from support.server import free_port
from support.serving_tiers import serving_tiers
from ziggurat.integration.observability import dashboard
from ziggurat.residency.metric_specs import METRICS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "integration" / "observability"
RULES = FOLDER / "prometheus" / "rules.yml"
# In place of Grafana's variables.
VARIABLES = {"$job": ".*", "$instance": ".*", "$rank": ".*", "$__rate_interval": "5s"}
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def programs() -> Path:
    try:
        return prometheus_folder()
    except PrometheusError as error:
        pytest.skip(f"PROMETHEUS IS NOT TESTED: {error}")


def promtool(programs: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(programs / "promtool"), *arguments],
        cwd=RULES.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_configuration_and_rules(programs: Path) -> None:
    assert "1 rule files found" in promtool(programs, "check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool(programs, "check", "rules", "rules.yml")


def test_the_rules_pass_their_tests(programs: Path) -> None:
    promtool(programs, "test", "rules", "rules_test.yml")


class Api:
    """The HTTP API of one Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as reply:
            answer = json.loads(reply.read())
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series that an instant query finds."""
        result = self.get("query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in result]


@pytest.fixture(scope="module")
def api(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A Prometheus that has scraped a service under load for a while."""
    work = tmp_path_factory.mktemp("prometheus")
    (work / "packs").mkdir()
    with serving_tiers(make_packs(work / "packs"), FakeModel.make()) as metrics:
        config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
        config["rule_files"] = [str(RULES)]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [metrics.split("/")[2]]}]
        (work / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        port = free_port()
        command = [
            str(programs / "prometheus"),
            f"--config.file={work / 'prometheus.yml'}",
            f"--storage.tsdb.path={work / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        with running(command, {"PATH": "/usr/bin:/bin"}) as child:
            api = Api(f"http://127.0.0.1:{port}")
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not ready(api):
                assert child.process.poll() is None, child.tail()
                assert time.monotonic() < deadline, child.tail()
                time.sleep(0.25)
            yield api


def ready(api: Api) -> bool:
    """Whether every recording rule has a value and every histogram has counted something twice."""
    recorded = [rule["record"] for group in rules() for rule in group["rules"] if "record" in rule]
    wanted = [*recorded, "rate(ziggurat_fetch_seconds_count[5s]) > 0", "rate(ziggurat_passes_total[5s]) > 0"]
    try:
        return all(api.query(expression) for expression in wanted)
    except OSError:
        return False


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return groups


def test_every_metric_arrives(api: Api) -> None:
    (target,) = api.get("targets")["activeTargets"]
    assert target["health"] == "up"
    names = set(api.get("label/__name__/values"))
    for spec in METRICS:
        assert (f"{spec.name}_bucket" if spec.kind == "histogram" else spec.name) in names


QUERIES = list(dashboard.queries())


@pytest.mark.parametrize(
    ("title", "expression"), QUERIES, ids=[f"{title}-{i}" for i, (title, _) in enumerate(QUERIES)]
)
def test_every_query_of_the_dashboard_returns_data(api: Api, title: str, expression: str) -> None:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression
    found = api.query(expression)
    assert found, expression
    assert any(math.isfinite(value) for _, value in found), (expression, found)


def test_the_rules_run_and_record(api: Api) -> None:
    groups = api.get("rules")["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) == sum(len(group["rules"]) for group in rules())
    assert {rule["health"] for rule in evaluated} == {"ok"}, evaluated
    for name in ("ziggurat:zero_miss_steps:ratio_rate5m", "ziggurat:tier_hits:ratio_rate5m"):
        assert all(0.0 <= value <= 1.0 for _, value in api.query(name))
    assert api.query("ziggurat:repeated_steps:ratio_rate5m > 0")


def test_the_variables_of_the_dashboard_find_something(api: Api) -> None:
    for variable in dashboard.dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert match
            selector = match[1].replace("$job", ".*").replace("$instance", ".*")
            assert {labels[match[2]] for labels, _ in api.query(selector)}


def test_the_committed_dashboard_is_what_the_module_gives() -> None:
    committed = (FOLDER / "grafana" / "ziggurat.json").read_text(encoding="utf-8")
    assert committed == dashboard.text(), (
        "run python -m ziggurat.integration.observability.dashboard > integration/observability/grafana/ziggurat.json"
    )


def test_panels_do_not_overlap_and_take_their_source_from_the_variable() -> None:
    model = dashboard.dashboard()
    taken: set[tuple[int, int]] = set()
    for panel in model["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]
    assert len({panel["id"] for panel in model["panels"]}) == len(model["panels"])


def test_every_alert_has_its_line_in_the_docs() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    anchors = {line.removeprefix("### ").lower() for line in page.splitlines() if line.startswith("### ")}
    alerts = [rule for group in rules() for rule in group["rules"] if "alert" in rule]
    assert len(alerts) >= 6
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["alert"].lower() in anchors, f"{rule['alert']} has no section in docs/operations.md"
    tested = (RULES.parent / "rules_test.yml").read_text(encoding="utf-8")
    assert all(f"alertname: {rule['alert']}" in tested for rule in alerts)
