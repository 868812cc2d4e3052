"""Where probes of machines are kept for all models."""

import os
import tempfile
from pathlib import Path


def probe_store() -> Path:
    """Returns the file in which probes of machines are kept for all models."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        folder = Path(tempfile.gettempdir())
    return folder / "autoshard" / "costs.db"


def writable(store: Path) -> Path:
    """Returns a store's file; another one for this process if its folder cannot be written."""
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        if os.access(store.parent, os.W_OK):
            return store
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="autoshard-")) / store.name
