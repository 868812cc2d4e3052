"""`AutoShardProvider` in the planning API of TorchRec 1.9, and one line where that is missing."""

import importlib.util
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from autoshard.cost_model.hardware import load_quietly
from autoshard.workload import UserError

HAS_API = importlib.util.find_spec("torchrec.distributed.planner.provider") is not None


@pytest.mark.skipif(HAS_API, reason="TorchRec has the planning API")
def test_an_older_torchrec_is_said_in_a_line() -> None:
    with pytest.raises(UserError, match=r"for the planning API of TorchRec 1\.9, and an older one"):
        from autoshard.integration import AutoShardProvider  # noqa: F401


def model() -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=f"t{n}", num_embeddings=1000 * (n + 1), embedding_dim=64, feature_names=[f"f{n}"]
        )
        for n in range(6)
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


@pytest.mark.skipif(not HAS_API, reason="TorchRec is older than 1.9")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dry_run_plans_for_each_sku(device: str) -> None:
    from torchrec.distributed.planner.dry_run import DryRunOrchestrator, DryRunRequest, SkuOverride
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.types import PlannerSessionContext

    from autoshard.integration import AutoShardProvider

    options: dict[str, Any] = {"cost_model": load_quietly("cpu")} if device == "cpu" else {}
    request = DryRunRequest(
        model=model(),
        sharders=[EmbeddingBagCollectionSharder()],
        world_size=4,
        local_world_size=4,
        batch_size=512,
        ddr_gb=4.0,
        training_framework="apf",
        sku_list=["H100", "A100", "mine"],
        compute_device=device,
        per_sku_overrides={"A100": SkuOverride(hbm_gb=40)},
    )
    context = PlannerSessionContext(request=request, results={})
    provider = AutoShardProvider({"mine": "l4-24gb"} if device == "cuda" else None, **options)
    found = DryRunOrchestrator(DefaultPlannerExecutor(provider)).plan(request, context)
    assert {sku: result.success for sku, result in found.items()} == {
        "H100": True, "A100": True, "mine": True
    }  # fmt: skip
    if device == "cuda":
        topology = provider.build_topology("A100", request, context)
        assert topology.devices[0].storage.hbm == 40 * 2**30  # of the override
        assert topology.intra_host_bw == 300e6
        assert provider.build_topology("H100", request, context).hbm_mem_bw == 3350e6
    plan = found["H100"].sharding_plan.plan[""]
    assert {*plan} == {f"t{n}" for n in range(6)}
