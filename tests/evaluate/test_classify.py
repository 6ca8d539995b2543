"""A classifier on a backbone: schedules, freezing, and that it learns what scikit-learn learns."""

import copy
import itertools
import os
import random
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR
from torch.testing import assert_close

from helpers import checkpoints, logged_steps, metrics, tensors
from xmoco.config import InputConfig
from xmoco.data import ArrayImages, Batches, ImageSet
from xmoco.data.views import ViewGroup, views_of
from xmoco.errors import Interrupted, UserError
from xmoco.evaluate import classify
from xmoco.evaluate.classify import (
    CROPS_AND_FLIPS,
    FINETUNE,
    LINEAR,
    Classifier,
    CosineProtocol,
    EpochProtocol,
    TrainingProtocol,
    class_scores,
    train_classifier,
)
from xmoco.evaluate.evaluation import EvalOptions
from xmoco.evaluate.features import backbone_features
from xmoco.evaluate.metrics import top_k
from xmoco.nn.backbones import build_backbone
from xmoco.train import loop
from xmoco.train.bad_steps import DivergedError
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

INPUT = InputConfig(size=16, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
CPU = torch.device("cpu")
QUICK = EpochProtocol("quick", 16, 0.5, 0.0, 0.0, 12, (8,), 0.1)
TUNING = CosineProtocol("tuning", 64, 0.03, 0.03, 1e-4, 50)


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


NUMBERS = itertools.count()


def trained(
    backbone: torch.nn.Module, train: ImageSet, protocol: TrainingProtocol, **options: Any
) -> Classifier:
    """A classifier, in a new folder unless one is given."""
    folder = options.pop("folder", Path(f"run-{next(NUMBERS)}"))
    settings = options.pop("settings", {"name": protocol.name})
    fabric = EvalOptions("cpu").fabric()
    return train_classifier(
        backbone, train, protocol, folder, settings, input=INPUT, fabric=fabric, **options
    )


def accuracy(
    backbone: torch.nn.Module,
    train: ArrayImages,
    test: ArrayImages,
    protocol: TrainingProtocol,
    **options: Any,
) -> float:
    """Top-1 on ``test`` of a classifier trained on ``train``."""
    head = trained(backbone, train, protocol, **options).head
    return top_k(*class_scores(backbone, head, test, input=INPUT, device=CPU), 1)


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
def test_rates_fall_as_torchs_own_schedule_says(protocol: TrainingProtocol, per_epoch: int) -> None:
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
    short = LINEAR["paper"].changed(epochs=10)
    assert (short.epochs, short.milestones) == (10, (6, 8))
    assert short.name == "linear (paper), 10 epochs"
    assert FINETUNE.changed(epochs=1).name == "fine-tune, 1 epoch"
    smaller = FINETUNE.changed(batch=64, backbone_rate=0.02)
    assert smaller.name == "fine-tune, batch 64, backbone rate 0.02"
    assert (smaller.epochs, smaller.head_rate, smaller.backbone_rate) == (20, 0.2, 0.02)
    assert [smaller.batch_for(images) for images in (40, 10_000)] == [40, 64]
    assert FINETUNE.changed(head_rate=FINETUNE.head_rate) is FINETUNE
    assert LINEAR["paper"].changed(epochs=None) is LINEAR["paper"]


def test_linear_learns_without_touching_the_backbone(backbone: torch.nn.Module) -> None:
    before = copy.deepcopy(backbone.state_dict())
    train, test = coloured(96, seed=1), coloured(60, seed=2)
    told: list[tuple[int, int, float | None]] = []
    reached = accuracy(backbone, train, test, QUICK, on_step=lambda *facts: told.append(facts))
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name]), name
    bank = backbone_features(backbone, train, INPUT, CPU).vectors
    queries = backbone_features(backbone, test, INPUT, CPU).vectors
    reference = LogisticRegression(C=1e4, max_iter=2000).fit(bank, train.labels)
    assert reached >= 100 * reference.score(queries, test.labels) - 10
    assert told[-1][0] == told[-1][1] == 12 * 6
    assert told[0] == (0, 12 * 6, None)
    assert told[-1][2] < told[1][2]


