"""XMoCo's ideas inside lightly's MoCo and SimCLR.

    python examples/lightly_plugin.py moco --add consistency
    python examples/lightly_plugin.py simclr --add both --data ~/photos --size 128 --epochs 60

Model, heads, loss, transform and momentum update are lightly's, as its own examples have them.
Lines marked «xmoco» make the difference: a criterion of xmoco's, beside lightly's loss or in its
place. At the end the backbone is judged by its nearest neighbours.

Needs lightly: ``pip install '.[examples]'``.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead, SimCLRProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import MoCoV2Transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18
from torchvision.transforms.functional import to_pil_image

import xmoco
from xmoco.data.patterns import patterns
from xmoco.errors import UserError
from xmoco.evaluate.evaluation import labelled_splits

TEMPERATURE = 0.2
BANK = (1024, 128)  # keys, and their length


class SimCLR(nn.Module):
    """lightly's SimCLR, whose loss compares the views of a batch."""

    def __init__(self, backbone: nn.Module, add: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection_head = SimCLRProjectionHead(512, 512, 128)
        self.criterion = NTXentLoss(temperature=TEMPERATURE)
        self.add = add
        self.xmoco = xmoco.BatchXMoCoLoss(TEMPERATURE, label_weight=float(add == "both"))  # «xmoco»

    def forward(self, x_s: Tensor, x_t: Tensor) -> Tensor:
        z_s, z_t = (self.projection_head(self.backbone(x)) for x in (x_s, x_t))
        if self.add == "nothing":
            return self.criterion(z_s, z_t)
        whole, terms = self.xmoco(F.normalize(z_s), F.normalize(z_t))  # «xmoco»
        if self.add == "both":
            return whole  # «xmoco»: soft labels and consistency instead of lightly's loss
        consistency = terms["consistency_source"] + terms["consistency_target"]
        return self.criterion(z_s, z_t) + consistency / 2  # «xmoco»: the term alone, beside it

    def after_step(self) -> None:
        pass


class MoCo(nn.Module):
    """lightly's MoCo in both directions, whose loss compares with a bank of past keys."""

    def __init__(
        self,
        backbone: nn.Module,
        add: str,
        temperature: float = TEMPERATURE,
        bank: tuple[int, int] = BANK,
    ) -> None:
        super().__init__()
        length, size = bank
        self.backbone = backbone
        self.projection_head = MoCoProjectionHead(512, 512, size)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion_s, self.criterion_t = (NTXentLoss(temperature, bank) for _ in "st")
        self.add = add
        self.xmoco = (
            xmoco.XMoCoLoss(  # «xmoco»: it has banks of its own, whose slots belong together
                size, length, temperature, label_weight=float(add == "both")
            )
        )

    def forward(self, x_s: Tensor, x_t: Tensor) -> Tensor:
        return self.loss(*self.features(x_s, x_t))

    def features(self, x_s: Tensor, x_t: Tensor) -> tuple[Tensor, ...]:
        q_s, q_t = (self.projection_head(self.backbone(x)) for x in (x_s, x_t))
        with torch.no_grad():
            k_s, k_t = (
                self.projection_head_momentum(self.backbone_momentum(x)) for x in (x_s, x_t)
            )
        return q_s, q_t, k_s, k_t

    def loss(self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor) -> Tensor:
        if self.add == "nothing":
            return self.criterion_s(q_s, k_t) + self.criterion_t(q_t, k_s)
        whole, terms = self.xmoco(*map(F.normalize, (q_s, q_t, k_s, k_t)))  # «xmoco»
        if self.add == "both":
            return whole  # «xmoco»: soft labels and consistency instead of lightly's loss
        lightly = self.criterion_s(q_s, k_t) + self.criterion_t(q_t, k_s)
        consistency = terms["consistency_source"] + terms["consistency_target"]
        return lightly + consistency  # «xmoco»: the term alone, beside it

    def after_step(self) -> None:
        update_momentum(self.backbone, self.backbone_momentum, m=0.99)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)


class Patterns(Dataset[Any]):
    """xmoco's embedded images, for which nothing is downloaded."""

    def __init__(self, transform: MoCoV2Transform, count: int | None = None) -> None:
        pixels, labels, _ = patterns("train")
        chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:count]
        self.pixels, self.labels, self.transform = pixels[chosen], labels[chosen], transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[list[Tensor], int]:
        return self.transform(to_pil_image(self.pixels[place])), int(self.labels[place])


def opened(options: argparse.Namespace) -> Any:
    """The images to learn from. What could not be judged at the end is refused: a ``UserError``."""
    transform = MoCoV2Transform(input_size=options.size)
    images: Any
    if options.data == "patterns":
        images = Patterns(transform, options.images)
    elif Path(options.data).is_dir():
        labelled_splits(options.data, xmoco.EvalOptions(eval_size=options.size))
        images = LightlyDataset(options.data, transform=transform)
    else:
        raise UserError(f"there is no folder {options.data!r}.")
    if len(images) < options.batch:
        raise UserError(f"{len(images)} images do not fill a batch: lower --batch.")
    return images


def train(model: MoCo | SimCLR, images: Any, options: argparse.Namespace) -> list[float]:
    """The mean loss of every epoch."""
    loader = DataLoader(
        images, options.batch, shuffle=True, drop_last=True, num_workers=options.workers
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
    losses = []
    for epoch in range(options.epochs):
        total = torch.zeros((), device=device)
        for (x_s, x_t), *_ in loader:
            loss = model(x_s.to(device), x_t.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.after_step()
            total += loss.detach()
        losses.append(float(total) / len(loader))
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    return losses


def judge(backbone: nn.Module, options: argparse.Namespace) -> float:
    """kNN accuracy in percent, by xmoco, which reads any ResNet's weights."""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "backbone.pth"
        torch.save(backbone.state_dict(), weights)
        options_ = xmoco.EvalOptions(eval_size=options.size)
        (record,) = xmoco.evaluate_knn(weights, options.data, ks=(20,), options=options_)
    return record.value


def main(arguments: list[str] | None = None) -> tuple[list[float], float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=["moco", "simclr"])
    parser.add_argument("--add", choices=["nothing", "consistency", "both"], default="both")
    parser.add_argument(
        "--data",
        default="patterns",
        help="a folder with one subfolder per class, by which the backbone is judged at the end",
    )
    parser.add_argument("--images", type=int, help="so many of the patterns only")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        images = opened(options)
    except UserError as error:
        parser.error(str(error))
    torch.manual_seed(options.seed)
    backbone = resnet18()
    backbone.fc = nn.Identity()
    model = (MoCo if options.method == "moco" else SimCLR)(backbone, options.add)
    losses = train(model, images, options)
    accuracy = judge(model.backbone, options)
    print(f"kNN: {accuracy:.1f} %")
    return losses, accuracy


if __name__ == "__main__":
    main()
