"""deploy/kubernetes against the published schemas of Kubernetes and the commands of svdq; no cluster is asked.

KEDA's objects have no schema in a Python package: the job in a ScaledJob is checked as a Job of Kubernetes.
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
from svdq.cli.serve.tokens import Tokens
from svdq.producer.settings import ENV_PREFIX, Settings
from svdq.worker.launcher.launcher import STOP_S
from svdq.worker.launcher.torchrun import KILL_S

pytestmark = pytest.mark.nightly

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
#: The oldest Kubernetes that the objects are for, and the newest of which there is a schema.
VERSIONS = ["1.31.0", "1.37.0"]
VARIANTS = ["always", "night", "bursts"]
FOLDERS = ["base", "serve", *VARIANTS]


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


def test_the_page_answers_the_probes_of_kubernetes(check_command: Callable[[list[str]], None]) -> None:
    [container] = find("serve", "Deployment")["spec"]["template"]["spec"]["containers"]
    check_command(container["args"])
    paths = {container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths <= set(OPEN_PATHS)
    assert ServeOptions(host="0.0.0.0", tokens=Tokens("x")).accepts_host(
        "10.1.2.3"
    )  # kubelet asks the address of the pod


def test_secrets_are_named_and_not_given() -> None:
    things = [thing for folder in FOLDERS for thing in read(folder)]
    assert "Secret" not in {thing["kind"] for thing in things}
    texts = "".join(path.read_text() for path in KUBERNETES.rglob("*.yaml"))
    names = set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", texts))
    assert names <= {f"{ENV_PREFIX}{field.upper()}" for field in Settings.model_fields}


def test_keda_asks_a_path_that_is_served() -> None:
    [trigger] = find("bursts", "ScaledJob")["spec"]["triggers"]
    url = urlsplit(trigger["metadata"]["url"])
    assert (url.hostname or "").split(".")[0] == find("serve", "Service")["metadata"]["name"]
    assert url.path in {route.path for route in routes() if isinstance(route, Route)}
