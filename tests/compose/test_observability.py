"""Dashboards and scraping: what they ask for is what our processes offer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from support.compose import FOLDER, config_of, own_services, services

from kvrelay.cli.role_names import ROLES
from kvrelay.gaps import Cause
from kvrelay.telemetry import names

OBSERVABILITY = FOLDER / "observability"
DASHBOARDS = sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json"))
METRIC = re.compile(r"\bkvrelay_\w+")
SUFFIX = re.compile(r"_(?:total|bucket|sum|count)$")
GROWING = re.compile(r"(?:rate|increase)\((\w+)")
OFFERED = {value for name, value in vars(names).items() if name.startswith("PROM_")}


def read(path: str) -> Any:
    return yaml.safe_load((OBSERVABILITY / path).read_text())


def questions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_a_dashboard_asks_for_metrics_that_there_are(path):
    dashboard = json.loads(path.read_text())
    asked = questions(dashboard)
    assert asked
    for question in asked:
        for name in METRIC.findall(question):
            assert name in OFFERED or SUFFIX.sub("", name) in OFFERED, f"{name} is no metric of ours"
        for name in GROWING.findall(question):
            assert SUFFIX.search(name), f"{name} is no counter"
        assert question.count("(") == question.count(")") and question.count("{") == question.count("}")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_a_dashboard_can_be_provisioned(path):
    dashboard = json.loads(path.read_text())
    known = {source["uid"] for source in read("grafana/provisioning/datasources/kvrelay.yaml")["datasources"]}
    assert dashboard["uid"] == f"kvrelay-{path.stem}"
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} <= known
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_time_between_tokens_first_token_pools_and_transfers_have_a_dashboard_each():
    assert [p.stem for p in DASHBOARDS] == ["pools", "requests", "tbt", "transfers"]
    used = " ".join(question for path in DASHBOARDS for question in questions(json.loads(path.read_text())))
    for name in (names.PROM_GAP, names.PROM_GAP_CAUSE, names.PROM_TTFT, names.PROM_BLOCKS, names.PROM_TRANSFERS):
        assert name in used


def test_dashboards_choose_and_group_by_labels_that_there_are():
    labels = {"le", "cause", "outcome", "worker", "role", "state", "event", "process", "job"}
    scraped = {
        rule["target_label"] for job in read("prometheus.yaml")["scrape_configs"] for rule in job["relabel_configs"]
    }
    assert scraped == {"process"}, "role is the label of a worker's metrics already"
    for path in DASHBOARDS:
        for question in questions(json.loads(path.read_text())):
            grouped = {name for group in re.findall(r"by \(([^)]*)\)", question) for name in group.split(", ")}
            chosen = set(re.findall(r"[{,] ?(\w+)=", question))
            assert grouped | chosen <= labels, question


def test_causes_that_dashboards_name_are_causes():
    for path in DASHBOARDS:
        for question in questions(json.loads(path.read_text())):
            for selected in re.findall(r'cause=~?"([^"]+)"', question):
                assert set(selected.split("|")) <= {cause.value for cause in Cause}


def test_dashboards_are_where_grafana_looks():
    (provider,) = read("grafana/provisioning/dashboards/kvrelay.yaml")["providers"]
    grafana = services("observability")["grafana"]
    mounts = dict(mount.split(":")[:2] for mount in grafana["volumes"])
    assert (FOLDER / "observability/grafana/dashboards").samefile(
        next(FOLDER / source for source, target in mounts.items() if target == provider["options"]["path"])
    )
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/tbt.json"


def test_traces_go_from_the_collector_to_a_service_that_there_is():
    collector = read("collector.yaml")
    (pipeline,) = collector["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) <= set(collector[kind])
    assert collector["exporters"]["otlp/jaeger"]["endpoint"] == "jaeger:4317"
    assert "jaeger" in services("observability")


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_every_process_is_scraped_under_the_name_of_its_role(profile):
    (ours,) = (job for job in read("prometheus.yaml")["scrape_configs"] if job["job_name"] == "kvrelay")
    (scraped,) = ours["dns_sd_configs"]
    for name, service in own_services(profile).items():
        if service["command"][0] not in ROLES:
            continue
        assert config_of(service).metrics == f"0.0.0.0:{scraped['port']}"
        networks = service["networks"]
        reached_as = {name, *(networks["kvrelay"]["aliases"] if isinstance(networks, dict) else ())}
        assert reached_as & set(scraped["names"])
