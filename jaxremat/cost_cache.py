"""A directory of compiled figures, one small JSON file for each program, target and set of versions.

The directory is `$JAXREMAT_CACHE_DIR`, else `jaxremat` in the user's cache directory (`$XDG_CACHE_HOME`, `~/.cache`;
`~/Library/Caches` on macOS). Files are written under another name and moved into place, so that a reader never sees half
of one; one that cannot be read counts as absent, and a directory that cannot be written to is done without.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_VERSION = 1  # of the figures in a file


def cache_directory() -> Path:
    """Returns where the figures are kept; it need not exist."""
    chosen = os.environ.get("JAXREMAT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jaxremat"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxremat"


def cache_key(program_text: str, circumstances: Mapping[str, Any]) -> str:
    """Returns the name of a program's figures.

    Args:
        program_text: StableHLO without source locations.
        circumstances: all else that the figures depend on, as JSON values: target, versions, compiler options.
    """
    digest = hashlib.sha256(program_text.encode())
    digest.update(json.dumps([_VERSION, circumstances], sort_keys=True).encode())
    return digest.hexdigest()


def load(key: str) -> dict[str, Any] | None:
    """Returns the figures kept under a key, or None."""
    try:
        figures = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return figures if isinstance(figures, dict) and figures.get("key") == key else None


def store(key: str, figures: Mapping[str, Any]) -> None:
    """Keeps figures (JSON values) under a key."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({**figures, "key": key}, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _path(key: str) -> Path:
    return cache_directory() / "cost" / f"{key}.json"
