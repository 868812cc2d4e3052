"""Where results outlive a machine: a shared path, or an object store, by fsspec's URIs.

Work is done in local folders (SQLite and RLlib want real files); what is worth keeping is copied
here as it is made, and fetched from here where the local folder is gone.
"""

import tempfile
from pathlib import Path
from typing import Any

import fsspec

from autoshard.benchmark import MeasurementStore, export_parquet, import_parquet
from autoshard.benchmark.parquet import exchanges_path
from autoshard.experiments.console.cli import reason_of
from autoshard.workload import UserError, documents

_OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"))


class Storage:
    """A folder behind a URI: `/mnt/shared/runs`, `s3://bucket/runs`, whatever fsspec knows.

    UserError if it cannot be written.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._seen: dict[Path, str] = {}  # versions of Parquet files that stores have in them
        self._kept: dict[Path, tuple[int, int]] = {}  # revisions of stores that were kept last
        try:
            self.filesystem, root = fsspec.core.url_to_fs(uri)
            self.root = str(root).rstrip("/")
            # Object stores have no folders: s3fs would make a bucket of a misspelt name instead.
            self._has_folders = not _OBJECT_STORES.intersection(_protocols(self.filesystem))
            if self._has_folders:
                self.filesystem.makedirs(self.root, exist_ok=True)
            probe = f"{self.root}/.autoshard-probe"
            self.filesystem.pipe_file(probe, b"")
            self.filesystem.rm_file(probe)
        except ImportError as error:
            raise UserError(f"--storage {uri}: {error}") from error
        except Exception as error:  # each object store has errors of its own
            raise UserError(f"--storage {uri}: cannot be written: {reason_of(error)}") from error

    def within(self, name: str) -> "Storage":
        """A folder of that name in it."""
        return Storage(f"{self.uri.rstrip('/')}/{name}")

    def has(self, name: str) -> bool:
        """True if there is a file or a folder of that name."""
        self.filesystem.invalidate_cache()  # another process may have written since
        return bool(self._do(self.filesystem.exists, f"{self.root}/{name}"))

    def has_any(self, pattern: str) -> bool:
        """True if there is a file whose path matches."""
        return any(Path(name).match(pattern) for name in self._names())

    def read_json(self, name: str) -> Any:
        """A JSON file's value; None without such a file."""
        if not self.has(name):
            return None
        text = self._do(self.filesystem.cat_file, f"{self.root}/{name}")
        with documents.naming(f"{self.uri}/{name}"):
            return documents.parse(text)

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""
        if self.has(name):
            self._do(self.filesystem.rm, f"{self.root}/{name}", recursive=True)

    def keep(self, file: Path, name: str | None = None) -> None:
        """Copy a file here, whole or not at all where the store can do that."""
        target = f"{self.root}/{name or file.name}"
        if self._has_folders:
            self._do(self.filesystem.makedirs, target.rpartition("/")[0], exist_ok=True)
        if self.is_local:
            partial = f"{target}.partial"
            self._do(self.filesystem.put_file, str(file), partial)
            self._do(self.filesystem.mv, partial, target)
        else:  # an object appears when all of it has arrived
            self._do(self.filesystem.put_file, str(file), target)

    def keep_folder(self, folder: Path, last: str, without: str) -> None:
        """Make what is here equal to a folder, but for files that match `without`.

        The file `last`, which names others, comes last; what it does not name goes after it.
        """
        names = [
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and not path.match(without)
        ]
        there = self._names()
        for name in sorted(names, key=lambda name: name == last):
            self.keep(folder / name, name)
        for name in there - set(names):
            if not Path(name).match("*.parquet"):
                self._do(self.filesystem.rm_file, f"{self.root}/{name}")

    def fetch_folder(self, folder: Path, last: str = "") -> bool:
        """Copy all that is here into a local folder, the file `last` after all others; False if
        there is nothing.
        """
        names = self._names()
        for name in sorted(names, key=lambda name: name == last):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            self._do(self.filesystem.get_file, f"{self.root}/{name}", str(target))
        return bool(names)

    def keep_store(self, store: Path) -> None:
        """Copy a store of measurements here as Parquet, with what others have brought since."""
        self.fetch_store(store)
        parquet = f"{store.stem}.parquet"
        with tempfile.TemporaryDirectory() as place, MeasurementStore(store) as found:
            revision = found.revision()
            if self._kept.get(store) == revision and self.has(parquet):
                return
            export_parquet(found, Path(place) / parquet)
            for file in sorted(Path(place).iterdir()):
                self.keep(file)
        self._kept[store] = revision
        self._seen[store] = self._version(parquet)

    def fetch_store(self, store: Path) -> int:
        """Bring what was measured elsewhere into a local store; returns how many were new."""
        parquet = f"{store.stem}.parquet"
        here = self._names()
        if parquet not in here or self._version(parquet) == self._seen.get(store):
            return 0
        self._seen[store] = self._version(parquet)
        with tempfile.TemporaryDirectory() as place:
            for name in (parquet, exchanges_path(parquet).name):
                if name in here:
                    self._do(self.filesystem.get_file, f"{self.root}/{name}", f"{place}/{name}")
            store.parent.mkdir(parents=True, exist_ok=True)
            with MeasurementStore(store) as ours:
                return import_parquet(ours, Path(place) / parquet)

    @property
    def is_local(self) -> bool:
        """True for a path of this machine's file system, shared or not."""
        return "file" in _protocols(self.filesystem)

    def _version(self, name: str) -> str:
        """Another one when a file has changed."""
        return str(self._do(self.filesystem.ukey, f"{self.root}/{name}"))

    def _names(self) -> set[str]:
        """All files here."""
        self.filesystem.invalidate_cache()  # another process may have written since
        found = self._do(self.filesystem.find, self.root)
        return {name[len(self.root) + 1 :] for name in found}

    def _do(self, action: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return action(*arguments, **options)
        except Exception as error:  # each object store has errors of its own
            raise UserError(f"{self.uri}: {reason_of(error)}") from error


def absolute(uri: str) -> str:
    """The same, whatever the current folder will be."""
    return uri if "://" in uri else str(Path(uri).expanduser().resolve())


def _protocols(filesystem: Any) -> tuple[str, ...]:
    found = filesystem.protocol
    return (found,) if isinstance(found, str) else tuple(found)
