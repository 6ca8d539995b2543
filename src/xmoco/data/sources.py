"""Where images come from: a folder, a tar archive, a torchvision set, or the embedded patterns.

``open_images`` makes an ``ImageSet`` of any of them. ``layout`` tells how folders and archives are
expected to look.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from xmoco.config import DataConfig
from xmoco.data.imagesets import ArrayImages, EncodedImages, ImageSet
from xmoco.data.label_file import classes_in, label_matrix, read_label_file
from xmoco.data.layout import (
    TEST_FOLDERS,
    LabelRule,
    SplitFolders,
    labels_of,
    misplaced,
    split_folders,
    split_of,
    train_classes,
)
from xmoco.data.names import IMAGE_EXTENSIONS, LABEL_ENDING, ends_in, sample_of
from xmoco.data.shards import ShardSource, local_shards
from xmoco.data.stores import ENDINGS, Disk, expanded, has_pattern, is_distant, open_distant
from xmoco.data.torchvision_sets import SPLIT_ARGUMENTS, open_torchvision
from xmoco.data.trees import FolderTree, Tree, open_tar
from xmoco.errors import UserError, nearest
from xmoco.text import printable

__all__ = [
    "ArrayImages",
    "EncodedImages",
    "ImageSet",
    "all_pictures",
    "open_images",
    "open_splits",
    "opened_once",
]

TORCHVISION = "torchvision:"
ARCHIVE_ENDING = re.compile(r"\.(tar(\.\w+)?|t(gz|xz|bz2?)|parquet)$", re.IGNORECASE)


def is_path(source: str) -> bool:
    """Whether a folder or an archive is meant, and not a set that is known by its name."""
    return source != "patterns" and not source.startswith(TORCHVISION)


def names_shards(source: str) -> bool:
    """Whether shards are meant by a URL or a pattern, and not a folder or file of such a name."""
    if is_distant(source):
        return True
    return has_pattern(source) and not os.path.lexists(os.path.expanduser(source))  # noqa: PTH111


def set_name(source: str | Path) -> str:
    """What a source is called: by torchvision; or as the folder, or the archive without its ending.

    Only what tells the format of an archive is an ending: ``my.photos.tar.xz`` is ``my.photos``,
    and the folder ``Set.v2`` is ``Set.v2``.
    """
    if not is_path(str(source)):
        return str(source).removeprefix(TORCHVISION)
    if names_shards(str(source)):
        last = str(source).rstrip("/").rpartition("/")[2]
        name = re.sub(r"[-_.]*\{.*", "", ARCHIVE_ENDING.sub("", last))
        return printable(name) or "images"
    path = Path(os.path.realpath(os.path.expanduser(source)))  # noqa: PTH111
    folder = os.path.isdir(path)  # noqa: PTH112  # unlike Path's, it takes any name
    return printable(path.name if folder else ARCHIVE_ENDING.sub("", path.name)) or "images"


def source_name(source: str | Path) -> str:
    """The same in small letters, for the names of runs and of the work of records."""
    return set_name(source).lower()


def open_images(data: DataConfig, split: Literal["train", "test"]) -> ImageSet | None:
    """The images of a split. Only a test split may be missing; then there is none."""
    if data.source == "patterns":
        # Imported here because nothing else needs it: most runs bring their own images.
        from xmoco.data.patterns import patterns

        pixels, labels, classes = patterns(split)
        if data.labels == "none":
            return ArrayImages(f"patterns ({split})", pixels)
        return ArrayImages(f"patterns ({split})", pixels, labels, classes)
    if data.source.startswith(TORCHVISION):
        return open_torchvision(data, data.source.removeprefix(TORCHVISION), split)
    files = _opened(data.source)
    if isinstance(files, ShardSource):
        beside = [name for name in TEST_FOLDERS if name in files.splits]
        chosen = split if split == "train" else next(iter(beside), split)
        return files.images(chosen, data.labels, data.short_side)
    beside = files.folders.beside
    if split == "train":
        name = f"{files.name} (train)" if beside else files.name
        return files.split(data, files.folders.train, name)
    if not beside:
        return None
    folder = beside[0].split("/")[-2]
    return files.split(data, beside[0], f"{files.name} ({folder})")


def open_splits(data: DataConfig) -> dict[str, ImageSet]:
    """All splits of a folder or an archive, by what their folders mean: ``train`` comes first."""
    files = _opened(data.source)
    if isinstance(files, ShardSource):
        opened = {
            split: files.images(split, data.labels, data.short_side) for split in files.splits
        }
        return {split: images for split, images in opened.items() if images is not None}
    tests = {split_of(folder.split("/")[-2]) or "": folder for folder in files.folders.beside}
    return {
        split: files.split(data, folder, f"{files.name} ({split})")
        for split, folder in {"train": files.folders.train, **tests}.items()
    }


def all_pictures(
    source: str | Path, short_side: int | None = None
) -> tuple[EncodedImages, list[str]]:
    """A picture, or all of a folder or an archive, whatever their folders mean; and their paths in
    it. What is there is meant, though it be called as a set is. Without ``short_side`` they keep
    their full size."""
    known = not is_path(str(source)) or is_distant(str(source))
    if known and not os.path.exists(source):  # noqa: PTH110
        raise UserError(
            f"{printable(str(source))} is no image, folder or archive: sets known by name, shards "
            "and addresses are not taken here."
        )
    path = existing_path(str(source))
    if path.is_file() and ends_in(path.name, IMAGE_EXTENSIONS):
        tree: Tree = FolderTree(path.parent)
        paths = [path.name]
    else:
        tree = FolderTree(path) if path.is_dir() else open_tar(path)
        paths = tree.images()
    if not paths:
        raise UserError(f"there are no images in {printable(str(path))}.")
    return EncodedImages(str(source), tree, paths, None, None, short_side), paths


def existing_path(source: str, other_names: Iterable[str] = ()) -> Path:
    """The folder or archive; if it is not there, the nearest thing that is, is offered."""
    # Unlike Path.expanduser, this leaves ~nobody alone, so that it is reported as not there.
    path = Path(os.path.expanduser(source))  # noqa: PTH111
    if not source or not os.path.exists(path):  # noqa: PTH110
        sets = ["patterns", *(TORCHVISION + name for name in SPLIT_ARGUMENTS), *other_names]
        names = [] if len(path.parts) > 1 else sets
        if path.parent.is_dir():
            siblings = [other for other in path.parent.iterdir() if not other.name.startswith(".")]
            names += [printable(str(sibling)) for sibling in siblings]
        raise UserError(f"there is no folder or archive {source!r}{nearest(str(path), names)}.")
    return path


_kept: ContextVar[dict[str, "_Files | ShardSource"] | None] = ContextVar("kept", default=None)


@contextmanager
def opened_once() -> Iterator[None]:
    """While it lasts, a source is listed or decompressed once, however often it is opened; what is
    put there meanwhile is not seen."""
    if _kept.get() is not None:
        yield
        return
    before = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(before)


def _opened(source: str) -> "_Files | ShardSource":
    kept = _kept.get()
    if kept is None:
        return _files_of(source)
    if source not in kept:
        kept[source] = _files_of(source)
    return kept[source]


def _files_of(source: str) -> "_Files | ShardSource":
    """What a folder, an archive or shards hold."""
    if is_distant(source):
        return ShardSource(set_name(source), open_distant(source))
    if names_shards(source):
        paths = expanded(os.path.expanduser(source))  # noqa: PTH111
        return ShardSource(set_name(source), Disk(paths))
    path = existing_path(source)
    if path.suffix.lower() == ".parquet" and path.is_file():
        return ShardSource(path.stem, Disk([str(path)]))
    if path.is_file() and ends_in(path.name, IMAGE_EXTENSIONS):
        raise UserError(f"{printable(source)} is a single image: give a folder or an archive.")
    tree = FolderTree(path) if path.is_dir() else open_tar(path)
    images = tree.images()
    if not images and path.is_dir() and (shards := tree.files(ENDINGS)):
        return local_shards(path, shards)
    if path.is_file() and _is_shard(tree, images):
        return ShardSource(set_name(path), Disk([str(path)]))
    return _Files.of(path, tree, images)


def _is_shard(archive: Tree, images: list[str]) -> bool:
    """Whether every image has a file beside it that tells its class, by WebDataset's rule; and
    there is nothing that only folders can tell."""
    if not images or archive.place(images[0]) is None or split_folders(images).beside:
        return False
    labelled = {sample_of(path) for path in archive.files((LABEL_ENDING,))}
    return all(sample_of(path) in labelled for path in images)


@dataclass(frozen=True)
class _Files:
    """All images of a folder or an archive."""

    name: str
    tree: Tree
    paths: list[str]
    folders: SplitFolders

    @classmethod
    def of(cls, source: Path, tree: Tree, paths: list[str]) -> "_Files":
        kind = "folder" if source.is_dir() else "archive"
        if not paths:
            raise UserError(
                f"there are no images in {printable(str(source))}; looked for files ending in "
                f"{', '.join(IMAGE_EXTENSIONS)}."
            )
        name = f"{kind} {printable(source.resolve().name)}"
        return cls(name, tree, paths, split_folders(paths))

    def split(self, data: DataConfig, folder: str, name: str) -> ImageSet:
        """The images in ``folder``; what classes there are is told by the training split."""
        labels, classes = self._labels(data.labels, folder)
        images = EncodedImages(
            name,
            self.tree,
            [path for path in self.paths if path.startswith(folder)],
            labels,
            None if classes is None else tuple(map(printable, classes)),
            data.short_side,
        )
        images.passed_over = self.folders.passed_over(self.paths)
        images.misplaced = misplaced(self._inside(folder)) if labels is None else None
        return images

    def _inside(self, folder: str) -> list[str]:
        return [path.removeprefix(folder) for path in self.paths if path.startswith(folder)]

    def _labels(self, rule: LabelRule, folder: str) -> tuple[Tensor | None, tuple[str, ...] | None]:
        """Labels and classes by the label file of the training split, or by its folders."""
        train, chosen = self.folders.train, self._inside(folder)
        known = read_label_file(self.tree, train) if rule == "auto" else None
        if known is None:
            classes = train_classes(self._inside(train), rule)
            split = "training" if folder == train else folder.split("/")[-2]
            return labels_of(chosen, classes, rule, split), classes
        classes = classes_in(known)
        here = known if folder == train else read_label_file(self.tree, folder)
        return None if here is None else label_matrix(here, chosen, classes), classes
