"""One Ray cluster for the whole session: starting Ray is what tests would spend their time on.

Under `make test` two sessions run side by side, each with a cluster of its own: two workers of
pytest-xdist, which share out the files.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import Watched
from formula import formula_data, formula_exchanges, formula_model
from hypothesis import settings

from autoshard.benchmark import BenchmarkPool, TimingOptions
from autoshard.benchmark.pool.pool import end_pool
from autoshard.cost_model import CostDataset, CostModel, EstimatedCosts, split
from autoshard.experiments.collecting import proposals
from autoshard.workload import EmbeddingTable, synthetic_tables
from autoshard.workload.tables.parts import Part

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests press Ctrl-C

settings.register_profile("autoshard", deadline=None, max_examples=60)
settings.load_profile("autoshard")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


@pytest.fixture(scope="session", autouse=True)
def own_temporary_files() -> Iterator[None]:
    """A folder of this session's own for temporary files, Ray's and those of all commands, too.

    Locks on cores are among them. So pools measure beside those of another session, or of a user of
    this machine, who would have to be waited for otherwise; no test depends on quiet cores.
    """
    # A short name, for Ray's sockets are in it. PostgreSQL runs as another user.
    with tempfile.TemporaryDirectory(
        prefix="autoshard-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o711)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", folder)
            patch.setattr(tempfile, "tempdir", folder)
            yield


@pytest.fixture(scope="session", autouse=True)
def quick_measuring() -> Iterator[None]:
    """Where it is not said how well a cost is to be known, nine iterations will do.

    To know it to 2.5 % takes up to 64 where others use the machine, and measuring is what most of
    the tests' time would go to. Commands in processes of their own measure as they do for users.
    """
    quick = TimingOptions(precision=0.2, max_iterations=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoshard.benchmark.pool.pool.TimingOptions", lambda: quick)
        patch.setattr(proposals, "_TIMING", quick)
        yield


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Commands that a test watches end with it, however it ends."""
    yield
    Watched.end_all()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def device_kind(request: pytest.FixtureRequest) -> str:
    """The same test on a CPU, and on CUDA where there is a GPU."""
    return str(request.param)


@pytest.fixture(scope="session")
def cluster() -> Iterator[object]:
    """A Ray cluster of one node with two CPUs; tests may add nodes and must remove them."""
    import ray
    from ray.cluster_utils import Cluster

    # Ray takes half a minute to hold a node for dead that has died; nothing here is worth the wait.
    quick = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": quick}
    with pytest.MonkeyPatch.context() as environment:  # its workers import tests/bench
        environment.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        nodes = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
    os.environ["RAY_ADDRESS"] = nodes.address  # commands that tests run join it
    yield nodes
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def make_pool(cluster: object, tmp_path: Path) -> Callable[..., BenchmarkPool]:
    """The cluster's pool with a store of this test's own."""

    def make(name: str = "costs.db", **options: object) -> BenchmarkPool:
        return BenchmarkPool(tmp_path / name, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def fresh_pool(make_pool: Callable[..., BenchmarkPool]) -> Iterator[Callable[..., BenchmarkPool]]:
    """A pool that is started for this test and ended after it, for options of its own."""
    end_pool()
    yield make_pool
    end_pool()


@pytest.fixture(scope="session")
def tables() -> tuple[EmbeddingTable, ...]:
    """Small tables that are quick to measure."""
    return synthetic_tables(60, seed=7, profile="small")


@pytest.fixture(scope="session")
def many_tables() -> tuple[EmbeddingTable, ...]:
    """Enough tables to learn from some and be tested on others."""
    return synthetic_tables(200, seed=3, profile="small")


@pytest.fixture(scope="session")
def formula_parts(many_tables: tuple[EmbeddingTable, ...]) -> dict[Part, CostDataset]:
    """Data that follow a formula, split by table."""
    return split(formula_data(many_tables, 600))


@pytest.fixture(scope="session")
def model(
    many_tables: tuple[EmbeddingTable, ...], formula_parts: dict[Part, CostDataset]
) -> CostModel:
    """A cost model that has learned the formula."""
    return formula_model(formula_parts, formula_exchanges(many_tables, 60))


@pytest.fixture
def oracle(model: CostModel) -> EstimatedCosts:
    """What it estimates in batches of 1,024."""
    return EstimatedCosts(model, 1024)


@pytest.fixture(scope="session")
def object_store() -> Iterator[str]:
    """The address of an object store; one for the session, for fsspec remembers where it is."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(object_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty folder in a bucket, which commands that a test runs reach too."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    name = tmp_path.name.replace("_", "-").lower()
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}/team"
