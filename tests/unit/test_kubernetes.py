"""The manifests in configs/kubernetes: valid by Kubernetes' schemas, and in agreement with each other and the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from allreduced.client.environment import read_agent, read_launch
from allreduced.core.addresses import is_loopback
from allreduced.daemon.dns_discovery import parse_name
from allreduced.daemon.metrics.address import listen_address
from allreduced.daemon.metrics.hosts import is_allowed
from allreduced.daemon.settings import DEFAULT_PORT, Settings
from allreduced.daemon.settings_reader import parse

FOLDER = Path(__file__).parents[2] / "configs" / "kubernetes"
FILES = ("secret.yaml", "network-policy.yaml", "sidecar.yaml", "daemonset.yaml")
VERSION = "1.33"
"""Of Kubernetes: sidecars are in it for good."""
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
BESIDE_ARENAS = 256 << 20
"""Bytes of an agent without tensors, as docs/deployment.md has them."""

Manifest = dict[str, Any]


def manifests(*files: str) -> list[Manifest]:
    return [item for file in files for item in yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8"))]


def of_kind(kind: str, *files: str) -> list[Manifest]:
    return [item for item in manifests(*files) if item["kind"] == kind]


def pods(*files: str) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each thing that makes pods, and the template of the pod."""
    for item in manifests(*files):
        if "template" in item.get("spec", {}):
            yield item, item["spec"]["template"]


def containers(template: Manifest) -> list[Manifest]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def agents(*files: str) -> Iterator[tuple[Manifest, Manifest]]:
    for _, template in pods(*files):
        for container in containers(template):
            if container["name"] == "agent":
                yield template, container


def variables(container: Manifest) -> dict[str, str]:
    """Return the variables of a container; what comes from elsewhere has a value that fits."""
    return {item["name"]: item.get("value", "of the cluster") for item in container.get("env", ())}


def settings(container: Manifest) -> Settings:
    return parse(None, "", variables(container), {})


