"""Planning on the first rank of a process group, for all ranks."""

import pickle
from collections.abc import Callable
from typing import TypeVar

from torch import distributed, nn

from autoshard.workload.errors import UserError

Result = TypeVar("Result")
_Table = tuple[str, str, str]  # type of the module, name, and what is known of it


def on_first_rank(
    group: distributed.ProcessGroup, model: nn.Module, ranks: int, make: Callable[[], Result]
) -> Result:
    """Returns what the first rank makes for a model, on all ranks.

    If it fails there, all ranks raise the same error: none waits for a result that does not come.

    Args:
        group: Ranks that call this.
        model: Model of this rank.
        ranks: Number of ranks that this rank plans for.
        make: What the first rank calls.

    Raises:
        UserError: Ranks have different models, or plan for another number of ranks.
    """
    _check_same(group, model, ranks)
    found: list[tuple[Result | None, BaseException | None]] = [(None, None)]
    if group.rank() == 0:
        try:
            found = [(make(), None)]
        except Exception as error:
            if group.size() == 1:
                raise
            found = [(None, _sendable(error))]
    if group.size() > 1:
        distributed.broadcast_object_list(found, distributed.get_global_rank(group, 0), group=group)
    result, failure = found[0]
    if failure is not None:
        raise failure
    assert result is not None
    return result


def _sendable(error: Exception) -> Exception:
    """Returns an error that other ranks can read: as it is, or as a UserError with its text."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))  # of this process
    except Exception:
        return UserError(f"{type(error).__name__}: {error}")
    return error


def _check_same(group: distributed.ProcessGroup, model: nn.Module, ranks: int) -> None:
    """Raises UserError on all ranks if they plan for another number of ranks, or if their models
    differ, which names the first difference.

    Without, training hangs: ranks wait for exchanges of tables that others do not have.
    """
    of_ranks: list[tuple[int, list[_Table]]] = [(ranks, _tables_of(model))] * group.size()
    if group.size() > 1:
        distributed.all_gather_object(of_ranks, of_ranks[0], group=group)
    for planned, _ in of_ranks:
        if planned != group.size():
            raise UserError(
                f"the topology has {planned} ranks, and the process group {group.size()}: give a "
                "topology of as many"
            )
    (_, first), *_ = of_ranks
    for rank, (_, other) in enumerate(of_ranks):
        if other != first:
            raise UserError(
                f"rank {rank} has another model than rank 0: {_difference(first, other, rank)}; "
                "build the same model on all ranks"
            )


def _tables_of(model: nn.Module) -> list[_Table]:
    """Returns the parameters of a model, and the configurations of its tables."""
    found = list[_Table]()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            size = f"{list(parameter.shape)}, {parameter.dtype}"
            found.append((type(module).__name__, prefix + name, size))
        for each in ("embedding_bag_configs", "embedding_configs"):
            for config in getattr(module, each, list)():
                pooling = getattr(config, "pooling", None)
                text = f"features {', '.join(config.feature_names)}, {config.data_type}, {pooling}"
                found.append(("table", f"{prefix}{config.name}", text))
    return found


def _difference(first: list[_Table], other: list[_Table], rank: int) -> str:
    known, found = ({name: text for _, name, text in each} for each in (first, other))
    for name, text in known.items():
        if name not in found:
            return f"{name} is on rank 0 alone"
        if found[name] != text:
            return f"{name} is {found[name]} there, and {text} on rank 0"
    for name in found:
        if name not in known:
            return f"{name} is on rank {rank} alone"
    return "its modules are in another order, or of other types"
