"""Writes `record.json` anew: `python tests/golden/record.py [TASK ...]`, in about a minute.

Do so only where plans or episodes have changed on purpose, and say in the commit why. With names of
tasks only their plans are written anew. A task is added to `tasks.json` as `ShardingTask.save`
writes it. The tasks that are there were drawn by commit 748108b from `synthetic:1200:11:small`,
`wide:900:11`, `directions:600:11`, `features:600:3`, `giants:1040:11`, `hot:200:5`, `cold:200:5`
and `criteo:1/64`.
"""

import json
import sys
from typing import Any

import golden_net as net


def recorded_plans(name: str) -> dict[str, Any]:
    """Returns the plan of each sharder with its step time in milliseconds; None without a plan."""
    task, found = net.task_of(name), {}
    for sharder in net.sharders_of(task):
        plan = net.plan_of(sharder, task)
        if plan is None:
            found[sharder] = None
            continue
        text = net.text_of(net.widths_of(plan, task))
        found[sharder] = [text, float(f"{net.step_ms(plan, task):.9g}")]
    return found


def recorded_episodes(scene: net.Scene) -> list[list[Any]]:
    """Returns of each step: actions, masks as numbers, checksums, rewards, and which ended."""
    steps = []
    for step in net.played(scene, net.player(scene)):
        masks = [sum(1 << n for n, may in enumerate(mask) if may) for mask in step["masks"]]
        numbers = [[float(f"{x:.7g}") for x in step[name].tolist()] for name in ("seen", "rewards")]
        ended = [number for number, over in enumerate(step["ended"]) if over]
        steps.append([step["actions"].tolist(), masks, *numbers, ended])
    return steps


def main() -> None:
    file, chosen = net.FOLDER / "record.json", sys.argv[1:] or list(net.TASKS)
    record = json.loads(file.read_text()) if file.exists() else {"plans": {}}
    record["plans"] |= {name: recorded_plans(name) for name in chosen}
    record["episodes"] = {name: recorded_episodes(scene) for name, scene in net.SCENES.items()}
    lines = []
    for part, content in record.items():
        each = [f"{json.dumps(name)}: {json.dumps(some)}" for name, some in content.items()]
        lines.append(f'"{part}": {{\n' + ",\n".join(each) + "\n}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
