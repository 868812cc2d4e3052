"""Renders an episode as text or as an image."""

import io

import numpy as np
import numpy.typing as npt

from autoshard.envs.batched_env import BatchedPlacementEnv

_WIDTH = 40  # characters of the longest bar


def as_text(episodes: BatchedPlacementEnv, env_id: int = 0) -> str:
    """Returns a line for each device: cost as a bar, number of pieces, memory."""
    placed, count = int(episodes.placed[env_id]), int(episodes.count[env_id])
    lines = [f"{placed} of {count} pieces placed; ideal {episodes.lower_bound_ms[env_id]:.2f} ms"]
    homes = episodes.homes[env_id, :placed]
    longest = max(float(episodes.cost_ms[env_id].max()), float(episodes.lower_bound_ms[env_id]))
    for device in episodes.exists[env_id].nonzero()[:, 0].tolist():
        cost = float(episodes.cost_ms[env_id, device])
        bar = "#" * round(_WIDTH * cost / longest)
        used = 1 - float(episodes.free[env_id, device]) / float(episodes.capacity[env_id, device])
        lines.append(
            f"device{device:<3} {bar:<{_WIDTH}} {cost:6.2f} ms {int((homes == device).sum()):4} "
            f"pieces {used:4.0%} memory"
        )
    if episodes.infeasible[env_id]:
        lines.append("infeasible: no device has memory for the next piece")
    return "\n".join(lines) + "\n"


def as_picture(episodes: BatchedPlacementEnv, env_id: int = 0) -> npt.NDArray[np.uint8]:
    """Returns an image of costs and memory of all devices, [height, width, 3]."""
    from matplotlib.figure import Figure

    devices = episodes.exists[env_id].nonzero()[:, 0]
    figure = Figure(figsize=(6.4, 0.8 + 0.3 * max(4, len(devices))), dpi=100, layout="constrained")
    costs, memory = figure.subplots(1, 2, sharey=True)
    names = [f"device{device}" for device in devices.tolist()]
    costs.barh(names, episodes.cost_ms[env_id, devices].numpy())
    costs.axvline(
        float(episodes.lower_bound_ms[env_id]), color="black", linewidth=0.8, linestyle="--"
    )
    costs.set_xlabel("predicted ms")
    used = 1 - episodes.free_bytes[env_id, devices] / episodes.capacity[env_id, devices]
    memory.barh(names, used.numpy(), color="gray")
    memory.set_xlim(0, 1)
    memory.set_xlabel("memory used")
    costs.invert_yaxis()
    figure.suptitle(
        f"{int(episodes.placed[env_id])} of {int(episodes.count[env_id])} pieces placed"
    )
    pixels = io.BytesIO()
    figure.savefig(pixels, format="raw")
    height, width = (round(size * figure.dpi) for size in figure.get_size_inches()[::-1])
    image = np.frombuffer(pixels.getvalue(), np.uint8).reshape(height, width, 4)
    return np.ascontiguousarray(image[..., :3])
