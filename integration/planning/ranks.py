"""What all ranks of a process group do together before they train."""

from collections.abc import Callable
from typing import TypeVar

from torch import distributed, nn

from autoshard.workload.errors import UserError

Result = TypeVar("Result")
_Table = tuple[str, str, tuple[int, ...]]


def on_first_rank(
    group: distributed.ProcessGroup, model: nn.Module, make: Callable[[], Result]
) -> Result:
    """Returns what the first rank makes for a model, on all ranks.

    If it fails there, all ranks raise the same error: none waits for a result that does not come.

    Args:
        group: Ranks that call this.
        model: Model of this rank.
        make: What the first rank calls.

    Raises:
        UserError: Ranks have different models.
    """
    _check_same(group, model)
    found: list[tuple[Result | None, BaseException | None]] = [(None, None)]
    if group.rank() == 0:
        try:
            found = [(make(), None)]
        except Exception as error:
            if group.size() == 1:
                raise
            error.__traceback__ = error.__cause__ = error.__context__ = None
            found = [(None, error)]
    if group.size() > 1:
        distributed.broadcast_object_list(found, distributed.get_global_rank(group, 0), group=group)
    result, failure = found[0]
    if failure is not None:
        raise failure
    assert result is not None
    return result


def _check_same(group: distributed.ProcessGroup, model: nn.Module) -> None:
    """Raises UserError on all ranks if their models differ, which names the first difference.

    Without, training hangs: ranks wait for exchanges of tables that others do not have.
    """
    if group.size() == 1:
        return
    own = [
        (type(module).__name__, f"{path}.{name}" if path else name, tuple(parameter.shape))
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    of_ranks: list[list[_Table]] = [[] for _ in range(group.size())]
    distributed.all_gather_object(of_ranks, own, group=group)
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        if other != first:
            raise UserError(
                f"rank {rank} has another model than rank 0: {_difference(first, other, rank)}; "
                "build the same model on all ranks"
            )


def _difference(first: list[_Table], other: list[_Table], rank: int) -> str:
    known, found = ({name: shape for _, name, shape in each} for each in (first, other))
    for name, shape in known.items():
        if name not in found:
            return f"{name} is on rank 0 alone"
        if found[name] != shape:
            return f"{name} has shape {list(found[name])} there, and {list(shape)} on rank 0"
    for name in found:
        if name not in known:
            return f"{name} is on rank {rank} alone"
    return "its modules are in another order, or of other types"
