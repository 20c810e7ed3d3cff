# SPDX-License-Identifier: Apache-2.0
"""Read files that a user names, after checking that other users cannot write or replace them.

Profiles and datastores do not run as code, but they decide how fast answers come, and truncating a mapped
file ends the process. vLLM may run code from the folder of a draft model.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path


def refuse_untrusted(path: Path) -> None:
    """Refuse a path if any user may write the file or replace it, or a folder or link that leads to it.

    Raises:
        OSError: the path cannot be resolved.
        ValueError: any user may change it; the message is a clause that says what to do.
    """
    try:
        resolved = path.resolve(strict=True)
    except RuntimeError:  # Python 3.11 and 3.12
        raise ValueError("it is a link that leads to itself") from None
    if (mode := resolved.stat().st_mode) & stat.S_IWOTH:
        # A sticky folder, such as /tmp, must stay writable.
        instead = "use a folder of your own" if mode & stat.S_ISVTX else f"chmod o-w {resolved}"
        raise ValueError(f"any user may write {resolved}: {instead}")
    for child in _walk_path(path):
        folder, own = child.parent.stat(), child.lstat()
        is_sticky = folder.st_mode & stat.S_ISVTX
        is_protected = is_sticky and own.st_uid in (os.geteuid(), 0, folder.st_uid)
        if folder.st_mode & stat.S_IWOTH and not is_protected:
            instead = "copy it to a folder of your own" if is_sticky else f"chmod o-w {child.parent}"
            raise ValueError(f"any user may replace {child}: {instead}")


def _walk_path(path: Path) -> Iterator[Path]:
    """Yield every folder, link and file that the system visits to open an existing file, in order."""
    remaining = [*reversed(Path.cwd().joinpath(path).parts)]
    here = Path(remaining.pop())
    while remaining:
        if (part := remaining.pop()) == "..":
            here = here.parent  # `here` contains no link
            continue
        child = here / part
        yield child
        if child.is_symlink():
            target = Path(os.readlink(child))
            remaining += reversed(target.parts)
            if target.is_absolute():
                here = Path(remaining.pop())
        else:
            here = child


def read(path: Path, max_bytes: int) -> bytes:
    """Read a trusted regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not trusted, no regular file, or too large; the message is a clause.
    """
    if path.is_dir():  # before any advice on its rights
        raise ValueError("it is a folder; name a file")
    refuse_untrusted(path)
    # O_NONBLOCK, because opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
        return file.read(max_bytes)


def reason(error: Exception) -> str:
    """Return the error's text, without the path in an `OSError`."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
