"""Where images come from: a folder, a tar archive, a torchvision set, or the embedded patterns.

``open_images`` makes an ``ImageSet`` of any of them. ``layout`` tells how folders and archives are
expected to look.
"""

import os
from pathlib import Path
from typing import Literal

from xmoco.config import DataConfig
from xmoco.data.imagesets import ArrayImages, EncodedImages, ImageSet
from xmoco.data.layout import labels_of, split_folders, train_classes
from xmoco.data.torchvision_sets import SPLIT_ARGUMENTS, open_torchvision
from xmoco.data.trees import IMAGE_EXTENSIONS, FolderTree, open_tar, printable
from xmoco.errors import UserError, nearest

__all__ = ["ArrayImages", "EncodedImages", "ImageSet", "open_images"]

TORCHVISION = "torchvision:"


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
    return _open_path(data, split)


def _open_path(data: DataConfig, split: Literal["train", "test"]) -> ImageSet | None:
    # Unlike Path.expanduser, this leaves ~nobody alone, so that it is reported as not there.
    source = Path(os.path.expanduser(data.source))  # noqa: PTH111
    if not data.source or not os.path.exists(source):  # noqa: PTH110
        raise UserError(f"there is no folder or archive {data.source!r}{_nearest_source(source)}.")
    tree = FolderTree(source) if source.is_dir() else open_tar(source)
    kind = "folder" if source.is_dir() else "archive"
    paths = tree.images()
    if not paths:
        raise UserError(
            f"there are no images in {printable(str(source))}; looked for files ending in "
            f"{', '.join(IMAGE_EXTENSIONS)}."
        )
    train, test = split_folders(paths)
    folder = train if split == "train" else test
    if folder is None:
        return None
    inside_train = [path.removeprefix(train) for path in paths if path.startswith(train)]
    classes = train_classes(inside_train, data.labels)
    chosen = [path for path in paths if path.startswith(folder)]
    labels = labels_of([path.removeprefix(folder) for path in chosen], classes, data.labels)
    return EncodedImages(
        f"{kind} {printable(source.resolve().name)}" + (f" ({split})" if test else ""),
        tree,
        chosen,
        labels,
        None if classes is None else tuple(map(printable, classes)),
        data.short_side,
    )


def _nearest_source(source: Path) -> str:
    names = ["patterns", *(TORCHVISION + name for name in SPLIT_ARGUMENTS)]
    if source.parent.is_dir():
        names += [printable(str(sibling)) for sibling in source.parent.iterdir()]
    return nearest(str(source), names)
