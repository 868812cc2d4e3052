"""A game as text and as a picture."""

import io

import numpy as np
import numpy.typing as npt

from autoshard.envs.game import ShardingGame

_WIDTH = 40  # characters of the longest bar


def as_text(game: ShardingGame, seat: int = 0) -> str:
    """A line a device: cost as a bar, pieces, memory."""
    placed, count = int(game.placed[seat]), int(game.count[seat])
    lines = [f"{placed} of {count} pieces placed; ideal {game.bound_ms[seat]:.2f} ms"]
    homes = game.homes[seat, :placed]
    longest = max(float(game.cost_ms[seat].max()), float(game.bound_ms[seat]))
    for device in game.exists[seat].nonzero()[:, 0].tolist():
        cost = float(game.cost_ms[seat, device])
        bar = "#" * round(_WIDTH * cost / longest)
        used = 1 - float(game.free[seat, device]) / float(game.capacity[seat, device])
        lines.append(
            f"device{device:<3} {bar:<{_WIDTH}} {cost:6.2f} ms {int((homes == device).sum()):4} "
            f"pieces {used:4.0%} memory"
        )
    if game.stuck[seat]:
        lines.append("dead end: no device has room for the next piece")
    return "\n".join(lines) + "\n"


def as_picture(game: ShardingGame, seat: int = 0) -> npt.NDArray[np.uint8]:
    """The same as an image [height, width, 3]: costs to the left, memory to the right."""
    from matplotlib.figure import Figure

    devices = game.exists[seat].nonzero()[:, 0]
    figure = Figure(figsize=(6.4, 0.8 + 0.3 * max(4, len(devices))), dpi=100, layout="constrained")
    costs, memory = figure.subplots(1, 2, sharey=True)
    names = [f"device{device}" for device in devices.tolist()]
    costs.barh(names, game.cost_ms[seat, devices].numpy())
    costs.axvline(float(game.bound_ms[seat]), color="black", linewidth=0.8, linestyle="--")
    costs.set_xlabel("predicted ms")
    used = 1 - game.free[seat, devices] / game.capacity[seat, devices]
    memory.barh(names, used.numpy(), color="gray")
    memory.set_xlim(0, 1)
    memory.set_xlabel("memory used")
    costs.invert_yaxis()
    figure.suptitle(f"{int(game.placed[seat])} of {int(game.count[seat])} pieces placed")
    pixels = io.BytesIO()
    figure.savefig(pixels, format="raw")
    height, width = (round(size * figure.dpi) for size in figure.get_size_inches()[::-1])
    image = np.frombuffer(pixels.getvalue(), np.uint8).reshape(height, width, 4)
    return np.ascontiguousarray(image[..., :3])
