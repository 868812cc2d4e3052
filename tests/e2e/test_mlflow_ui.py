"""What users see of our runs: MLflow's own UI in a real browser, over runs of our own commands.

These come whole to MLflow's file, too, which is looked at first.

AUTOSHARD_PICTURES=FOLDER trains for longer and writes the pictures of docs/mlflow.md there.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from commands import run, wait_until
from mlflow import MlflowClient
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from servers import mlflow_server
from trainings import Training, check_all

from autoshard.experiments.tracking.runs import VIEW

# What the console calls errors though nothing is wrong, and why.
NOISE = {
    "/ajax-api/2.0/mlflow/users/current - Failed to load": "asked of servers without accounts too",
    "ResizeObserver loop completed with undelivered": "charts that get their size in two steps",
}
# As a user leaves the UI after the first visit: the assistant and its hints closed, and of the two
# faces of the UI, which begins with that for GenAI, the one for training models.
VISITED = {
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
    "mlflow.detectIssues.guidanceShown_v1": True,
    "mlflow.workflowType_v1": "machine_learning",
}
# What passes: notes in the corner, the assistant's button, and what charts show under the mouse,
# which a browser without a mouse shows on all of them.
WITHOUT_PASSING = (
    ".modebar, [data-assistant-ui], [class*=notification] { display: none !important }"
)
# Where files lie on the machine that took a picture is nobody's business.
WITHOUT_FOLDERS = """for (const e of document.querySelectorAll('*'))
    if (!e.childElementCount && e.textContent.includes('file:///')) e.style.display = 'none'"""
# The points of the first chart of a page.
DRAWN = """const curve = document.querySelector('.js-plotly-plot')?.data?.[0];
return curve && [...curve.x].map((x, i) => [x, curve.y[i]])"""
# Whether a picture is shown.
PICTURE = "return [...document.images].some(i => i.naturalWidth > 300 && i.clientWidth > 100)"
CURVES = (  # two sections: charts further down are drawn when they are scrolled to
    "episodes/step_over_bound",
    "episodes/return",
    "episodes/infeasible",
    "ppo/entropy",
    "ppo/policy_loss",
    "ppo/value_loss",
)


COMPARED = ("learning_rate", "epochs", "clip")  # hyperparameters of a sweep
OF_TRIALS = ("check/memory_mb", "check/over_best_heuristic", "check/planning_ms")
# Of each chart by its metric, the last value of each run.
CHARTS = """return Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map(
    ({data}) => [data[0]?.metricKey, Object.fromEntries(data.map(d => [d.uuid, [...d.y].at(-1)]))]
))"""


@dataclass(frozen=True)
class Screen:
    """The UI in the browser."""

    driver: Chrome
    url: str

    def open(self, route: str) -> None:
        """Go there as if no page had been open."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}/#/{route}")

    def text(self) -> str:
        """What can be read."""
        return self.driver.find_element(By.TAG_NAME, "body").text

    def wait_for_text(self, *words: str) -> None:
        """Until all of them can be read."""
        text = [""]

        def missing() -> list[str]:
            text[0] = self.text()
            return [word for word in words if word not in text[0]]

        try:
            wait_until("the page", lambda: not missing())
        except AssertionError:
            pytest.fail(f"the page lacks {missing()}: {text[0]}")

    def count(self, selector: str) -> int:
        """Elements of that kind."""
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def wait_for(self, selector: str, at_least: int = 1) -> None:
        """Until there are so many such elements."""
        wait_until(f"{at_least} of {selector}", lambda: self.count(selector) >= at_least)

    def click(self, text: str) -> None:
        """On what says just this."""
        path = f"//*[normalize-space(text())='{text}']"
        self.wait_for_text(text)
        self.driver.find_element(By.XPATH, path).click()

    def choose(self, list_number: int, *names: str) -> None:
        """In one of the page's lists, which draw only as many of their lines as can be seen."""
        lists = self.driver.find_elements(By.CSS_SELECTOR, "[class*=select-selector]")
        lists[list_number].click()
        for name in names:
            option = f"[class*=item-option][title='{name}']"
            scroll = "document.querySelectorAll('.rc-virtual-list-holder, [class*=list-holder]')"

            def there(option: str = option, scroll: str = scroll) -> bool:
                for found in self.driver.find_elements(By.CSS_SELECTOR, option):
                    if found.is_displayed():
                        found.click()
                        return True
                self.driver.execute_script(f"{scroll}.forEach(list => list.scrollTop += 100)")
                return False

            wait_until(f"{name} in list {list_number}", there, 30)
        self.driver.switch_to.active_element.send_keys(Keys.ESCAPE)

    def picture(self, name: str) -> None:
        """Keep what is shown now, if pictures are asked for; once nothing moves any more."""
        folder = os.environ.get("AUTOSHARD_PICTURES")
        if not folder:
            return
        self.driver.execute_script(WITHOUT_FOLDERS)
        shots = [b""]

        def still() -> bool:
            shots.append(self.driver.get_screenshot_as_png())
            time.sleep(0.3)
            return shots[-2] == shots[-1]

        wait_until("a page that stands still", still)
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_bytes(shots[-1])

    def errors(self) -> list[str]:
        """What the console says is wrong, less what is known to be noise."""
        log = self.driver.get_log("browser")
        severe = [entry["message"] for entry in log if entry["level"] == "SEVERE"]
        return [said for said in severe if not any(noise in said for noise in NOISE)]


