"""Tiny trainings as users run them, several at once, and what a complete run in MLflow is."""

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
from commands import command, environment, run
from mlflow import MlflowClient
from mlflow.entities import Run

from autoshard.sharders import load_policy
from autoshard.workload import ShardingPlan

PAGE = Path(__file__).parents[2] / "docs" / "torchrec.md"
PATIENCE = 480.0  # seconds; alone one takes 10 to 15, most of which is importing torch
TINY = (
    "--tables synthetic:80:1:small --num-tables 6 --num-devices 2 --check-tasks 2 --check-every 2 "
    "--batch-size 256 --memory-fill 0.1-0.6 --iterations 3 --reward estimated"
)

SWEPT = (
    "--tables synthetic:80:1:small --num-tables 6 --num-devices 2 --num-envs 8 --check-tasks 2 "
    "--check-every 1 --batch-size 256 --memory-fill 0.1-0.6 --scheduler none"
)


@dataclass(frozen=True)
class Training:
    """One that ended: its run in MLflow, and the options it was given."""

    run_id: str
    options: str

    @property
    def given(self) -> dict[str, str]:
        """The options as parameters are called."""
        words = pairwise(self.options.split())
        return {name[2:].replace("-", "_"): v for name, v in words if name.startswith("--")}


def train_at_once(folder: Path, uri: str, options: Sequence[str]) -> list[Training]:
    """One training for each of the options, all at the same time."""
    processes: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"{number}.log" for number in range(len(options))]
    try:
        for number, (given, path) in enumerate(zip(options, logs, strict=True)):
            own = f"--out run{number} --json {number}.json --mlflow-uri {uri}"
            with path.open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command("ppo_shard.py", f"{given} {own}"),
                        cwd=folder,
                        env=environment(),
                        stdout=log,
                        stderr=log,
                    )
                )
        for process, path in zip(processes, logs, strict=True):
            assert process.wait(PATIENCE) == 0, path.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = [
        json.loads((folder / f"{number}.json").read_text()) for number in range(len(options))
    ]
    return [
        Training(told["mlflow_run"], given) for told, given in zip(results, options, strict=True)
    ]


def run_sweep(options: str, folder: Path, uri: str) -> dict[str, Any]:
    """A sweep by tune_shard.py; its result."""
    run("tune_shard.py", f"{options} --mlflow-uri {uri} --storage sweep --json sweep.json", folder)
    told: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return told


def write_ray_train(folder: Path) -> None:
    """Write the example of Ray Train in docs/torchrec.md there, and the model that it trains."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (model,) = [block for block in blocks if "def build_model" in block]
    (example,) = [block for block in blocks if "TorchTrainer(" in block]
    (folder / "my_model.py").write_text(model)
    (folder / "train_with_ray.py").write_text(example)


def check_complete(
    client: MlflowClient, run: Run, given: dict[str, str], iterations: int, folder: Path
) -> None:
    """All that a training of so many iterations logs is there, alone or as a trial of a sweep.

    `given` are some parameters that it must have; what is downloaded goes to the folder.
    """
    run_id, told = run.info.run_id, run.data
    assert run.info.status == "FINISHED"
    assert {name: told.params.get(name) for name in given} == given
    assert {"kind", "host", "python", "mlflow.source.name", "mlflow.user"} <= told.tags.keys()
    assert run.inputs.dataset_inputs[0].dataset.name == told.tags["tables"]
    steps = [point.step for point in client.get_metric_history(run_id, "episodes/step_over_bound")]
    assert steps == list(range(1, iterations + 1))
    assert "check/over_best_heuristic" in told.metrics
    folder.mkdir(exist_ok=True)
    policy = load_policy(Path(client.download_artifacts(run_id, "policy", str(folder))))
    assert policy.trained["tables"]


def check_tested(client: MlflowClient, run: Run, folder: Path, name: str) -> None:
    """The test at the end is there: figures, plans and their pictures, of that policy."""
    assert {f"test/{name}", "test/cost_fused"} <= run.data.metrics.keys()
    folder.mkdir(exist_ok=True)
    plans = Path(client.download_artifacts(run.info.run_id, "plans", str(folder)))
    assert matplotlib.image.imread(plans / f"{name}.png").size > 0
    assert ShardingPlan.load(plans / f"{name}.plan.json").placements


def check_all(uri: str, trainings: list[Training], folder: Path) -> None:
    """Those trainings, and no others, are complete."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("autoshard")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.kind = 'ppo_shard'")
    assert {run.info.run_id for run in runs} == {training.run_id for training in trainings}
    for training in trainings:
        run = next(run for run in runs if run.info.run_id == training.run_id)
        iterations = int(training.given["iterations"])
        check_complete(client, run, training.given, iterations, folder / training.run_id)
        check_tested(client, run, folder / training.run_id, "policy")
