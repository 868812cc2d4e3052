"""Where probes of machines are kept for all models."""

import os
from pathlib import Path


def probe_store() -> Path:
    """Returns the file in which probes of machines are kept for all models."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "autoshard" / "costs.db"
