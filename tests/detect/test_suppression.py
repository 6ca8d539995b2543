"""The kernels suppress what torchvision does.

They run on CUDA where there is some. Elsewhere Triton's interpreter runs them on the CPU; it must
be chosen before Triton is imported, so another process does it.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchvision.ops import nms

from helpers import interpreter_out_of_date
from xmoco.detect import suppression

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def crowded(images: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Boxes around a few places, best first, some of which take no part; one has no area."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randint(10, 50, (images, count, 2), generator=generator).float()
    sides = torch.rand(images, count, 2, generator=generator) * 20 + 5
    boxes = torch.cat([centres - sides / 2, centres + sides / 2], dim=2)
    if count > 3:
        boxes[:, 1] = boxes[:, 0]  # twice the same
        boxes[:, 2, 2:] = boxes[:, 2, :2]
    return boxes.to(DEVICE), (torch.rand(images, count, generator=generator) < 0.9).to(DEVICE)


def groups(counts: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    made = [crowded(2, count, seed) for seed, count in enumerate(counts)]
    return [boxes for boxes, _ in made], [kept for _, kept in made]


def one_by_one(boxes: Tensor, kept: Tensor, threshold: float) -> Tensor:
    stay = torch.zeros_like(kept)
    for image in range(len(kept)):
        rows = kept[image].nonzero()[:, 0]
        rank = torch.linspace(1, 0, len(rows), device=rows.device)
        stay[image, rows[nms(boxes[image, rows], rank, threshold)]] = True
    return stay


@pytest.mark.parametrize(("counts", "threshold"), [([40], 0.3), ([70, 33, 1], 0.7)])
def test_groups_and_images_know_nothing_of_each_other(counts: list[int], threshold: float) -> None:
    boxes, kept = groups(counts)
    found = suppression.suppressed(boxes, kept, threshold)
    for own, box, there in zip(found, boxes, kept, strict=True):
        assert torch.equal(own, one_by_one(box, there, threshold))
        assert 0 < own.sum() <= there.sum()


INTERPRETED = """
import sys, torch
from xmoco.detect.suppression_kernel import suppressed_in_groups
boxes, kept, threshold = torch.load(sys.argv[1])
torch.save(suppressed_in_groups(boxes, kept, threshold), sys.argv[1])
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from CUDA, the interpreter does what they are asked for."""
    if CUDA:
        return
    if interpreter_out_of_date():
        pytest.skip("Triton's interpreter is older than this numpy")

    def interpreted(boxes: Tensor, kept: Tensor, threshold: float) -> Tensor:
        file = tmp_path / "tensors.pt"
        torch.save((boxes, kept, threshold), file)
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-W", "ignore", "-c", INTERPRETED, str(file)]
        subprocess.run(command, env=environment, check=True, timeout=300)
        found: Tensor = torch.load(file)
        return found

    module = type(sys)("xmoco.detect.suppression_kernel")
    module.__dict__["suppressed_in_groups"] = interpreted
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.gpu(elsewhere=True)
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_do_the_same() -> None:
    boxes, kept = groups([5, 33, 40, 1])
    found = suppression._by_kernels(boxes, kept, 0.5)
    expected = suppression._by_torchvision(boxes, kept, 0.5)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


@pytest.mark.gpu
def test_kernels_take_as_many_as_a_detector_has() -> None:
    boxes, kept = crowded(4, 3000)
    large = boxes * 20
    (found,) = suppression._by_kernels([large], [kept], 0.7)
    assert torch.equal(found, one_by_one(large, kept, 0.7))
