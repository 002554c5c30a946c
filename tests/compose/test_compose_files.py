"""Every profile of the compose file: valid, started by command lines that our own parsers take, safe to run."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import jsonschema
import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema
from support.compose import (
    FOLDER,
    OWN_IMAGE,
    PROFILES,
    REPOSITORY,
    config_of,
    document,
    own_services,
    seconds,
    services,
    variables,
)

from coordinator.main import GRACE_S, LAST_WORDS_S
from kvrelay.cli import health
from kvrelay.cli.role_names import ROLES
from kvrelay.config import WorkerConfig
from kvrelay.models.catalog import find

PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*")
SECRET = re.compile(r"PASSW|SECRET|TOKEN|CREDENTIAL|PRIVATE|API_?KEY", re.IGNORECASE)
WITHOUT_HEALTH = {
    "model": "ends by itself; others wait for its success",
    "collector": "its image holds one program, which cannot ask itself",
}
EVERY = sorted(services())
OWN = sorted(own_services())


def roles(profile: str = "") -> dict[str, dict[str, Any]]:
    return {name: s for name, s in own_services(profile).items() if s["command"][0] in ROLES}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_valid_by_the_compose_specification(profile):
    whole = document() | {"services": services(profile)}
    jsonschema.validate(whole, get_builtin_schema("vendor.compose-spec"))
    for name, service in whole["services"].items():
        for needed in service.get("depends_on", {}):
            assert needed in whole["services"], f"{name} waits for {needed}, which {profile} does not start"
        for space in ("pid", "ipc"):
            shared = str(service.get(space, "")).partition("service:")[2]
            assert not shared or shared in whole["services"]


def test_the_schema_refuses_what_is_no_compose_file():
    whole = document() | {"services": {"x": {"image": "a:1.0.0", "stop_grace": "5s"}}}
    with pytest.raises(jsonschema.ValidationError, match="stop_grace"):
        jsonschema.validate(whole, get_builtin_schema("vendor.compose-spec"))


@pytest.mark.parametrize("name", EVERY)
def test_every_service_has_a_profile_a_pinned_image_a_user_and_a_health_check(name):
    service = services()[name]
    assert service["profiles"], "would be started with any profile"
    assert set(service["profiles"]) <= set(PROFILES)
    assert PINNED.fullmatch(service["image"]), service["image"]
    user, group = service["user"].split(":")
    assert int(user) > 0 and int(group) > 0
    assert service["cap_drop"] == ["ALL"] and service["read_only"] is True
    assert "privileged" not in service
    assert seconds(service["stop_grace_period"]) > 0
    if name in WITHOUT_HEALTH:
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["healthcheck"]["test"][0] == "CMD"
        assert {"interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])


def test_the_default_is_one_coordinator_two_workers_of_each_role_and_the_small_model():
    assert variables()["COMPOSE_PROFILES"] == "cpu"
    assert [s["command"][0] for s in own_services("cpu").values()] == [
        "models", "coordinator", "prefill", "prefill", "decode", "decode",
    ]  # fmt: skip
    assert find(variables()["KVRELAY_MODEL"])


@pytest.mark.parametrize("name", OWN)
def test_every_command_line_is_one_that_our_parsers_take(name):
    service = own_services()[name]
    command = service["command"]
    if command[0] not in ROLES:
        assert command[:2] == ["models", "pull"] and find(command[2])
        return
    config = config_of(service)
    check = service["healthcheck"]["test"]
    assert check[:3] == ["CMD", "kvrelay", "health"]
    asked = health.build_parser().parse_args(check[3:]).target
    host, port = config.listen.rsplit(":", 1)
    assert asked == (f"127.0.0.1:{port}" if host == "0.0.0.0" else config.listen)
    assert asked.rsplit(":", 1)[1] == port
    assert config.model == variables()["KVRELAY_MODEL"]


@pytest.mark.parametrize("name", [n for n in OWN if own_services()[n]["command"][0] in ROLES])
def test_every_process_has_more_time_to_stop_than_its_grace(name):
    service = own_services()[name]
    config = config_of(service)
    grace = config.drain_grace_s if isinstance(config, WorkerConfig) else GRACE_S + LAST_WORDS_S
    assert seconds(service["stop_grace_period"]) >= grace + 5


@pytest.mark.parametrize("profile", ["cpu", "gpu", "gpu-infiniband"])
def test_workers_wait_for_their_coordinator_and_are_reached_by_the_name_that_they_tell(profile):
    present = roles(profile)
    (coordinator,) = (n for n, s in present.items() if s["command"][0] == "coordinator")
    for name, service in present.items():
        assert service["depends_on"]["model"] == {"condition": "service_completed_successfully"}
        if name == coordinator:
            continue
        config = config_of(service)
        assert isinstance(config, WorkerConfig)
        if service.get("network_mode") == "host":
            assert config.coordinators == (config_of(present[coordinator]).listen,)
            assert config.advertise == ""
            continue
        assert config.coordinators == (f"{coordinator}:50061",)
        assert config.advertise == f"{name}:50071"
        assert config.worker_id == name
        assert service["depends_on"][coordinator] == {"condition": "service_healthy"}
        assert service["networks"] == {"kvrelay": {"aliases": [config.role.value]}}


def test_two_processes_of_one_network_never_listen_on_one_address():
    configs = [config_of(service) for service in roles("gpu-infiniband").values()]
    addresses = [address for config in configs for address in (config.listen, config.metrics)]
    assert len(set(addresses)) == len(addresses) == 6


@pytest.mark.parametrize("profile", ["gpu", "gpu-infiniband"])
def test_every_gpu_worker_has_a_gpu_of_its_own_and_shares_what_cuda_ipc_needs(profile):
    workers = {n: s for n, s in roles(profile).items() if s["command"][0] != "coordinator"}
    taken = []
    for service in workers.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
        taken += device["device_ids"]
        assert service["pid"] == service["ipc"] == "service:namespace"
        assert service["depends_on"]["namespace"] == {"condition": "service_healthy"}
        assert service["init"] is False, "an init of its own would not be process 1"
    assert len(taken) == len(set(taken)) == len(workers)
    assert services(profile)["namespace"]["ipc"] == "shareable"


def test_infiniband_is_reached_with_the_hosts_network_its_devices_and_pinned_memory():
    for name, service in roles("gpu-infiniband").items():
        assert service["network_mode"] == "host"
        if name.startswith("coordinator"):
            continue
        assert service["devices"] == ["/dev/infiniband:/dev/infiniband"]
        assert service["cap_add"] == ["IPC_LOCK"]
        assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}


def test_no_secret_is_in_the_files_and_ports_are_open_to_this_host_only():
    for path in (FOLDER / ".env", FOLDER / "compose.yaml", FOLDER / "Dockerfile"):
        found = [
            line for line in path.read_text().splitlines() if SECRET.search(line) and not line.lstrip().startswith("#")
        ]
        assert found == [], path
    for service in services().values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_every_folder_and_file_that_is_mounted_exists():
    volumes = document()["volumes"]
    for service in services().values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in volumes


def test_images_are_built_from_stages_that_exist_and_from_all_our_packages():
    text = (FOLDER / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    for service in own_services().values():
        assert service["image"] == f"{OWN_IMAGE}{service['build']['target']}:{variables()['KVRELAY_VERSION']}"
        assert service["build"]["target"] in stages
        assert (REPOSITORY / service["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")
    for stage in ("coordinator", "worker"):
        final = text.partition(f" AS {stage}\n")[2].partition("\nFROM ")[0]
        assert re.search(r"^USER 10001:10001$", final, re.MULTILINE)
        assert PINNED.fullmatch(variables()["PYTHON_IMAGE"])
    assert f"ARG PYTHON_IMAGE={variables()['PYTHON_IMAGE']}\n" in text
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert project["project"]["version"] == variables()["KVRELAY_VERSION"]
    copied = re.findall(r"^COPY (\w+)/ /src/\1/$", text, re.MULTILINE)
    assert copied == packages
    admitted = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert set(packages) <= {line[1:] for line in admitted if line.startswith("!")}
