"""Which cluster a command uses, without one."""

from pathlib import Path
from typing import Any

import pytest
import ray

from autoshard.experiments.console.ray_cluster import ray_cluster
from autoshard.workload import UserError


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of `ray.init`, which fails; no cluster has run in this folder."""
    found: dict[str, Any] = {}

    def init(address: str | None, **options: Any) -> None:
        found.update(options, address=address)
        raise ConnectionError("it is not started here")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


@pytest.mark.parametrize("given", ["no cluster before", "a cluster that is gone", "RAY_ADDRESS"])
def test_a_cluster_of_its_own_has_no_dashboard(
    given: str, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", "local")
    elif given == "a cluster that is gone":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
    with pytest.raises(UserError, match="it is not started here"), ray_cluster():
        pass
    assert (asked["address"], asked["include_dashboard"]) == ("local", False)


def test_a_cluster_that_must_run_may_be_that_of_another_command(asked: dict[str, Any]) -> None:
    """Which leaves no file."""
    with pytest.raises(UserError, match="it is not started here"), ray_cluster(must_run=True):
        pass
    assert asked["address"] == "auto"
    assert "include_dashboard" not in asked
