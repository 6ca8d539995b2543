"""The losses in a plain PyTorch loop, as anyone would write it."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.losses import MoCoLoss, XMoCoLoss


def views(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two noisy looks at every image."""
    noise = torch.randn(2, *images.shape, generator=generator)
    x_s, x_t = images + 0.3 * noise
    return x_s, x_t


@pytest.mark.parametrize(
    "build",
    [
        lambda: MoCoLoss(16, 96),
        lambda: XMoCoLoss(16, 96, history="queries"),
        lambda: XMoCoLoss(16, 96, history="probabilities"),
        lambda: XMoCoLoss(16, 96, history="none"),
    ],
    ids=["moco", "queries", "probabilities", "none"],
)
def test_twenty_steps_of_a_plain_loop_lower_the_loss(
    build: Callable[[], MoCoLoss | XMoCoLoss],
) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(256, 24, generator=generator)
    criterion = build()
    f = nn.Linear(24, 16)
    g = copy.deepcopy(f).requires_grad_(False)
    optimiser = torch.optim.SGD(f.parameters(), lr=0.2)
    losses = []
    for step in range(26):
        x_s, x_t = views(images[torch.randperm(256, generator=generator)[:32]], generator)
        q_s, q_t, k_s, k_t = (F.normalize(x, dim=1) for x in (f(x_s), f(x_t), g(x_s), g(x_t)))
        loss, terms = criterion(q_s, q_t, k_s, k_t)
        assert loss.item() == pytest.approx(sum(term.item() for term in terms.values()), rel=1e-5)
        losses.append(loss.item())
        if step < 6:  # the banks fill with keys first: random vectors are easier negatives
            continue
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for slow, fast in zip(g.parameters(), f.parameters(), strict=True):
                slow.lerp_(fast, 0.5)
    assert criterion.banks.fill == 1
    before, after = sum(losses[4:7]) / 3, sum(losses[-3:]) / 3
    assert after < 0.9 * before