@pytest.fixture(scope="module")
def comparison(
    sqlite_trainings: tuple[str, list[Training]], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The run of a comparison, which keeps a page about the best plan of each task."""
    uri, _ = sqlite_trainings
    options = (
        "--tables synthetic:80:1:small --num-tasks 1 --num-tables 10 --num-devices 3 --no-probe "
        f"--sharders dim,size,cost_fused --json result.json --mlflow-uri {uri}"
    )
    run("compare.py", options, tmp_path_factory.mktemp("compared"))
    client = MlflowClient(uri)
    found = client.get_experiment_by_name("autoshard")
    assert found is not None
    (compared,) = client.search_runs([found.experiment_id], "tags.kind = 'compare'")
    return str(compared.info.run_id)


@pytest.fixture(scope="module")
def server(
    sqlite_trainings: tuple[str, list[Training]],
    sweep: list[str],
    comparison: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """`mlflow ui` as anybody starts it, over what our commands logged."""
    uri, _ = sqlite_trainings
    log = tmp_path_factory.mktemp("ui") / "ui.log"
    with mlflow_server(log, "--backend-store-uri", uri, command="ui") as url:
        yield url


@pytest.fixture
def screen(server: str, chromium: Chrome) -> Iterator[Screen]:
    """The UI, without errors in the browser's console."""
    script = "".join(
        f"localStorage.setItem('{key}', '{json.dumps(value)}');" for key, value in VISITED.items()
    )
    style = f"""addEventListener('DOMContentLoaded', () => {{
        const style = document.createElement('style');
        style.textContent = '{WITHOUT_PASSING}';
        document.head.append(style);
    }});"""
    source = {"source": f"if (location.protocol === 'http:') {{ {script} {style} }}"}
    added = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    screen = Screen(chromium, server)
    yield screen
    chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    assert screen.errors() == []


@pytest.fixture
def experiment(sqlite_trainings: tuple[str, list[Training]]) -> str:
    """The route of our experiment's page."""
    found = MlflowClient(sqlite_trainings[0]).get_experiment_by_name("autoshard")
    assert found is not None
    return f"experiments/{found.experiment_id}"


def test_runs_come_whole_to_a_plain_file(
    sqlite_trainings: tuple[str, list[Training]], tmp_path: Path
) -> None:
    check_all(*sqlite_trainings, tmp_path)


def test_the_table_of_runs(
    screen: Screen,
    experiment: str,
    sqlite_trainings: tuple[str, list[Training]],
    sweep: list[str],
) -> None:
    uri, trainings = sqlite_trainings
    client = MlflowClient(uri)
    runs = [client.get_run(training.run_id) for training in trainings]
    # With the sweep's and those folded under it, and the comparison's.
    number = len(runs) + 1 + len(sweep) + 1
    screen.open(f"{experiment}/runs")
    screen.wait_for_text(f"{number} matching runs", "Run Name", "Created", "Duration", "Source")
    screen.wait_for_text("ppo_shard.py", *(run.info.run_name for run in runs))
    screen.open(f"{experiment}/runs?viewStateShareKey={VIEW}")
    screen.wait_for_text("Results", "test/policy", "num_devices", "reward")
    screen.wait_for_text(*(f"{run.data.metrics['test/policy']:.12f}"[:6] for run in runs))
    screen.click("Override saved view")  # which keeps the columns for this user
    wait_until("the columns", lambda: "shared view" not in screen.text())
    screen.wait_for_text("test/policy")
    screen.picture("mlflow-runs.png")


def test_a_training_and_its_charts(
    screen: Screen, experiment: str, sqlite_trainings: tuple[str, list[Training]]
) -> None:
    uri, (training, *_) = sqlite_trainings
    screen.open(f"{experiment}/runs/{training.run_id}/model-metrics")
    screen.wait_for(".js-plotly-plot .main-svg .trace path", 3)
    search = screen.driver.find_element(By.CSS_SELECTOR, "input[placeholder*='Search metric']")
    search.send_keys("^episodes/step_over_bound$")
    wait_until("one chart", lambda: screen.count(".js-plotly-plot") == 1)
    history = MlflowClient(uri).get_metric_history(training.run_id, "episodes/step_over_bound")
    curve = [[point.step, point.value] for point in history]
    wait_until(f"a chart of {curve}", lambda: screen.driver.execute_script(DRAWN) == curve)
    search.send_keys(Keys.CONTROL, "a")
    search.send_keys("^(" + "|".join(CURVES) + ")$")
    wait_until("charts", lambda: screen.count(".js-plotly-plot") == len(CURVES))
    screen.picture("mlflow-run.png")


def test_the_picture_of_a_plan(
    screen: Screen, experiment: str, sqlite_trainings: tuple[str, list[Training]]
) -> None:
    _, (training, *_) = sqlite_trainings
    screen.open(f"{experiment}/runs/{training.run_id}/artifacts")
    screen.click("plans")
    screen.click("policy.png")
    wait_until("the picture", lambda: screen.driver.execute_script(PICTURE))
    screen.picture("mlflow-plan.png")


def test_the_trials_of_a_sweep_compared(screen: Screen, experiment: str, sweep: list[str]) -> None:
    ids = json.dumps(sweep, separators=(",", ":"))
    screen.open(f'compare-runs?runs={ids}&experiments=["{experiment.rpartition("/")[2]}"]')
    screen.wait_for_text(f"Comparing {len(sweep)} Runs", "Parallel Coordinates Plot")
    screen.click("Clear All")
    screen.choose(0, *COMPARED)
    screen.choose(1, "score")
    screen.wait_for("canvas")
    axes = len(COMPARED) + 1
    wait_until("axes", lambda: screen.count(".parcoords .y-axis") == axes)
    screen.picture("mlflow-sweep.png")


def test_ten_trials_of_a_sweep_in_three_charts(
    screen: Screen, experiment: str, sqlite_trainings: tuple[str, list[Training]], sweep: list[str]
) -> None:
    # In the order of creation, trials would be folded under their sweep, and not drawn.
    which, order = quote("tags.kind = 'trial'"), quote("metrics.`score`")
    view = f"compareRunsMode=CHART&searchFilter={which}&orderByKey={order}&orderByAsc=true"
    screen.open(f"{experiment}/runs?{view}")
    screen.wait_for_text(f"{len(sweep)} matching runs")
    search = screen.driver.find_element(By.CSS_SELECTOR, "input[placeholder*='Search metric']")
    search.send_keys("^(" + "|".join(OF_TRIALS) + ")$")
    client = MlflowClient(sqlite_trainings[0])
    metrics = {run: client.get_run(run).data.metrics for run in sweep}
    assert len(metrics) == 10
    values = {name: {run: found[name] for run, found in metrics.items()} for name in OF_TRIALS}
    wait_until(f"charts of {values}", lambda: screen.driver.execute_script(CHARTS) == values)
    screen.picture("mlflow-charts.png")


def test_the_front_of_a_sweep(
    screen: Screen, experiment: str, sqlite_trainings: tuple[str, list[Training]], sweep: list[str]
) -> None:
    trial = MlflowClient(sqlite_trainings[0]).get_run(sweep[0])
    screen.open(f"{experiment}/runs/{trial.data.tags['mlflow.parentRunId']}/artifacts")
    screen.click("front")
    screen.click("front.png")
    wait_until("the picture", lambda: screen.driver.execute_script(PICTURE))
    screen.picture("mlflow-front.png")


def test_the_page_about_a_plan(screen: Screen, experiment: str, comparison: str) -> None:
    screen.open(f"{experiment}/runs/{comparison}/artifacts")
    screen.click("plans")
    screen.click("0.html")
    screen.wait_for("iframe")
    screen.driver.switch_to.frame(screen.driver.find_element(By.TAG_NAME, "iframe"))
    screen.wait_for_text("Expected step", "Time and memory of each device", "Tables")
    screen.driver.switch_to.default_content()
