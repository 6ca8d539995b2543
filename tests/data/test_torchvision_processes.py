"""Several processes that want a set which is not there yet."""

import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import torchvision

from helpers import be_process, free_port, run_group
from xmoco.config import DataConfig
from xmoco.data import open_images
from xmoco.data.torchvision_sets import MissingSetError
from xmoco.errors import UserError


class Set:
    """As torchvision's: it looks, and downloads where it is told to."""

    data = np.zeros((4, 8, 8, 3), np.uint8)
    targets = (0, 1, 0, 1)
    classes = ("a", "b")

    def __init__(self, root: str, train: bool, download: bool = False) -> None:  # noqa: ARG002
        there = Path(root) / "there"
        if download:
            with (Path(root) / "downloads").open("a") as log:
                log.write("once\n")
            if Path(root, "offline").exists():
                raise RuntimeError("no network.")
            time.sleep(0.3)
            there.touch()
        if not there.exists():
            raise RuntimeError("Dataset not found.")


def process(rank: int, port: int, folder: Path) -> None:
    be_process(rank, port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torchvision.datasets.CIFAR10 = Set
    for root in ("online", "offline"):
        source: dict[str, Any] = {"source": "torchvision:CIFAR10", "root": str(folder / root)}
        try:
            said = str(len(open_images(DataConfig(**source, download=True), "train") or ()))
        except UserError as error:
            said = str(error)
        (folder / f"{root}-{rank}").write_text(said)
    dist.destroy_process_group()


def test_one_process_downloads_and_all_are_told_why_it_failed(tmp_path: Path) -> None:
    for root in ("online", "offline"):
        (tmp_path / root).mkdir()
    (tmp_path / "offline" / "offline").touch()
    run_group(2, process, free_port(), tmp_path)
    failed = "torchvision:CIFAR10 cannot be downloaded: no network."
    for rank in range(2):
        assert (tmp_path / f"online-{rank}").read_text() == "4"
        assert (tmp_path / f"offline-{rank}").read_text() == failed
    for root in ("online", "offline"):
        assert (tmp_path / root / "downloads").read_text() == "once\n"


def test_a_missing_set_can_be_told_to_other_processes() -> None:
    for by_hand in (None, "put it there"):
        error = MissingSetError("it is not there", by_hand)
        told = pickle.loads(pickle.dumps(error))
        assert str(told) == str(error)
        assert told.with_options == error.with_options
        assert "it is not there; " in str(told)