def size(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def test_all_files_are_looked_at() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("version", [VERSION, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("file", FILES)
def test_manifests_are_valid(file: str, version: str) -> None:
    for manifest in manifests(file):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_knows_what_is_wrong() -> None:
    (job,) = of_kind("Job", "sidecar.yaml")
    job["spec"]["template"]["spec"]["initContainers"][0]["restartPolicies"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolicies"):
        kubernetes_validate.validate(job, VERSION, strict=True)


@pytest.mark.parametrize("file", ["sidecar.yaml", "daemonset.yaml"])
def test_agents_find_each_other_by_the_headless_service_of_their_pods(file: str) -> None:
    (service,) = of_kind("Service", file)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    ((template, agent),) = agents(file)
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    name = parse_name(settings(agent).peers.dns)
    assert (name.host, name.port) == (service["metadata"]["name"], DEFAULT_PORT)
    assert [port["port"] for port in service["spec"]["ports"]] == [DEFAULT_PORT]
    assert agent["ports"][0] == {"name": "allreduced", "containerPort": DEFAULT_PORT}


def test_agents_reach_agents_only() -> None:
    (policy,) = of_kind("NetworkPolicy", "network-policy.yaml")
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    (inward,) = policy["spec"]["ingress"]
    outward, names = policy["spec"]["egress"]
    for rule, peers in ((inward, inward["from"]), (outward, outward["to"])):
        assert peers == [{"podSelector": {"matchLabels": chosen}}]
        assert rule["ports"] == [{"protocol": "TCP", "port": DEFAULT_PORT}]
    assert {port["port"] for port in names["ports"]} == {53}
    for template, _ in agents("sidecar.yaml", "daemonset.yaml"):
        assert chosen.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("file", ["sidecar.yaml", "daemonset.yaml"])
def test_the_memory_of_an_agent_holds_its_arenas(file: str) -> None:
    ((_, agent),) = agents(file)
    limit = size(agent["resources"]["limits"]["memory"])
    assert size(agent["resources"]["requests"]["memory"]) == limit
    assert 0 < settings(agent).limits.arena_bytes <= limit - BESIDE_ARENAS
    assert settings(agent).engine.threads == int(agent["resources"]["requests"]["cpu"])


@pytest.mark.parametrize("file", ["sidecar.yaml", "daemonset.yaml"])
def test_ranks_are_numbered_without_a_gap_and_wait_for_an_agent_that_is_there(file: str) -> None:
    (job,) = of_kind("Job", file)
    beside = job["spec"]["template"]["spec"]["containers"]
    ranks, sizes = [], set()
    for index in range(job["spec"]["completions"]):
        for container in beside:
            environ = variables(container)
            here = int(environ["ALLREDUCED_LOCAL_SIZE"])
            rank = index * here + int(environ["ALLREDUCED_LOCAL_RANK"])
            launch = read_launch({**environ, "ALLREDUCED_RANK": str(rank)})
            assert read_agent(environ, launch, socket=None, agent=None).require
            assert launch.local_size == len(beside)
            ranks.append(launch.rank)
            sizes.add(launch.size)
    assert ranks == list(range(len(ranks)))
    assert sizes == {len(ranks)}


def test_nothing_runs_with_more_rights_than_it_needs() -> None:
    for _, template in pods("sidecar.yaml", "daemonset.yaml"):
        pod = template["spec"].get("securityContext", {})
        assert not template["spec"]["automountServiceAccountToken"]
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            own = container["securityContext"]
            assert not own["allowPrivilegeEscalation"], container["name"]
            assert own["readOnlyRootFilesystem"], container["name"]
            assert own["capabilities"]["drop"] == ["ALL"], container["name"]
            assert "memory" in container["resources"]["limits"], container["name"]
            if container["name"] != "folder":  # makes the folder on the node ready, and ends
                assert {**pod, **own}["runAsNonRoot"], container["name"]


@pytest.mark.parametrize("file", ["sidecar.yaml", "daemonset.yaml"])
def test_probes_reach_the_agent_from_outside_of_the_pod(file: str) -> None:
    ((_, agent),) = agents(file)
    listen = listen_address(settings(agent).metrics.listen)
    assert not is_loopback(listen.host)  # kubelet dials the address of the pod
    (port,) = [port["containerPort"] for port in agent["ports"] if port["name"] == "metrics"]
    assert port == listen.port
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert agent[probe]["httpGet"] == {"path": path, "port": "metrics"}
        assert agent[probe]["timeoutSeconds"] <= agent[probe]["periodSeconds"]
    # It must not end an agent whose peers are not there yet.
    assert agent["startupProbe"]["exec"]["command"][:3] == ["allreduced", "status", "--local"]
    # What kubelet's Host header names: the address that its connection comes in at.
    assert is_allowed("10.244.1.7", local="10.244.1.7", names=())
    assert is_allowed("fd00::7", local="fd00::7", names=())


def test_the_secret_is_named_alike_and_is_empty_in_the_repository() -> None:
    (secret,) = of_kind("Secret", "secret.yaml")
    assert secret["stringData"] == {"secret": ""}
    for _, agent in agents("sidecar.yaml", "daemonset.yaml"):
        (wanted,) = [item for item in agent["env"] if item["name"] == "ALLREDUCED_SECRET"]
        assert wanted["valueFrom"]["secretKeyRef"] == {"name": secret["metadata"]["name"], "key": "secret"}


def test_jobs_that_share_a_user_need_secrets() -> None:
    ((_, agent),) = agents("daemonset.yaml")
    assert settings(agent).access.job_secrets == "required"
    (job,) = of_kind("Job", "daemonset.yaml")
    (rank,) = job["spec"]["template"]["spec"]["containers"]
    assert "ALLREDUCED_JOB_SECRET" in variables(rank)
