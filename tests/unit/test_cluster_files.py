"""The files in cluster/ are what Ray's launcher and the operators read, and open nothing to strangers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from command import REPOSITORY

from raytrain_llama3.config.load import load
from raytrain_llama3.config.rules import check_anywhere

CLUSTER = REPOSITORY / "cluster"
RAY_UP = sorted(CLUSTER.glob("ray_up_*.yaml"))
KUBERNETES = {"kuberay_rayjob.yaml": "RayJob", "kuberay_raycluster.yaml": "RayCluster", "pytorchjob.yaml": "PyTorchJob"}

# Field names of the custom resources, as KubeRay 1.5 and Kubeflow's training operator 1.9 define them.
RAY_CLUSTER = {
    "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations", "enableInTreeAutoscaling",
    "gcsFaultToleranceOptions", "headGroupSpec", "rayVersion", "workerGroupSpecs", "authOptions",
}  # fmt: skip
HEAD_GROUP = {"template", "headService", "enableIngress", "rayStartParams", "serviceType", "resources", "labels"}
WORKER_GROUP = {
    "suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds", "rayStartParams",
    "template", "scaleStrategy", "numOfHosts", "resources", "labels",
}  # fmt: skip
RAY_JOB = {
    "activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata", "clusterSelector",
    "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML", "jobId", "submissionMode",
    "entrypointResources", "entrypointNumCpus", "entrypointNumGpus", "ttlSecondsAfterFinished",
    "shutdownAfterJobFinishes", "suspend",
}  # fmt: skip
PYTORCH_JOB = {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
RUN_POLICY = {
    "cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy", "suspend",
    "managedBy",
}  # fmt: skip
REPLICA = {"replicas", "template", "restartPolicy"}
POD = {
    "containers", "volumes", "terminationGracePeriodSeconds", "nodeSelector", "tolerations", "initContainers",
    "imagePullSecrets", "serviceAccountName", "hostNetwork", "restartPolicy",
}  # fmt: skip
CONTAINER = {"name", "image", "command", "args", "env", "ports", "resources", "volumeMounts", "securityContext"}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text())


def schema() -> dict[str, Any]:
    package = find_spec("ray")
    assert package is not None
    assert package.origin is not None
    return json.loads((Path(package.origin).parent / "autoscaler" / "ray-schema.json").read_text())


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_ray_up_files_keep_rays_own_schema(path: Path) -> None:
    jsonschema.validate(read(path.name), schema())


def test_the_schema_sees_a_mistake() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(read("ray_up_aws.yaml") | {"max_worker": 2}, schema())


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_ray_up_installs_this_package_and_asks_for_a_token(path: Path) -> None:
    config = read(path.name)
    assert any("raytrain_llama3" in command for command in config["setup_commands"])
    for kind in ("head", "worker"):
        (start,) = [c for c in config[f"{kind}_start_ray_commands"] if "ray start" in c]
        assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=" in start
        assert "RAY_AUTH_TOKEN=" not in start
        first, last = (int(re.findall(rf"--{end}-worker-port=(\d+)", start)[0]) for end in ("min", "max"))
        assert first < last < 32768
    (head,) = [c for c in config["head_start_ray_commands"] if "ray start" in c]
    assert "--dashboard-host=127.0.0.1" in head
    assert any(local == "cluster/token" for local in config["file_mounts"].values())


@pytest.mark.parametrize("name", ["ray_up_aws.yaml", "ray_up_gcp.yaml"])
def test_clouds_have_nodes_of_eight_gpus(name: str) -> None:
    config = read(name)
    assert config["head_node_type"] in config["available_node_types"]
    gpu = config["available_node_types"]["gpu8"]
    assert gpu["resources"]["GPU"] == 8
    assert gpu["min_workers"] == gpu["max_workers"] == config["max_workers"]
    assert any(option.startswith("--shm-size") for option in config["docker"]["worker_run_options"])


@pytest.mark.parametrize(("name", "kind"), KUBERNETES.items())
def test_kubernetes_files_have_only_fields_that_there_are(name: str, kind: str) -> None:
    resource = read(name)
    assert resource["kind"] == kind
    assert resource["apiVersion"] == ("kubeflow.org/v1" if kind == "PyTorchJob" else "ray.io/v1")
    spec = resource["spec"]
    if kind == "PyTorchJob":
        assert spec.keys() <= PYTORCH_JOB
        assert spec["runPolicy"].keys() <= RUN_POLICY
        for replica in spec["pytorchReplicaSpecs"].values():
            assert replica.keys() <= REPLICA
        return
    if kind == "RayJob":
        assert spec.keys() <= RAY_JOB
        assert yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"].isdigit()
        spec = spec["rayClusterSpec"]
    assert spec.keys() <= RAY_CLUSTER
    assert spec["headGroupSpec"].keys() <= HEAD_GROUP
    assert all(group.keys() <= WORKER_GROUP for group in spec["workerGroupSpecs"])
    assert spec["authOptions"] == {"mode": "token"}
    # The operator refuses a token for an older Ray, and takes the version from here.
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52, 0)


def pods(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = resource["spec"]
    spec = spec.get("rayClusterSpec", spec)
    for group in [*spec.get("workerGroupSpecs", []), *spec.get("pytorchReplicaSpecs", {}).values()]:
        yield group["template"]["spec"]
    if "headGroupSpec" in spec:
        yield spec["headGroupSpec"]["template"]["spec"]


@pytest.mark.parametrize("name", KUBERNETES)
def test_each_pod_has_room_in_dev_shm_and_the_shared_folder(name: str) -> None:
    resource, gpus = read(name), []
    for pod in pods(resource):
        assert pod.keys() <= POD
        (container,) = pod["containers"]
        assert container.keys() <= CONTAINER
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
        gpus.append(container["resources"]["limits"].get("nvidia.com/gpu", "0"))
    assert "8" in gpus


def test_the_pytorchjob_gives_a_stopped_run_time_to_save_and_retries_what_may_be_retried() -> None:
    job = read("pytorchjob.yaml")
    assert {replica["restartPolicy"] for replica in job["spec"]["pytorchReplicaSpecs"].values()} == {"ExitCode"}
    for pod in pods(job):
        (container,) = pod["containers"]
        # The operator looks for a container of this name.
        assert container["name"] == "pytorch"
        assert container["command"] == ["python", "-m", "raytrain_llama3"]
        loaded = load(container["args"], {})
        check_anywhere(loaded)
        assert pod["terminationGracePeriodSeconds"] > loaded.config.grace_s


def test_the_rayjobs_command_line_is_one_of_ours() -> None:
    spec = read("kuberay_rayjob.yaml")["spec"]
    program, arguments = spec["entrypoint"].split()[:3], spec["entrypoint"].split()[3:]
    assert program == ["python", "-m", "raytrain_llama3"]
    loaded = load(arguments, {})
    check_anywhere(loaded)
    wait_s = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]
    assert int(wait_s) > loaded.config.grace_s


@pytest.mark.parametrize("path", sorted((CLUSTER / "aistudio").glob("*.sh")), ids=lambda path: path.name)
def test_start_commands_are_shell_and_name_files_that_there_are(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    text = path.read_text()
    for name in re.findall(r"configs/\S+\.env", text):
        assert (REPOSITORY / name).is_file()
    if "start" in path.name:
        assert "exec " in text, "a shell in between would keep the platform's SIGTERM from the driver"


@pytest.mark.parametrize("path", [p for p in CLUSTER.rglob("*") if p.is_file()], ids=lambda path: path.name)
def test_each_file_is_explained_at_its_top_and_holds_no_secret(path: Path) -> None:
    lines = path.read_text().splitlines()
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    assert first.startswith("# ")
    assert not re.search(r"\b[0-9a-f]{32,}\b", path.read_text())