KINDS = {
    "linear": EpochProtocol("linear", 16, 0.5, 0.0, 1e-3, 3, (2,), 0.1),
    "tuned": EpochProtocol("tuned", 16, 0.2, 0.02, 1e-4, 3, (2,), 0.2),
    "by steps": CosineProtocol("by steps", 16, 0.05, 0.05, 1e-4, 15),
}
"""Of 96 images, 6 steps make an epoch."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_does_what_a_plain_one_does(backbone: torch.nn.Module, kind: str) -> None:
    protocol, train = KINDS[kind], coloured(96, seed=1)
    by_hand = copy.deepcopy(backbone).train(not protocol.frozen)
    torch.manual_seed(4)
    head = torch.nn.Linear(128, 3)
    torch.nn.init.normal_(head.weight, std=0.01)
    torch.nn.init.zeros_(head.bias)
    groups = [{"params": head.parameters(), "lr": protocol.head_rate}]
    if not protocol.frozen:
        groups.append({"params": by_hand.parameters(), "lr": protocol.backbone_rate})
    nesterov = isinstance(protocol, CosineProtocol)
    optimizer = torch.optim.SGD(
        groups, momentum=0.9, weight_decay=protocol.weight_decay, nesterov=nesterov
    )
    peaks = [group["lr"] for group in optimizer.param_groups]
    crops = [ViewGroup(("crop",), CROPS_AND_FLIPS, INPUT)]
    batches = Batches(train, batch=16, seed=4, device=CPU)
    total = protocol.total_steps(6)
    with closing(batches.from_step(0)) as stream:
        for step, batch in zip(range(total), stream, strict=False):
            (seen,) = views_of(batch.images, batch.sizes, crops, seed=4, step=step, batch=16)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * protocol.factor(step / total)
            loss = torch.nn.functional.cross_entropy(head(by_hand(seen)), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = trained(backbone, train, protocol, seed=4)
    assert_close(found.head.state_dict(), head.state_dict())
    assert_close(found.backbone.state_dict(), by_hand.state_dict())


def last_state(folder: Path) -> dict[str, Any]:
    """All that a checkpoint holds, but for the time it took."""
    state = dict(tensors(torch.load(checkpoints(folder)[-1], weights_only=True)))
    del state["/seconds"]
    return state


class Killed(BaseException):
    """Nothing can be done any more, as after a SIGKILL."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_it_goes_on_to_the_same_end(
    backbone: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    """Checkpoints are written, and the process ends, after any step."""
    protocol, train, chance = KINDS[kind], coloured(96, seed=1), random.Random(f"{kind} {seed}")
    before = copy.deepcopy(backbone)
    whole = trained(backbone, train, protocol, folder=Path("whole"))
    advance = Training.advance

    def may_end(self: Training, *arguments: Any, **options: Any) -> Any:
        if chance.random() < 0.15:
            raise Killed
        return advance(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop.SaveClock, "due", lambda *_: chance.random() < 0.4)
        patch.setattr(Training, "advance", may_end)
        killed, kills = None, 0
        while killed is None:
            try:
                killed = trained(copy.deepcopy(before), train, protocol, folder=Path("killed"))
            except Killed:
                kills += 1
    assert kills > 0
    for name, value in whole.state_dict().items():
        assert torch.equal(killed.state_dict()[name], value), name
    ours, theirs = last_state(Path("killed")), last_state(Path("whole"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        same = torch.equal(ours[name], value) if torch.is_tensor(value) else ours[name] == value
        assert same, name
    assert logged_steps(Path("killed")) == logged_steps(Path("whole"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(
    backbone: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    protocol, train = KINDS["tuned"], coloured(96, seed=1)
    before, said = copy.deepcopy(backbone), []
    whole = trained(backbone, train, protocol)
    options = {"folder": Path("run"), "command": "xmoco again", "say": said.append}
    advance = Training.advance

    def stopping(self: Training, *arguments: Any, **given: Any) -> Any:
        if self.step == 7:
            os.kill(os.getpid(), number)
        return advance(self, *arguments, **given)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "advance", stopping)
        words = rf"stopped by {number.name} after step 8 of 18; .* Resume with: xmoco again"
        with pytest.raises(Interrupted, match=words):
            trained(copy.deepcopy(before), train, protocol, **options)
    assert said == []
    again = trained(copy.deepcopy(before), train, protocol, **options)
    assert said == ["resuming in run after step 8 of 18."]
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_finished_classifier_is_found_again(
    backbone: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol, train, said = KINDS["tuned"], coloured(96, seed=1), []
    before = copy.deepcopy(backbone)
    first = trained(backbone, train, protocol, folder=Path("run"))
    monkeypatch.setattr(Training, "train", lambda *_: pytest.fail("it was trained again"))
    again = trained(before, train, protocol, folder=Path("run"), say=said.append)
    assert said == [
        "run holds the finished classifier, which is evaluated without training it again."
    ]
    for name, value in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_what_a_run_folder_holds(backbone: torch.nn.Module) -> None:
    trained(backbone, coloured(96, seed=1), QUICK, folder=Path("run"), settings={"a": (1, 2)})
    names = ["checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "train.log"]
    assert sorted(path.name for path in Path("run").iterdir()) == names
    assert Path("run/config.yaml").read_text() == "a:\n- 1\n- 2\n"
    assert logged_steps(Path("run")) == [20, 40, 60, 72]
    rates = [line["values"]["learning_rate"] for line in metrics(Path("run"))]
    assert rates == [1, 1, pytest.approx(0.1), pytest.approx(0.1)]  # of the peak
    assert "quick on colours: 96 images" in Path("run/train.log").read_text()


def test_other_settings_in_the_same_folder_are_refused(backbone: torch.nn.Module) -> None:
    train, folder = coloured(32, seed=1), Path("run")
    trained(backbone, train, QUICK.changed(epochs=1), folder=folder, settings={"seed": 0})
    with pytest.raises(UserError, match=r"run was begun with other settings: seed was 0 and is 1"):
        trained(backbone, train, QUICK.changed(epochs=1), folder=folder, settings={"seed": 1})
    Path("photos").mkdir()
    with pytest.raises(UserError, match="photos already exists"):
        trained(backbone, train, QUICK, folder=Path("photos"))


def test_processes_share_a_batch_equally() -> None:
    train = coloured(96, seed=1)
    assert classify._batch(train, QUICK, 8) == 16
    words = "quick has batches of 16 images here, which 3 processes cannot share equally"
    with pytest.raises(UserError, match=words):
        classify._batch(train, QUICK, 3)


def test_a_folder_in_use_is_refused(backbone: torch.nn.Module) -> None:
    train, protocol = coloured(32, seed=1), QUICK.changed(epochs=1)
    other = RunFolder.begun(Path("run"), {"name": protocol.name})
    other.lock()
    with pytest.raises(UserError, match="another process is training in run"):
        trained(backbone, train, protocol, folder=Path("run"))
    other.unlock()
    trained(backbone, train, protocol, folder=Path("run"))


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
    trained(backbone, coloured(32, seed=1), protocol)
    weights = len(list(backbone.parameters()))
    expected = [[(2, 0.2 * f), (weights, 0.02 * f)] for f in (1, 1, 0.5, 0.5)]
    assert rates == [[(n, pytest.approx(rate)) for n, rate in pair] for pair in expected]


def test_scores_are_those_of_a_backbone_in_eval_mode(backbone: torch.nn.Module) -> None:
    head, test = torch.nn.Linear(128, 3), coloured(9, seed=2)
    expected, _ = class_scores(backbone.eval(), head, test, input=INPUT, device=CPU)
    found, _ = class_scores(backbone.train(), head, test, input=INPUT, device=CPU)
    assert torch.equal(found, expected)


def test_few_images_make_small_batches_in_fine_tuning() -> None:
    assert [FINETUNE.batch_for(n) for n in (2, 9, 30, 339, 340, 500, 5000, 5120, 50_000)] == [
        *(2, 9, 16, 16, 17, 25, 250, 256, 256)
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
    head = trained(backbone, several(160, 1), protocol).head
    test = several(80, 2)
    scores, labels = class_scores(backbone, head, test, input=INPUT, device=CPU)
    assert torch.equal(labels, test.labels)
    assert ((scores > 0) == labels).float().mean() > 0.9


def test_the_same_seed_gives_the_same_accuracy(backbone: torch.nn.Module) -> None:
    def run() -> float:
        short = QUICK.changed(epochs=2)
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
    with pytest.raises(DivergedError, match=r"NaN or infinite at step \d+") as raised:
        trained(backbone, coloured(48, seed=1), wild)
    assert str(raised.value).endswith(": lower the learning rate, and start again.")


def test_labels_are_needed(backbone: torch.nn.Module) -> None:
    unlabelled = coloured(48, seed=1, labelled=False)
    with pytest.raises(UserError, match="labels"):
        trained(backbone, unlabelled, QUICK)
    assert not list(Path().iterdir())
    with pytest.raises(UserError, match="single image"):
        trained(backbone, coloured(1, seed=1), QUICK)
    head = torch.nn.Linear(128, 3)
    with pytest.raises(UserError, match="labels"):
        class_scores(backbone, head, unlabelled, input=INPUT, device=CPU)
