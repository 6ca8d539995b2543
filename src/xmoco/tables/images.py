"""The images of all trials: decoded once, and told from others of the same name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from xmoco.config import DataConfig
from xmoco.data import ImageSet
from xmoco.data.batches import preload
from xmoco.data.fingerprint import fingerprint
from xmoco.data.subset import held_out
from xmoco.errors import UserError
from xmoco.evaluate.evaluation import labelled_splits_of


@dataclass(frozen=True)
class Images:
    """What all trials learn from and are judged by."""

    train: ImageSet
    test: ImageSet
    fingerprints: Mapping[str, str]
    """Which images they are, as records tell it: of all training images, whether some are held out
    or not, and of the test images if these are judged."""

    @classmethod
    def open(cls, data: DataConfig, held_out_share: float | None) -> "Images":
        """With a share, that part of the training images is judged, and no test image looked at."""
        train, test = labelled_splits_of(data)
        fingerprints = {"train_fingerprint": fingerprint(train, with_labels=True)}
        if held_out_share is not None:
            train, test = held_out(train, held_out_share)
        elif test is None:
            raise UserError(
                f"{train.name} has no test images to judge by: use --held-out, which holds out "
                "training images."
            )
        else:
            fingerprints["test_fingerprint"] = fingerprint(test, with_labels=True)
        return cls(train, test, fingerprints)

    def decoded(self, device: torch.device, gib: float) -> "Images":
        """The same on the device, where they fit."""
        train, test = (preload(part, device, gib=gib) for part in (self.train, self.test))
        return replace(self, train=train, test=test)
