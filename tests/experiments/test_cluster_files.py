"""The cluster files as they are shipped, against Ray's own schema and command line."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml
from jsonschema import Draft202012Validator
from moto import mock_aws
from packaging.specifiers import SpecifierSet
from ray.autoscaler._private.providers import _NODE_PROVIDERS
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv
from ray.scripts.scripts import start

from autoshard.benchmark.pool.devices import RESOURCE
from autoshard.experiments.training.config import PPOShardConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "cluster"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAUNCHED = ("local.yaml", "aws-gpu.yaml")  # by `ray up`
ALL = (*LAUNCHED, "rayjob.yaml")

Cluster = dict[str, Any]


def load(name: str) -> Cluster:
    cluster: Cluster = yaml.safe_load((FOLDER / name).read_text())
    return cluster


def ray_start_options(command: str) -> dict[str, Any]:
    """What `ray start` understands of a command line; an error if it does not."""
    words = shlex.split(command.rpartition("ray start ")[2])
    return dict(start.make_context("ray start", words).params)


def said_by_shell(command: str, device: str) -> str:
    """What a node runs as `ray start ...`, if that file decides whether it has a GPU."""
    script = f"ray() {{ printf '%q ' ray \"$@\"; }}\n{command.replace('/dev/nvidia0', device)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout


def test_these_are_all() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.yaml")) == sorted(ALL)


@pytest.mark.parametrize("name", LAUNCHED)
def test_ray_accepts_the_file(name: str) -> None:
    validate_config(prepare_config(load(name)))


@pytest.mark.parametrize("name", LAUNCHED)
def test_ray_refuses_a_wrong_word(name: str) -> None:
    """Which tells that the schema was applied."""
    with pytest.raises(Exception, match="setup_comands"):
        validate_config(prepare_config({**load(name), "setup_comands": []}))


@pytest.mark.parametrize("name", LAUNCHED)
def test_all_that_pip_needs_is_copied(name: str) -> None:
    mounts = load(name)["file_mounts"]
    assert mounts == {f"~/autoshard/{path}": path for path in mounts.values()}
    assert all((ROOT / path).exists() for path in mounts.values())
    needed = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    needed |= {
        "__init__.py",
        "__main__.py",
        "constraints",
        *PROJECT["tool"]["setuptools"]["package-data"]["autoshard"],
    }
    packages = PROJECT["tool"]["setuptools"]["packages"]
    folders = {package.split(".")[1] for package in packages if "." in package}
    assert set(mounts.values()) == needed | folders


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_node_installs_the_build_for_its_hardware(name: str, tmp_path: Path) -> None:
    (command,) = [text for text in load(name)["setup_commands"] if "pip install" in text]
    assert "cd ~/autoshard" in command
    (pins,) = re.findall(r"pip install --quiet -c (\S+)", command)
    usual = f"TORCH  ?= {Path(pins).stem.removeprefix('torch-')}\n"
    assert usual in (ROOT / "Makefile").read_text()
    assert (ROOT / pins).is_file()
    wanted = re.search(r"\"\.\[.*\]\"", command)
    assert wanted is not None
    for device, extra in ((tmp_path, "gpu"), (tmp_path / "missing", "cpu")):
        text = wanted[0].replace("/dev/nvidia0", str(device))
        done = subprocess.run(["bash", "-c", f"echo {text}"], capture_output=True, text=True)
        assert done.stdout.strip() == f".[{extra}]"
        assert extra in PROJECT["project"]["optional-dependencies"]


@pytest.mark.parametrize("name", LAUNCHED)
def test_login_shells_know_python_and_mlflow(name: str, tmp_path: Path) -> None:
    """And only once, however often the commands run."""
    naming = [text for text in load(name)["setup_commands"] if "~/.autoshard.sh" in text]
    asked = 'echo "$PATH $MLFLOW_TRACKING_URI"; wc -l < ~/.bashrc'
    for _ in range(2):
        script = " && ".join([*(f"({text})" for text in naming), "source ~/.bashrc", asked])
        done = subprocess.run(
            ["bash", "-c", script],
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        path, uri, lines = done.stdout.split()
        assert path.split(":")[0] == f"{tmp_path}/autoshard-venv/bin"
        assert uri == "http://MLFLOW_ADDRESS:5000"
        assert lines == "1"


@pytest.mark.parametrize("name", LAUNCHED)
@pytest.mark.parametrize("kind", ["head", "worker"])
def test_ray_is_started_as_ray_understands(name: str, kind: str) -> None:
    stop, command = load(name)[f"{kind}_start_ray_commands"]
    assert stop == "ray stop"
    options = ray_start_options(said_by_shell(command, "/nowhere"))
    assert options["head"] == (kind == "head")
    assert options["num_cpus"] is None
    assert options["resources"] == "{}"
    if kind == "head":
        assert options["autoscaling_config"].endswith("ray_bootstrap_config.yaml")


def test_local_workers_with_gpus_are_for_benchmarks_only(tmp_path: Path) -> None:
    command = load("local.yaml")["worker_start_ray_commands"][-1]
    options = ray_start_options(said_by_shell(command, str(tmp_path)))
    assert options["num_cpus"] == 0
    assert json.loads(options["resources"]) == {"benchmark": 1}


def test_gpu_workers_on_aws_are_for_benchmarks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray understands the file, which asks AWS what its machines have."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "nobody")
    cluster = prepare_config(load("aws-gpu.yaml"))
    with mock_aws():
        provider = _NODE_PROVIDERS["aws"](cluster["provider"])
        cluster = provider.fillout_available_node_types_resources(cluster)
    validate_config(cluster)
    kinds = cluster["available_node_types"]
    assert cluster["head_node_type"] == "head"
    assert kinds["gpu_worker"]["resources"]["CPU"] == 0
    assert kinds["gpu_worker"]["resources"]["GPU"] >= 1
    assert kinds["gpu_worker"]["resources"]["benchmark"] == 1
    assert kinds["gpu_worker"]["min_workers"] >= 1
    for name in ("head", "cpu_worker"):
        assert kinds[name]["resources"]["CPU"] >= 8
        assert not {"GPU", "benchmark"} & kinds[name]["resources"].keys()
    assert sum(kind["max_workers"] for kind in kinds.values()) == cluster["max_workers"]


def groups() -> dict[str, Cluster]:
    """The head and the groups of workers that the RayJob asks for, by name."""
    spec = load("rayjob.yaml")["spec"]["rayClusterSpec"]
    return {
        "head": spec["headGroupSpec"],
        **{group["groupName"]: group for group in spec["workerGroupSpecs"]},
    }


def container(group: Cluster) -> Cluster:
    (only,) = group["template"]["spec"]["containers"]
    found: Cluster = only
    return found


def test_rayjob_runs_the_ray_that_is_pinned() -> None:
    (pinned,) = [text for text in PROJECT["project"]["dependencies"] if text.startswith("ray[")]
    version = pinned.partition("==")[2]
    spec = load("rayjob.yaml")["spec"]["rayClusterSpec"]
    assert spec["rayVersion"] == version
    for name, group in groups().items():
        kind = "gpu" if name == "gpu-workers" else "cpu"
        assert container(group)["image"] == f"rayproject/ray:{version}-py311-{kind}"
    assert "3.11" in SpecifierSet(PROJECT["project"]["requires-python"])


def test_ray_accepts_the_rayjobs_options() -> None:
    job = load("rayjob.yaml")["spec"]
    environment = RuntimeEnv(**yaml.safe_load(job["runtimeEnvYAML"]))
    assert environment.env_vars() == {"MLFLOW_TRACKING_URI": "http://MLFLOW_ADDRESS:5000"}
    for name, group in groups().items():
        # KubeRay joins them so, and a shell reads them.
        words = " ".join(f"--{key}={value}" for key, value in group["rayStartParams"].items())
        options = ray_start_options(f"ray start {words}")
        if name == "gpu-workers":
            assert options["num_cpus"] == 0
            assert json.loads(options["resources"]) == {RESOURCE: 1}
        else:
            assert options["num_cpus"] is None  # as many as the pod has
            assert options["resources"] == "{}"


def test_rayjobs_pods_have_what_their_part_needs() -> None:
    for name, group in groups().items():
        pod = container(group)
        extra = "gpu" if name == "gpu-workers" else "cpu"
        (installed,) = pod["args"]
        assert f'"autoshard[{extra}] @ $AUTOSHARD"' in installed
        assert [variable["name"] for variable in pod["env"]] == ["AUTOSHARD"]
        limits, requests = pod["resources"]["limits"], pod["resources"]["requests"]
        assert limits == requests  # Ray plans with the limits, Kubernetes with the requests
        assert int(limits["cpu"]) >= 4
        assert ("nvidia.com/gpu" in limits) == (extra == "gpu")
        if name != "head":
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert groups()["gpu-workers"]["minReplicas"] >= 1


def test_rayjob_runs_a_command_that_there_is() -> None:
    python, module_option, module, *arguments = shlex.split(
        load("rayjob.yaml")["spec"]["entrypoint"]
    )
    assert (python, module_option, module) == ("python", "-m", "autoshard.experiments.ppo_shard")
    config = tyro.cli(PPOShardConfig, args=arguments)
    config.check()
    assert config.devices == "cuda"  # the pool asks for GPUs: pods of one group have them
    assert config.storage is not None
    assert config.out.is_absolute()
    # Env runners take the CPUs of the head and of the CPU workers that are there from the start.
    there = [groups()["head"], *[groups()["cpu-workers"]] * groups()["cpu-workers"]["replicas"]]
    cpus = sum(int(container(group)["resources"]["limits"]["cpu"]) for group in there)
    assert config.env_runners < cpus


@pytest.mark.skipif("KUBERAY_CRD" not in os.environ, reason="KubeRay's schema is in no package")
def test_kuberay_accepts_the_rayjob() -> None:
    """And has no word that its schema, a file that is named, does not know."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # it has 25,000 lines
    definition = yaml.load(Path(os.environ["KUBERAY_CRD"]).read_text(), loader)
    (version,) = [each for each in definition["spec"]["versions"] if each["storage"]]
    schema = version["schema"]["openAPIV3Schema"]
    make_strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
    job = load("rayjob.yaml")
    assert job["apiVersion"] == f"ray.io/{version['name']}"
    assert not [*Draft202012Validator(schema).iter_errors(job)]
    job["spec"]["shutdownAfterJobEnds"] = True
    assert len([*Draft202012Validator(schema).iter_errors(job)]) == 1


def make_strict(node: Any) -> None:
    """Forbids unknown fields, as Kubernetes does, and takes words that are its own for JSON's."""
    if isinstance(node, dict):
        if node.pop("x-kubernetes-int-or-string", False):
            node.pop("type", None)
            node["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        if "properties" in node and "x-kubernetes-preserve-unknown-fields" not in node:
            node.setdefault("additionalProperties", False)
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        make_strict(each)


@pytest.mark.parametrize("name", ALL)
def test_what_is_to_be_filled_in_is_said(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert "MLFLOW_TRACKING_URI" in text
    assert "CAPITALS" in text
    assert "docs/clusters.md" in text
