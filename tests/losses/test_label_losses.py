"""Losses of what knows its images: by labels, or each by itself, against their definitions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.instdisc import Slots, slot_contrast
from xmoco.losses.labels import label_loss


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def cross_entropy_by_hand(scores: Tensor, labels: Tensor) -> Tensor:
    losses = [
        -torch.log(row[label].exp() / sum(score.exp() for score in row))
        for row, label in zip(scores, labels, strict=True)
    ]
    return torch.stack(losses).mean()


def binary_by_hand(scores: Tensor, labels: Tensor) -> Tensor:
    p = 1 / (1 + (-scores).exp())
    return -torch.where(labels, p.log(), (1 - p).log()).mean()


def instance_by_hand(z: Tensor, positions: Tensor, slots: Tensor, temperature: float) -> Tensor:
    """Equations 2 and 3 of InstDisc's paper, an image at a time."""
    losses = []
    for row, position in zip(z, positions, strict=True):
        shares = torch.stack([(row @ slot / temperature).exp() for slot in slots])
        losses.append(-torch.log(shares[position] / shares.sum()))
    return torch.stack(losses).mean()


@given(count=st.integers(1, 6), classes=st.integers(2, 5), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_label_losses_and_gradients_are_the_definitions(
    count: int, classes: int, seed: int
) -> None:
    labels = drawn(count, classes, seed=seed + 1)
    for ours, by_hand in (
        (labels.argmax(dim=1), cross_entropy_by_hand),
        (labels > 0, binary_by_hand),
    ):
        found, expected = (3 * drawn(count, classes, seed=seed) for _ in range(2))
        loss = label_loss(found.requires_grad_(), ours)
        by_definition = by_hand(expected.requires_grad_(), ours)
        assert_close(loss, by_definition, rtol=1e-9, atol=1e-9)
        loss.backward()
        by_definition.backward()
        assert_close(found.grad, expected.grad, rtol=1e-7, atol=1e-8)


def instance_loss(z: Tensor, positions: Tensor, slots: Tensor, temperature: float) -> Tensor:
    return slot_contrast(z, positions, slots, temperature).infonce()


def instances(count: int, images: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    z = F.normalize(drawn(count, size, seed=seed), dim=1)
    slots = F.normalize(drawn(images, size, seed=seed + 1), dim=1)
    positions = torch.randperm(images, generator=torch.Generator().manual_seed(seed))[:count]
    return z.requires_grad_(), positions, slots


@given(
    count=st.integers(1, 5),
    more=st.integers(0, 5),
    size=st.integers(2, 5),
    temperature=st.floats(0.05, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_instance_loss_and_gradients_are_the_definitions(
    count: int, more: int, size: int, temperature: float, seed: int
) -> None:
    (found, positions, slots), (expected, _, _) = (
        instances(count, count + more, size, seed) for _ in range(2)
    )
    loss = instance_loss(found, positions, slots, temperature)
    by_definition = instance_by_hand(expected, positions, slots.clone(), temperature)
    assert_close(loss, by_definition, rtol=1e-9, atol=1e-9)
    slots.zero_()  # which may change before the way back
    loss.backward()
    by_definition.backward()
    assert_close(found.grad, expected.grad, rtol=1e-7, atol=1e-8)


def test_gradients_pass_gradcheck() -> None:
    z, positions, slots = instances(3, 5, 4)
    assert torch.autograd.gradcheck(lambda z: instance_loss(z, positions, slots, 0.5), (z,))
    scores = drawn(4, 3).requires_grad_()
    for labels in (torch.tensor([0, 2, 1, 1]), drawn(4, 3, seed=1) > 0):
        assert torch.autograd.gradcheck(label_loss, (scores, labels))


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_arithmetic_is_float32_whatever_the_features_or_autocast(precision: torch.dtype) -> None:
    z, positions, slots = instances(6, 9, 16)
    rows = z.detach().to(precision).requires_grad_()
    scores = drawn(6, 3).to(precision)
    with torch.autocast("cpu", torch.bfloat16):
        found = (
            instance_loss(rows, positions, slots.float(), 0.07),
            label_loss(scores, positions % 3),
        )
    exact = rows.detach().double(), scores.double()
    expected = (
        instance_by_hand(exact[0], positions, slots, 0.07),
        cross_entropy_by_hand(exact[1], positions % 3),
    )
    for ours, by_hand in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours.double(), by_hand, rtol=1e-4, atol=1e-4)
    found[0].backward()
    assert rows.grad is not None
    assert rows.grad.dtype == precision


def test_twenty_steps_lower_the_losses() -> None:
    z, positions, slots = instances(8, 12, 4)
    scores, labels = drawn(8, 3).requires_grad_(), positions % 3
    for what, loss_of in (
        (z, lambda: instance_loss(F.normalize(z, dim=1), positions, slots, 0.5)),
        (scores, lambda: label_loss(scores, labels)),
    ):
        losses = []
        for _ in range(21):
            loss = loss_of()
            (gradient,) = torch.autograd.grad(loss, what)
            with torch.no_grad():
                what -= gradient
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.9 * losses[0]


def test_an_image_s_own_slot_is_the_positive_and_no_negative() -> None:
    z, positions, slots = instances(3, 5, 4)
    P = slot_contrast(z, positions, slots, 0.3)
    assert P.p.shape == (3, 6)
    whole = (z.detach() @ slots.T / 0.3).softmax(dim=1)
    for row, position in enumerate(positions):
        assert P.p[row, 1 + position] == 0
        expected = torch.cat([whole[row, position][None], whole[row]])
        expected[1 + position] = 0
        assert_close(P.p[row], expected)


def test_slots_of_the_images_seen_move_half_way_and_keep_unit_length() -> None:
    torch.manual_seed(0)
    slots = Slots(7, 4).double()
    before = slots.rows.clone()
    assert_close(before.norm(dim=1), torch.ones(7, dtype=torch.float64))
    z, positions = F.normalize(drawn(3, 4), dim=1), torch.tensor([5, 0, 2])
    slots.update(positions, z, momentum=0.75)
    expected = before.clone()
    for row, position in zip(z, positions, strict=True):
        mixed = 0.75 * before[position] + 0.25 * row
        expected[position] = mixed / mixed.norm()
    assert_close(slots.rows, expected)


def test_an_image_that_is_there_twice_moves_its_slot_once() -> None:
    slots = Slots(4, 3)
    z = F.normalize(drawn(3, 3), dim=1).float()
    slots.update(torch.tensor([2, 1, 2]), z, momentum=0.0)
    assert_close(slots.rows[2], z[0])
    assert_close(slots.rows[1], z[1])
