# SPDX-License-Identifier: Apache-2.0
"""Files that a user names are read as data, and only where nobody else can have put or can change them.

Nothing that this package reads from files (profiles, datastores) runs as code. Yet what anybody may write
decides how fast answers come, and what is cut under a memory map ends the process. A draft model is read
by vLLM, which may run code that lies beside it.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path


def refuse_untrusted(path: Path) -> None:
    """Refuse what users beside the owner's group may change or replace: the file, or a link on its way.

    Raises:
        OSError, ValueError: it cannot be looked at; or, in a few words, who may change it.
    """
    try:
        resolved = path.resolve(strict=True)
    except RuntimeError:  # Python 3.11 and 3.12
        raise ValueError("it is a link that leads to itself") from None
    if resolved.stat().st_mode & stat.S_IWOTH:
        raise ValueError(f"any user may write {resolved}: chmod o-w {resolved}")
    for child in _on_the_way(path):
        folder, own = child.parent.stat(), child.lstat()
        is_kept = folder.st_mode & stat.S_ISVTX and own.st_uid in (os.geteuid(), 0, folder.st_uid)
        if folder.st_mode & stat.S_IWOTH and not is_kept:
            raise ValueError(f"any user may replace {child}: chmod o-w {child.parent}")


def _on_the_way(path: Path) -> Iterator[Path]:
    """Every file, folder and link that the system comes by to open a file that is there, in that order."""
    ahead = [*reversed(Path.cwd().joinpath(path).parts)]
    here = Path(ahead.pop())
    while ahead:
        if (part := ahead.pop()) == "..":
            here = here.parent  # no link is left in its path
            continue
        child = here / part
        yield child
        if child.is_symlink():
            target = Path(os.readlink(child))
            ahead += reversed(target.parts)
            if target.is_absolute():
                here = Path(ahead.pop())
        else:
            here = child


def read(path: Path, max_bytes: int) -> bytes:
    """What a trusted regular file holds.

    Raises:
        OSError, ValueError: in a few words, why not: it is a device or a pipe, too large, or not trusted.
    """
    refuse_untrusted(path)
    # Opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
        return file.read(max_bytes)


def reason(error: Exception) -> str:
    """Of an `OSError` or another one, in a few words."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
