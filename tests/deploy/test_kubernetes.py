"""deploy/kubernetes against the published schemas of Kubernetes, and against what svdq needs. No cluster is asked.

KEDA's objects have no schema in a Python package: the job in a ScaledJob is checked as a Job of Kubernetes', and the
fields around it against the names in KEDA's scaledjob_types.go. What KEDA's own schema asks for besides has its test.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from starlette.routing import Route

from svdq.cli.serve.access import OPEN_PATHS, ServeOptions
from svdq.cli.serve.api import routes
from svdq.cli.serve.app import GRACE_S
from svdq.producer.settings import ENV_PREFIX, Settings
from svdq.worker.launcher.launcher import STOP_S
from svdq.worker.launcher.torchrun import KILL_S

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
#: The oldest Kubernetes that the objects are for, and the newest of which there is a schema.
VERSIONS = ["1.31.0", "1.37.0"]
VARIANTS = ["always", "night", "bursts"]
FOLDERS = ["base", "serve", *VARIANTS]

SCALED_JOB_FIELDS = {
    *("jobTargetRef", "pollingInterval", "successfulJobsHistoryLimit", "failedJobsHistoryLimit", "rollout"),
    *("envSourceContainerName", "minReplicaCount", "maxReplicaCount", "scalingStrategy", "triggers"),
}
SCALING_STRATEGY_FIELDS = {
    *("strategy", "customScalingQueueLengthDeduction", "customScalingRunningJobPercentage"),
    *("pendingPodConditions", "multipleScalersCalculation"),
}


def read(folder: str) -> Iterator[dict]:
    """The objects of a folder."""
    for path in sorted((KUBERNETES / folder).glob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text())


def find(folder: str, kind: str, name: str | None = None) -> dict:
    [found] = [thing for thing in read(folder) if thing["kind"] == kind and name in {None, thing["metadata"]["name"]}]
    return found


def pods() -> dict[str, dict]:
    """The worker's pods, as each variant has them."""
    night, bursts = find("night", "CronJob"), find("bursts", "ScaledJob")
    return {
        "always": find("always", "Deployment")["spec"]["template"],
        "night": night["spec"]["jobTemplate"]["spec"]["template"],
        "bursts": bursts["spec"]["jobTargetRef"]["template"],
    }


