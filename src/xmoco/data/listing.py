"""What a folder or an archive holds is found out by one process of each machine, for all.

A million files are listed in seconds by one process, but not by eight at the same time; and a file
system that many machines share has better things to do.
"""

import marshal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from xmoco.distributed import first_on_machine, processes
from xmoco.launchers import local_rank

Listing = TypeVar("Listing", list[str], dict[str, tuple[int, int]])


def once_per_machine(find: Callable[[], Listing]) -> Listing:
    """What ``find`` finds, in every process; the processes of a machine hand it on by a file."""
    if processes() == 1:
        return find()
    found: list[Listing] = []

    def write() -> str:
        found.append(find())
        with tempfile.NamedTemporaryFile(prefix="xmoco-listing-", delete=False) as file:
            marshal.dump(found[0], file)
        return file.name

    path = Path(first_on_machine(write))
    try:
        return found[0] if found else cast(Listing, marshal.loads(path.read_bytes()))
    finally:
        first_on_machine(lambda: None)  # all have read it
        if local_rank() == 0:
            path.unlink(missing_ok=True)
