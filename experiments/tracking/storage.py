"""Storage that outlives a machine: a shared path or an object store, by fsspec's URIs.

Work is done in local folders, because SQLite and RLlib need real files. Results are copied to the
storage as they are made, and fetched from it where the local folder is lost.
"""

import tempfile
from pathlib import Path
from typing import Any

import fsspec

from autoshard.benchmark import MeasurementStore, export_parquet, import_parquet
from autoshard.benchmark.store.parquet import exchanges_path
from autoshard.workload import UserError, documents
from autoshard.workload.errors import reason_of

_OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"))


class Storage:
    """A folder behind a URI of fsspec, such as `/mnt/shared/runs` or `s3://bucket/runs`.

    Raises:
        UserError: It cannot be written.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._seen: dict[Path, str] = {}  # versions of Parquet files that were imported into stores
        self._kept: dict[Path, tuple[int, int]] = {}  # revisions of stores that were kept
        try:
            self.filesystem, root = fsspec.core.url_to_fs(uri)
            self.root = str(root).rstrip("/")
            # Object stores have no folders: s3fs would create a bucket of a misspelt name.
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
        """Returns the storage of a subfolder."""
        return Storage(f"{self.uri.rstrip('/')}/{name}")

    def has(self, name: str) -> bool:
        """Returns whether there is a file or folder of that name."""
        self.filesystem.invalidate_cache()  # another process may have written since
        return bool(self._do(self.filesystem.exists, f"{self.root}/{name}"))

    def has_any(self, pattern: str) -> bool:
        """Returns whether there is a file whose path matches."""
        return any(Path(name).match(pattern) for name in self._names())

    def read_json(self, name: str) -> Any:
        """Returns the value of a JSON file; None without the file."""
        if not self.has(name):
            return None
        text = self._do(self.filesystem.cat_file, f"{self.root}/{name}")
        with documents.naming(f"{self.uri}/{name}"):
            return documents.parse(text)

    def remove(self, name: str) -> None:
        """Removes a file or a folder, if it exists."""
        if self.has(name):
            self._do(self.filesystem.rm, f"{self.root}/{name}", recursive=True)

    def keep(self, file: Path, name: str | None = None) -> None:
        """Copies a file to the storage, atomically if it is local or an object store."""
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
        """Makes the storage equal to a folder, except for files that match `without`.

        The file `last`, which refers to others, is copied last. Other files are removed after it.
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
        """Copies all files into a local folder, the file `last` after all others.

        Returns False if there are none.
        """
        names = self._names()
        for name in sorted(names, key=lambda name: name == last):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            self._do(self.filesystem.get_file, f"{self.root}/{name}", str(target))
        return bool(names)

    def keep_store(self, store: Path) -> None:
        """Merges the storage's measurements into a store, then copies it there as Parquet."""
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
        """Merges the storage's measurements into a local store; returns the number of new ones."""
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
        """Whether it is a path of this machine's file system, which may be shared."""
        return "file" in _protocols(self.filesystem)

    def _version(self, name: str) -> str:
        """Returns a string that changes with the file."""
        return str(self._do(self.filesystem.ukey, f"{self.root}/{name}"))

    def _names(self) -> set[str]:
        """Returns the paths of all files."""
        self.filesystem.invalidate_cache()  # another process may have written since
        found = self._do(self.filesystem.find, self.root)
        return {name[len(self.root) + 1 :] for name in found}

    def _do(self, action: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return action(*arguments, **options)
        except Exception as error:  # each object store has errors of its own
            raise UserError(f"{self.uri}: {reason_of(error)}") from error


def absolute(uri: str) -> str:
    """Returns the URI independent of the current folder."""
    return uri if "://" in uri else str(Path(uri).expanduser().resolve())


def _protocols(filesystem: Any) -> tuple[str, ...]:
    found = filesystem.protocol
    return (found,) if isinstance(found, str) else tuple(found)