def validate(thing: dict, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_as_the_published_schemas_have_them(version: str) -> None:
    things = [thing for folder in FOLDERS for thing in read(folder)]
    kinds = {thing["kind"] for thing in things}
    assert {"StatefulSet", "Deployment", "CronJob", "PodDisruptionBudget", "ScaledJob", "NetworkPolicy"} <= kinds
    for thing in things:
        if thing["kind"] == "ScaledJob":
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            validate({**job, "spec": thing["spec"]["jobTargetRef"]}, version)
        elif not thing["apiVersion"].startswith("keda.sh/"):
            validate(thing, version)

    wrong = find("always", "Deployment")
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(Exception, match="terminationGracePeriod"):
        validate(wrong, version)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl, whose kustomize builds the objects")
@pytest.mark.parametrize("variant", ["base", *VARIANTS])
def test_kustomize_builds_them(variant: str) -> None:
    done = subprocess.run(["kubectl", "kustomize", str(KUBERNETES / variant)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    built = list(yaml.safe_load_all(done.stdout))
    kinds = [thing["kind"] for thing in built]
    assert "ConfigMap" in kinds
    folders = {"base", variant, *(["serve"] if variant == "bursts" else [])}
    assert len(kinds) == 1 + sum(len(list(read(folder))) for folder in folders)
    for thing in built:
        assert thing["metadata"].get("namespace", "svdq") == "svdq"
        if not thing["apiVersion"].startswith("keda.sh/"):
            validate(thing, VERSIONS[-1])
    if variant != "base":
        # The name by which the pods ask for their settings is the one that they have.
        [settings] = [thing["metadata"]["name"] for thing in built if thing["kind"] == "ConfigMap"]
        assert f"name: {settings}\n" in done.stdout.partition("envFrom:")[2].partition("image:")[0]
        assert "image: svdq-worker:" in done.stdout


def test_the_three_workers_differ_in_how_they_are_started_only() -> None:
    found = pods()
    for pod in found.values():
        pod["spec"].pop("restartPolicy", None)
        assert pod["spec"]["containers"][0].pop("args")[0] == "worker"
    assert found["always"] == found["night"] == found["bursts"]


def test_commands_are_commands_of_ours(check_command: Callable[[list[str]], None]) -> None:
    for pod in pods().values():
        [container] = pod["spec"]["containers"]
        check_command(container["args"])
        command = container["readinessProbe"]["exec"]["command"]
        assert command[0] == "svdq"
        check_command(command[1:])


def test_a_stop_takes_less_time_than_kubernetes_grants() -> None:
    for pod in pods().values():
        assert pod["spec"]["terminationGracePeriodSeconds"] > STOP_S + KILL_S


def test_every_volume_is_mounted_and_every_claim_is_there() -> None:
    claims = {thing["metadata"]["name"] for thing in read("base") if thing["kind"] == "PersistentVolumeClaim"}
    for pod in pods().values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]} == set(volumes)
        asked = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert asked == claims


def test_the_page_is_probed_as_it_answers(check_command: Callable[[list[str]], None]) -> None:
    pod = find("serve", "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    check_command(container["args"])
    words = container["args"]
    hosts = tuple(words[place + 1] for place, word in enumerate(words) if word == "--allow-host")
    options = ServeOptions(host="0.0.0.0", token="x", allowed_hosts=hosts)
    assert options.accepts_host("10.1.2.3")  # kubelet asks the address of the pod
    assert options.accepts_host(find("serve", "Service")["metadata"]["name"])
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/health/live", "readinessProbe": "/health", "livenessProbe": "/health/live"}
    assert set(paths.values()) <= set(OPEN_PATHS)
    [port] = container["ports"]
    assert port["containerPort"] == options.port
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["SVDQ_SERVE_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "svdq-serve", "key": "token"}
    assert pod["terminationGracePeriodSeconds"] > GRACE_S
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_redis_keeps_what_it_has_accepted() -> None:
    """A power cut must not lose the jobs of the last second."""
    text = " ".join((KUBERNETES / "base/redis.yaml").read_text().replace("\\", "").split())
    assert "--appendonly yes --appendfsync always --maxmemory 614mb --maxmemory-policy noeviction" in text
    assert "limits: # maxmemory is 60% of it: Redis forks to rewrite its file. memory: 1Gi" in text


def test_secrets_are_named_and_not_given() -> None:
    things = [thing for folder in FOLDERS for thing in read(folder)]
    assert "Secret" not in {thing["kind"] for thing in things}
    for pod in pods().values():
        variables = {variable["name"]: variable for variable in pod["spec"]["containers"][0]["env"]}
        assert variables["SVDQ_REDIS_URL"]["valueFrom"]["secretKeyRef"] == {"name": "svdq-redis", "key": "url"}
        assert "HF_TOKEN" not in variables  # the init container has it, which alone fetches
        assert "HF_TOKEN" in {variable["name"] for variable in pod["spec"]["initContainers"][0]["env"]}
    texts = "".join(path.read_text() for path in KUBERNETES.rglob("*.yaml"))
    names = set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", texts))
    assert names <= {f"{ENV_PREFIX}{field.upper()}" for field in Settings.model_fields}


def test_keda_asks_the_server_that_is_deployed_beside_it() -> None:
    spec = find("bursts", "ScaledJob")["spec"]
    assert set(spec) <= SCALED_JOB_FIELDS
    assert set(spec["scalingStrategy"]) <= SCALING_STRATEGY_FIELDS
    [trigger] = spec["triggers"]
    assert trigger["type"] == "metrics-api"
    assert set(trigger["metadata"]) == {"url", "valueLocation", "targetValue", "authMode"}
    url = urlsplit(trigger["metadata"]["url"])
    service = find("serve", "Service")
    assert (url.hostname or "").split(".")[:2] == [service["metadata"]["name"], "svdq"]
    assert (url.port or 80) == service["spec"]["ports"][0]["port"]
    [container] = find("serve", "Deployment")["spec"]["template"]["spec"]["containers"]
    assert url.hostname in container["args"], "it is answered under this name"
    assert url.path in {route.path for route in routes() if isinstance(route, Route)}
    authentication = find("bursts", "TriggerAuthentication")
    assert trigger["authenticationRef"] == {"name": authentication["metadata"]["name"]}
    secret = {"name": "svdq-serve", "key": "token"}
    assert authentication["spec"]["secretTargetRef"] == [{"parameter": "token", **secret}]
    assert "../serve" in (KUBERNETES / "bursts/kustomization.yaml").read_text()


def test_keda_is_told_what_kubernetes_itself_would_fill_in() -> None:
    """Found with the schema of the npm package @kubernetes-models/keda 0.4.2."""
    job = find("bursts", "ScaledJob")["spec"]["jobTargetRef"]
    ports = [port for container in job["template"]["spec"]["containers"] for port in container["ports"]]
    assert [port["protocol"] for port in ports] == ["TCP"]
    assert all("onPodConditions" in rule for rule in job["podFailurePolicy"]["rules"])


def test_the_night_has_one_time_zone() -> None:
    [zone] = re.findall(r"TZ=(\S+)", (KUBERNETES / "base/kustomization.yaml").read_text())
    assert find("night", "CronJob")["spec"]["timeZone"] == zone
