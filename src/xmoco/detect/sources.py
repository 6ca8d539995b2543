"""Where images with boxes come from: a folder or an archive in COCO's, VOC's or YOLO's layout, or
YOLO's yaml file."""

from pathlib import Path, PurePosixPath

from xmoco.data.layout import TEST_FOLDERS
from xmoco.data.sources import existing_path
from xmoco.data.trees import FolderTree, Tree, open_tar
from xmoco.detect.coco_json import read_coco
from xmoco.detect.objects import DetectionSet, some_of
from xmoco.detect.voc_xml import read_voc, voc_years
from xmoco.detect.yolo_text import describes_yolo, read_yolo, yolo_file
from xmoco.errors import UserError
from xmoco.text import printable


def open_detection(
    source: str | Path, short_side: int | None = None
) -> tuple[DetectionSet, DetectionSet]:
    """Images to learn from and images to be judged by.

    ``short_side``: images whose shorter side is longer than this are shrunk to it when decoded.
    """
    path = existing_path(str(source))
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        train, test = _read_yaml(path, short_side)
    else:
        tree: Tree = FolderTree(path) if path.is_dir() else open_tar(path)
        kind = "folder" if path.is_dir() else "archive"
        name = f"{kind} {printable(path.resolve().name)}"
        train, test = _read(tree, name, str(source), short_side)
    if len(train.to_learn_from()) == 0:
        why = ""
        if train.dropped:
            why = f": no box has an area inside its image, as that of {train.dropped[0]}"
        raise UserError(f"{train.name} has no image with an object to learn from{why}.")
    if len(test) == 0 or test.objects.ignored.all():
        raise UserError(f"{test.name} has no objects that a detector could be judged by.")
    return train, test


def _read(
    tree: Tree, name: str, source: str, short_side: int | None
) -> tuple[DetectionSet, DetectionSet]:
    years = voc_years(tree)
    if years:
        return read_voc(tree, years, name, short_side)
    yolo = yolo_file(tree)
    if yolo is not None:
        return read_yolo(tree, yolo, name, short_side)
    train_file, test_file = _coco_files(tree, source)
    train = read_coco(tree, train_file, f"{name} (train)", short_side)
    test = read_coco(tree, test_file, f"{name} (val)", short_side, train.categories)
    return train, test


def _read_yaml(path: Path, short_side: int | None) -> tuple[DetectionSet, DetectionSet]:
    tree, folder = FolderTree(path.parent), path.resolve().parent.name
    if not describes_yolo(tree, path.name):
        raise UserError(
            f"{printable(str(path))} is no yaml file of YOLO, with names, train and val."
        )
    return read_yolo(tree, path.name, f"folder {printable(folder)}", short_side)


def _coco_files(tree: Tree, source: str) -> tuple[str, str]:
    """The files of training and of validation, told by their names or their folders'."""
    files = tree.files(("json",))
    # COCO's own folder has captions and keypoints too, which are large.
    files = [f for f in files if PurePosixPath(f).name.startswith("instances_")] or files
    train = [file for file in files if _is_of(file, "train")]
    by_name = (([file for file in files if _is_of(file, name)]) for name in TEST_FOLDERS)
    test = next((found for found in by_name if found), [])
    if not train and not test:
        raise UserError(
            f"{printable(source)} holds no annotations that are known: neither COCO's json "
            "(instances_train.json and instances_val.json), nor PASCAL VOC's folders, nor a yaml "
            "file of YOLO, with names, train and val."
        )
    for part, found in (("training", train), ("validation", test)):
        if not found:
            raise UserError(
                f"{printable(source)} has no json file of {part} images: found {some_of(files)}."
            )
        if len(found) > 1:
            raise UserError(
                f"{printable(source)} has several json files of {part} images, {some_of(found)}: "
                "keep one."
            )
    return train[0], test[0]


def _is_of(path: str, split: str) -> bool:
    """Whether the file's name tells of a split, or else its folder."""
    *folders, file = PurePosixPath(path.lower()).parts
    if any(name in file for name in ("train", *TEST_FOLDERS)):
        return split in file
    return bool(folders) and split in folders[-1]
