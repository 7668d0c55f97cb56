"""HDF5 files opened for reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py

from kvreplay.errors import Error


def open_to_read(path: str | Path) -> h5py.File:
    """The file; OSError if HDF5 cannot open it. Rejects files that lead elsewhere: nothing of another file is read."""
    file = h5py.File(path, "r", locking=False)
    try:
        _require_self_contained(file, Path(path))
    except BaseException:
        file.close()
        raise
    return file


def _require_self_contained(file: h5py.File, path: Path) -> None:
    def way_out(name: bytes, link: Any) -> Error | None:
        where = f"{path}:/{name.decode(errors='backslashreplace')}"
        if link.type != h5py.h5l.TYPE_HARD:
            found = "a soft link" if link.type == h5py.h5l.TYPE_SOFT else "an external link"
            return Error(where, "link", "an object of this file", found)
        item = h5py.h5o.open(file.id, name)
        if isinstance(item, h5py.h5d.DatasetID):
            creation = item.get_create_plist()
            if creation.get_layout() == h5py.h5d.VIRTUAL or creation.get_external_count() > 0:
                return Error(where, "layout", "stored in this file", "other files")
        return None

    if found := file.id.links.visit(way_out, info=True):  # ends at the first that is not None
        raise found
