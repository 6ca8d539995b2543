"""A classifier on a backbone: schedules, freezing, and that it learns what scikit-learn learns."""

import copy

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR
from torch.testing import assert_close

from xmoco.config import ViewsConfig
from xmoco.data import ArrayImages
from xmoco.errors import UserError
from xmoco.evaluate.classify import (
    FINETUNE,
    LINEAR,
    MOST_AT_ONCE,
    ClassifierProtocol,
    CosineProtocol,
    DivergedError,
    EpochProtocol,
    _batches_at_once,
    class_scores,
    train_classifier,
)
from xmoco.evaluate.features import backbone_features
from xmoco.evaluate.metrics import top_k
from xmoco.nn.backbones import build_backbone

VIEWS = ViewsConfig(size=16, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
CPU = torch.device("cpu")
QUICK = EpochProtocol("quick", 16, 0.5, 0.0, 0.0, 12, (8,), 0.1)
TUNING = CosineProtocol("tuning", 64, 0.03, 0.03, 1e-4, 50)


def accuracy(
    backbone: torch.nn.Module,
    train: ArrayImages,
    test: ArrayImages,
    protocol: ClassifierProtocol,
    **options,
) -> float:
    """Top-1 on ``test`` of a classifier trained on ``train``."""
    head = train_classifier(backbone, train, protocol, views=VIEWS, device=CPU, **options)
    return top_k(*class_scores(backbone, head, test, views=VIEWS, device=CPU), 1)


def coloured(count: int, seed: int, labelled: bool = True) -> ArrayImages:
    """Three classes that differ in their brightest channel."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    pixels = torch.randint(0, 160, (count, 3, 16, 16), generator=generator)
    pixels[torch.arange(count), labels] += 90
    classes = ("red", "green", "blue")
    return ArrayImages(
        "colours",
        pixels.to(torch.uint8),
        labels if labelled else None,
        classes if labelled else None,
    )


@pytest.fixture
def backbone() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_backbone("tiny", "cifar")


@pytest.mark.parametrize("protocol", [*LINEAR.values(), FINETUNE, TUNING], ids=lambda p: p.name)
@pytest.mark.parametrize("per_epoch", [1, 7, 195])
def test_rates_fall_as_torchs_own_schedule_says(
    protocol: ClassifierProtocol, per_epoch: int
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=protocol.head_rate)
    schedule: LRScheduler
    if isinstance(protocol, EpochProtocol):
        milestones = [per_epoch * epoch for epoch in protocol.milestones]
        schedule = MultiStepLR(optimizer, milestones, protocol.decay)
    else:
        schedule = CosineAnnealingLR(optimizer, protocol.total_steps(per_epoch))
    total = protocol.total_steps(per_epoch)
    for step in range(total):
        expected = optimizer.param_groups[0]["lr"]
        assert protocol.head_rate * protocol.factor(step / total) == pytest.approx(expected)
        optimizer.step()
        schedule.step()


def test_presets_are_the_published_ones() -> None:
    paper, moco = LINEAR["paper"], LINEAR["moco"]
    assert (paper.epochs, paper.batch, paper.head_rate, paper.weight_decay) == (100, 512, 60, 1e-4)
    assert (moco.epochs, moco.batch, moco.head_rate, moco.weight_decay) == (100, 256, 30, 0)
    assert paper.milestones == moco.milestones == (60, 80)
    assert paper.frozen
    assert moco.frozen
    assert (FINETUNE.epochs, FINETUNE.backbone_rate, FINETUNE.head_rate) == (20, 0.01, 0.2)
    assert (FINETUNE.milestones, FINETUNE.decay) == ((12, 16), 0.2)


def test_a_shortened_course_keeps_its_shape_and_says_so() -> None:
    short = LINEAR["paper"].shortened(10)
    assert (short.epochs, short.milestones) == (10, (6, 8))
    assert short.name == "linear (paper), 10 epochs"
    assert LINEAR["paper"].shortened(None) is LINEAR["paper"]


def test_linear_learns_without_touching_the_backbone(backbone: torch.nn.Module) -> None:
    before = copy.deepcopy(backbone.state_dict())
    train, test = coloured(96, seed=1), coloured(60, seed=2)
    told: list[tuple[int, int, float | None]] = []
    reached = accuracy(backbone, train, test, QUICK, on_step=lambda *facts: told.append(facts))
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name]), name
    bank = backbone_features(backbone, train, VIEWS, CPU).vectors
    queries = backbone_features(backbone, test, VIEWS, CPU).vectors
    reference = LogisticRegression(C=1e4, max_iter=2000).fit(bank, train.labels)
    assert reached >= 100 * reference.score(queries, test.labels) - 10
    assert told[-1][0] == told[-1][1] == 12 * 6
    assert told[0] == (0, 12 * 6, None)
    assert told[-1][2] < told[1][2]


@pytest.mark.parametrize("at_once", [1, 5, 1000])
def test_a_frozen_backbone_may_look_at_many_batches_at_once(
    backbone: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The classifier is the one trained a batch at a time; 72 steps are no multiple of 5."""
    seen = []
    backbone.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    heads = []
    for most in (at_once, 1):
        monkeypatch.setattr("xmoco.evaluate.classify._batches_at_once", lambda *_, n=most: n)
        train = coloured(96, seed=1)
        heads.append(train_classifier(backbone, train, QUICK, views=VIEWS, device=CPU))
    assert max(seen) == 16 * min(at_once, 72)
    assert_close(heads[0].state_dict(), heads[1].state_dict())


def test_photographs_are_looked_at_a_batch_at_a_time() -> None:
    gpu = torch.device("cuda")
    assert _batches_at_once(256, 224, gpu) == 1
    assert _batches_at_once(512, 224, gpu) == 1
    assert _batches_at_once(256, 32, gpu) == MOST_AT_ONCE
    assert _batches_at_once(256, 32, CPU) == 1  # which would be silent for long


def test_fine_tuning_changes_the_backbone_and_learns(backbone: torch.nn.Module) -> None:
    before = copy.deepcopy(backbone.state_dict())
    protocol = EpochProtocol("quick", 16, 0.2, 0.02, 0.0, 6, (4,), 0.2)
    assert accuracy(backbone, coloured(96, seed=1), coloured(60, seed=2), protocol) > 90
    assert not torch.equal(backbone.state_dict()["conv1.weight"], before["conv1.weight"])


def test_backbone_and_head_have_their_own_rates(
    backbone: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    step = torch.optim.SGD.step

    def look(self: torch.optim.SGD, *arguments, **options):
        rates.append([(len(group["params"]), group["lr"]) for group in self.param_groups])
        return step(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.SGD, "step", look)
    protocol = EpochProtocol("two", 16, 0.2, 0.02, 0.0, 2, (1,), 0.5)
    train_classifier(backbone, coloured(32, seed=1), protocol, views=VIEWS, device=CPU)
    weights = len(list(backbone.parameters()))
    expected = [[(2, 0.2 * f), (weights, 0.02 * f)] for f in (1, 1, 0.5, 0.5)]
    assert rates == [[(n, pytest.approx(rate)) for n, rate in pair] for pair in expected]


def test_scores_are_those_of_a_backbone_in_eval_mode(backbone: torch.nn.Module) -> None:
    head, test = torch.nn.Linear(128, 3), coloured(9, seed=2)
    expected, _ = class_scores(backbone.eval(), head, test, views=VIEWS, device=CPU)
    found, _ = class_scores(backbone.train(), head, test, views=VIEWS, device=CPU)
    assert torch.equal(found, expected)


def test_few_images_make_small_batches_in_fine_tuning() -> None:
    assert [FINETUNE.batch_for(n) for n in (2, 30, 500, 5000, 5120, 50_000)] == [
        *(2, 2, 25, 250, 256, 256)
    ]
    assert [LINEAR["moco"].batch_for(n) for n in (30, 50_000)] == [30, 256]


def test_tuning_by_steps_outlasts_an_epoch_and_learns(backbone: torch.nn.Module) -> None:
    """50 batches of 64 out of 96 images, with Nesterov's momentum."""
    assert accuracy(backbone, coloured(96, seed=1), coloured(60, seed=2), TUNING) > 90


def test_an_image_may_be_of_several_classes(backbone: torch.nn.Module) -> None:
    """Which channels are bright: any of eight answers."""

    def several(count: int, seed: int) -> ArrayImages:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.rand(count, 3, generator=generator) < 0.5
        pixels = torch.randint(0, 120, (count, 3, 16, 16), generator=generator)
        pixels += 120 * labels[:, :, None, None]
        return ArrayImages("several", pixels.to(torch.uint8), labels, ("red", "green", "blue"))

    protocol = CosineProtocol("several", 32, 0.05, 0.05, 0.0, 60)
    head = train_classifier(backbone, several(160, 1), protocol, views=VIEWS, device=CPU)
    test = several(80, 2)
    scores, labels = class_scores(backbone, head, test, views=VIEWS, device=CPU)
    assert torch.equal(labels, test.labels)
    assert ((scores > 0) == labels).float().mean() > 0.9


def test_the_same_seed_gives_the_same_accuracy(backbone: torch.nn.Module) -> None:
    def run() -> float:
        short = QUICK.shortened(2)
        return accuracy(backbone, coloured(48, seed=1), coloured(30, seed=2), short, seed=5)

    assert run() == run()


def test_a_small_set_is_its_own_batch(backbone: torch.nn.Module) -> None:
    assert 0 <= accuracy(backbone, coloured(9, seed=1), coloured(9, seed=2), QUICK) <= 100


def test_labels_follow_replaced_images(backbone: torch.nn.Module) -> None:
    """Where the original order is lost, only the labels that come with a batch are right."""
    train, test = coloured(96, seed=1), coloured(60, seed=2)
    plain = accuracy(backbone, train, test, QUICK)
    train.shown, test.shown = train.shown.roll(1), test.shown.roll(1)
    assert accuracy(backbone, train, test, QUICK) == plain


def test_a_rate_far_too_high_is_said(backbone: torch.nn.Module) -> None:
    wild = CosineProtocol("wild", 32, 1e20, 1e20, 0.0, 40)
    with pytest.raises(DivergedError, match="no longer a number at step 20"):
        train_classifier(backbone, coloured(48, seed=1), wild, views=VIEWS, device=CPU)


def test_labels_are_needed(backbone: torch.nn.Module) -> None:
    unlabelled = coloured(48, seed=1, labelled=False)
    with pytest.raises(UserError, match="labels"):
        train_classifier(backbone, unlabelled, QUICK, views=VIEWS, device=CPU)
    with pytest.raises(UserError, match="single image"):
        train_classifier(backbone, coloured(1, seed=1), QUICK, views=VIEWS, device=CPU)
    head = torch.nn.Linear(128, 3)
    with pytest.raises(UserError, match="labels"):
        class_scores(backbone, head, unlabelled, views=VIEWS, device=CPU)
