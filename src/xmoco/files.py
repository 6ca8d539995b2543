"""Files are written whole or not at all, and read only if they are files and not too long."""

import errno
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from xmoco.errors import UserError


def _to_disk(folder: Path) -> None:
    with suppress(OSError):  # some systems cannot open folders; the content is safe anyway
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def text_of(path: Path, longest: int) -> str:
    """The text of a file that has at most ``longest`` bytes.

    An ``OSError`` if it is longer, or no regular file: a pipe is not waited for, and a device that
    never ends is not read. A ``ValueError`` if it is no text.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EOPNOTSUPP
        raise OSError(number, os.strerror(number), str(path))
    if status.st_size > longest:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    with path.open("rb") as file:
        return file.read(longest).decode("utf-8")


def expect_free(out: Path, ending: str, kind: str) -> None:
    """Whether a file can be written is found out before anything is looked at."""
    parent = out.absolute().parent
    if out.exists():
        raise UserError(f"{out} already exists: remove it or name another file with --out.")
    if out.suffix != ending:
        raise UserError(f"{out} must end in {ending}, as it is {kind}.")
    if not parent.is_dir():
        raise UserError(f"there is no folder {parent} for {out.name}.")
    if not os.access(parent, os.W_OK):
        raise UserError(f"{out.name} cannot be written to {parent}.")


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Put ``content`` (bytes, or a function that writes them) at ``path`` in one move.

    It goes to a temporary neighbour, to the disk, and only then under its name: whatever happens
    meanwhile, ``path`` holds either the old content or the new. A full disk is a ``UserError``.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            _to_disk(path.parent)  # the new name too
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        # torch.save reports a failed write as a RuntimeError that came up while handling it.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"could not write {path}: {cause.strerror or cause}.") from error


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Put files into a folder, which is made if need be; each is whole or not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror or error}.") from None
    paths = [folder / name for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        write_whole(path, content)
    return paths
