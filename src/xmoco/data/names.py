"""What the names of files say: which are images, which are hidden, and which belong together.

Nothing but the standard library is imported here, as by all that runs in processes of its own.
"""

from collections.abc import Collection

IMAGE_EXTENSIONS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff"),
    *("avif", "jp2", "tga", "ppm", "pgm", "pbm", "pnm"),
)
LABEL_ENDING = "cls"
"""By which WebDataset calls the file that holds an image's class."""

_NOT_DATA = "__MACOSX"
"""Where macOS keeps resource forks in archives, under the names of the images they belong to."""


def is_visible(name: str) -> bool:
    return not name.startswith(".") and name != _NOT_DATA


def visible_path(name: str) -> str | None:
    """A name in an archive as a path; none if it is hidden, or leads out of the archive."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if parts and all(map(is_visible, parts)):  # which ".." is not
        return "/".join(parts)
    return None


def ends_in(path: str, endings: Collection[str]) -> bool:
    return path.rpartition(".")[2].lower() in endings


def sample_of(path: str) -> str:
    """What files of one sample share, by WebDataset's rule: all before the first dot of a name."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + name.partition(".")[0]
