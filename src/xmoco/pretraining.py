"""Pre-training from images to weights: puts data, method, loop, monitor and report together."""

import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from xmoco.asked import Asked
from xmoco.config import Config, ModelConfig, RunConfig
from xmoco.data import Batches, ImageSet, Unreadable, open_images
from xmoco.data.batches import preload
from xmoco.data.fingerprint import fingerprint
from xmoco.data.sources import opened_once, source_name
from xmoco.data.subset import at_most
from xmoco.errors import UserError
from xmoco.evaluate.monitor import Monitor
from xmoco.evaluate.similarities import NegativesMonitor
from xmoco.fabric import Fabric
from xmoco.launchers import launcher
from xmoco.methods import Method, build_method
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.planning import (
    about,
    chosen_config,
    launched,
    method_at_start,
    peak_rate,
    say,
    with_full_paths,
)
from xmoco.run_logger import Judge, RunLogger
from xmoco.schedules import WarmupCosine
from xmoco.settings import FREE, as_yaml, config_yaml, differences, is_bound
from xmoco.train.engine import on_first
from xmoco.train.loop import Plan, Training
from xmoco.train.partners import watching
from xmoco.train.run_folder import RunFolder
from xmoco.wandb_log import expect_wandb


@dataclass(frozen=True)
class RunResult:
    """What a finished run left behind."""

    folder: Path
    weights: Path
    report: Path
    knn: dict[str, float]
    """Last kNN accuracy in percent by subject: the method's, "raw pixels" and "untrained" (of a run
    with ``weights``, "initial weights")."""
    seconds: float
    """Time spent training over all sessions, kNN measurements included."""


@opened_once()
def pretrain(
    recipe: str | Path | None = None,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    weights: str | Path | None = None,
    overrides: Iterable[str] = (),
    **settings: Any,
) -> RunResult:
    """Train a backbone on images and return where everything is.

    On a CPU, memory that the process frees stays with it from then on, for the next step to use.

    Args:
        recipe: a recipe's name (``demo``, ``cifar10`` …) or a yaml file. None is ``auto``: settings
            that suit the images and the device.
        data: a folder, a tar archive, or a known set; replaces the recipe's.
        out: the run folder, which must be new unless ``resume``; by default under ``runs``.
        resume: continue the run in ``out`` exactly where it was interrupted.
        weights: what the backbone starts from: a run, a file of weights or a model by name.
        overrides: settings as ``key=value``, as on the command line.
        settings: settings as keywords, e.g. ``epochs=20, batch=256``.

    Example::

        result = xmoco.pretrain("demo", out="runs/first", epochs=5)
        backbone = xmoco.load_backbone(result.weights)
    """
    folder = None if out is None else Path(out)
    asked = Asked.of(recipe, overrides, settings, data=data, weights=weights)
    if resume:
        if folder is None:
            raise UserError("say with --out which run to resume.")
        config = resumed_config(RunFolder.open(folder), asked)
        fabric, console = launched(config.run)
        with watching(fabric):
            on_first(fabric, lambda: _expect_log(config.run))
            return _run(config, fabric, console, folder, resume)
    run = asked.run_config()
    fabric, console = launched(run)
    with watching(fabric):
        on_first(fabric, lambda: _expect_room(folder))
        on_first(fabric, lambda: _expect_log(run))
        config = chosen_config(asked, fabric, console)
        return _run(config, fabric, console, folder, resume)


def resumed_config(run: RunFolder, asked: Asked) -> Config:
    """The run's own configuration, with what may be another now if that is asked for; whatever else
    is must agree with it."""
    own = run.config()
    changes = Asked(run.path / "config.yaml", asked.overrides, asked.settings)
    wanted = changes.config(changes.recipe) if asked.automatic else asked.config(asked.recipe)
    if wanted.model.weights is None:  # nobody asked for others
        own_weights = {"weights": own.model.weights}
        wanted = wanted.model_copy(update={"model": wanted.model.model_copy(update=own_weights)})
    changed = differences(own, with_full_paths(wanted))
    if changed:
        raise UserError(
            f"{run.path} was started with another configuration ({'; '.join(changed)}): "
            "resume it without these changes, or start a new run with --out."
        )
    run_here = wanted.run
    if launcher() is not None:  # as many as it has started, whatever the run had before
        said = asked.run_config()
        run_here = run_here.model_copy(update={"devices": said.devices, "nodes": said.nodes})
    here = with_full_paths(changes.config(changes.recipe))
    return here.model_copy(update={"run": run_here})


def _run(
    config: Config,
    fabric: Fabric,
    console: Console,
    folder: Path | None,
    resume: bool,
) -> RunResult:
    # All that can be wrong is found out before anything is written.
    first = fabric.is_global_zero
    path = on_first(fabric, lambda: folder if resume and folder else _free_path(folder, config))
    images, test = open_images(config.data, "train"), open_images(config.data, "test")
    assert images is not None
    before, begun = RunFolder(path).environment(), bool(RunFolder(path).checkpoints.paths())
    here, method, start = method_at_start(
        config,
        fabric,
        images,
        resumed=resume,
        with_weights=not begun,
        digest=before.get("weights_digest"),
    )
    broken = Unreadable(0 if test is None else len(test))
    with console.status(Text(f"reading {images.name}")):
        known = RunFolder(path).known_unreadable(Unreadable(len(images)).limit)
        batches = _batches(config, fabric, images, known)
        kept = None if test is None else _kept(test, config, fabric.device, broken)

    run = on_first(
        fabric,
        lambda: RunFolder(path) if resume else RunFolder.create(path, config_yaml(config)),
    )
    own = run.config()
    on_first(fabric, run.lock)
    try:
        training = Training(
            _plan(config, batches.steps_per_epoch),
            fabric,
            method,
            batches,
            run,
            identity=identity_of(config, fingerprint(images, with_labels=method.uses_labels)),
            same_identity=same_identity,
            resume_command=_resume_command(path, config, own),
        )
        resumed = resume and training.restore()
        bank = at_most(batches.images, config.monitor.knn_images)
        monitor = Monitor(config, work_name(own), bank, kept, fabric.device)
        if first:
            facts = {"weights_digest": start.digest, "test_images": _told_apart(test)}
            damaged = _open_books(training, method, here, broken, resume, facts)
            about_run = _introduction(here, training, method, images, resumed, before, damaged)
            warnings = [*start.warnings, *_other_test_images(before, facts)]
            for line in (*about_run, *(f"warning: {warning}" for warning in warnings)):
                say(console, line)
                run.log(line)
        if not training.finished:
            judge = (
                RunLogger(config, training, method, monitor, run, console)
                if first
                else Judge(training, method, monitor)
            )
            with judge as callback:
                training.train(callback)
        return on_first(fabric, lambda: _finish(config, training, method, monitor))
    finally:
        run.unlock()


def _resume_command(path: Path, config: Config, own: Config) -> str:
    """In as many processes; where torchrun or srun has started them, it does so again. With what is
    another now than in the run's ``own`` settings, such as where the images are or in what
    precision it computes."""
    settings: list[str] = []
    for section, fields in {"run": tuple(RunConfig.model_fields), **FREE}.items():
        now, then = getattr(config, section), getattr(own, section)
        for field in fields:
            value = getattr(now, field)
            several = field in ("devices", "nodes") and value > 1
            if several or value != getattr(then, field):
                changed = [f"{field}={as_yaml(value)}"]
                settings += ["--data", value] if field == "source" else changed
    return shlex.join(["xmoco", "pretrain", "--resume", "--out", str(path), *settings])


def prepare_training(
    config: Config,
    fabric: Fabric,
    images: ImageSet,
    run: RunFolder,
    build: Callable[[Config], Method] = build_method,
    identity: dict[str, Any] | None = None,
    resume_command: str = "",
) -> Training:
    """A training at its start, for programs that take the steps themselves.

    ``identity`` is what must not have changed where the run is to be restored (``identity_of``).
    """
    begun = bool(run.checkpoints.paths())
    _, method, _ = method_at_start(config, fabric, images, build=build, with_weights=not begun)
    batches = _batches(config, fabric, images)
    plan = _plan(config, batches.steps_per_epoch)
    return Training(
        plan, fabric, method, batches, run, identity or {}, same_identity, resume_command
    )


def _batches(
    config: Config,
    fabric: Fabric,
    images: ImageSet,
    known_unreadable: Iterable[tuple[str, str]] = (),
) -> Batches:
    return Batches(
        images,
        batch=config.train.batch,
        seed=config.train.seed,
        device=fabric.device,
        rank=fabric.global_rank,
        processes=fabric.world_size,
        parts=config.train.accumulate,
        readers=config.run.readers,
        preload_gib=config.data.preload_gib,
        known_unreadable=known_unreadable,
    )


def _plan(config: Config, steps_per_epoch: int) -> Plan:
    train, optim = config.train, config.optim
    return Plan(
        batch=train.batch,
        total_steps=train.epochs * steps_per_epoch,
        seed=train.seed,
        optim=optim,
        learning_rate=WarmupCosine(peak_rate(config), optim.cosine_offset, optim.warmup_epochs),
        peak_rate=peak_rate(config),
        accumulate=train.accumulate,
        log_every=train.log_every,
        checkpoint_minutes=train.checkpoint_minutes,
        skip_bad_steps=config.run.skip_bad_steps,
        to_save_memory=(
            f"lower batch ({train.batch} now) or size ({config.input.size} now), or raise "
            f"accumulate ({train.accumulate} now), which splits a batch into parts"
        ),
        to_converge=(
            "go on with --resume and skip_bad_steps=true or precision=fp32, or, in another folder "
            "with --out, lower the learning rate or raise a temperature"
        ),
    )


def identity_of(config: Config, images: str) -> dict[str, Any]:
    """What tells a run from others: the settings on which its weights depend, and its images'
    fingerprint, which is the same wherever they are."""
    settings = config.model_dump(mode="json")
    bound = {
        section: {field: value for field, value in fields.items() if is_bound(section, field)}
        for section, fields in settings.items()
        if section != "run"
    }
    return {"settings": bound, "images": images}


def same_identity(then: Any, now: Any) -> bool:
    """Settings that are younger than a checkpoint had their defaults then."""
    if then == now:
        return True
    try:
        return identity_of(Config.model_validate(then["settings"]), then["images"]) == dict(now)
    except (ValidationError, LookupError, TypeError):
        return False


def _open_books(
    training: Training,
    method: Method,
    here: Config,
    broken: Unreadable,
    resume: bool,
    facts: Mapping[str, Any],
) -> int:
    """Bring the run folder to where the training stands; lines of metrics.jsonl were damaged."""
    run, fabric = training.run, training.fabric
    if not resume:
        run.add_unreadable(broken, test=True)
    damaged = run.forget_after(training.step)
    run.write_environment(
        device=str(fabric.device),
        processes=fabric.world_size,
        batch_norm=here.model.batch_norm,
        method={
            "title": method.title,
            "subject": here.method.subject,
            "reference_levels": method.reference_levels(),
        },
        **facts,
    )
    return damaged


def _told_apart(test: ImageSet | None) -> str | None:
    """What tells test images, and the labels by which kNN is measured, from others."""
    return None if test is None else fingerprint(test, with_labels=test.labels is not None)


def _other_test_images(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Weights do not depend on them, so nothing but a comparison is lost."""
    if now["test_images"] != before.get("test_images", now["test_images"]):
        yield "the test images are others than before: kNN accuracies do not compare"


def _kept(test: ImageSet, config: Config, device: torch.device, broken: Unreadable) -> ImageSet:
    """The test images that the monitor looks at again and again, decoded once where they fit."""
    gib, readers = config.data.preload_gib, config.run.readers
    chosen = at_most(test, config.monitor.knn_images)
    return preload(chosen, device, gib=gib, readers=readers, unreadable=broken)


def work_name(config: Config) -> str:
    """What was done, for records: runs of the same work compare."""
    source = source_name(config.data.source)
    return f"{source}-{config.model.backbone}-{config.train.epochs}ep"


def _expect_log(run: RunConfig) -> None:
    if run.wandb is not None:
        expect_wandb(run.wandb)


def _expect_room(folder: Path | None) -> None:
    """Told before settings are chosen, which takes seconds; what our own name for a folder is
    depends on them."""
    if folder is not None:
        RunFolder.refuse_existing(folder)
    RunFolder.refuse_unwritable(folder or Path("runs") / "any")


def _free_path(folder: Path | None, config: Config) -> Path:
    if folder is not None:
        RunFolder.refuse_existing(folder)
        return folder
    name = f"{source_name(config.data.source)}-{config.method.name}"
    numbers = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    return next(path for n in numbers if not (path := Path("runs") / f"{name}{n}").exists())


def _introduction(
    config: Config,
    training: Training,
    method: Method,
    images: ImageSet,
    resumed: bool,
    before: Mapping[str, Any],
    damaged: int,
) -> Iterator[str]:
    """What a person wants to know before waiting; ``before`` is the last session's environment."""
    yield from about(config, method, images, training.fabric, _other_norm(config.model, before))
    if training.batches.unreadable:
        count = len(training.batches.unreadable)
        what = "1 image" if count == 1 else f"{count} images"
        yield f"warning: {what} could not be read and others take their place; see unreadable.txt"
    yield from (f"warning: {note}" for note in training.notes)
    if damaged:
        what = "1 line" if damaged == 1 else f"{damaged} lines"
        yield f"warning: {what} of metrics.jsonl were damaged and have been left out"
    if resumed and training.finished:
        yield "this run is complete: its weights and report are written again"
    elif resumed:
        epoch = training.step / training.steps_per_epoch
        yield f"resuming after step {training.step} (epoch {epoch:.1f})"
    yield f"run folder: {training.run.path}"


def _other_norm(model: ModelConfig, before: Mapping[str, Any]) -> str:
    """What ``auto`` meant in the last session, where that was something else."""
    was = before.get("batch_norm", model.batch_norm)
    if was == model.batch_norm:
        return ""
    device = str(before.get("device")).partition(":")[0]
    return f" ({was} before, on {before.get('processes')} × {device})"


def _finish(config: Config, training: Training, method: Method, monitor: Monitor) -> RunResult:
    """Weights and report of a finished run."""
    run = training.run
    card = BackboneCard.of_run(config, config.train.epochs)
    save_backbone(method.encoder.backbone, card, run.weights)
    report = draw_report(config, training, method, monitor)
    return RunResult(run.path, run.weights, report, run.last_knn(), training.seconds)


def draw_report(config: Config, training: Training, method: Method, monitor: Monitor) -> Path:
    """A finished run's page, with its curves and pictures."""
    # Imported here because it takes half a second, which the first step need not wait for.
    from xmoco.report.page import write_report
    from xmoco.report.pictures import picture_negatives, picture_neighbours, picture_views

    backbone = method.encoder.backbone
    return write_report(
        training.run.path,
        views_png=picture_views(monitor.train, method.views, config.train.seed, monitor.device),
        neighbours_png=picture_neighbours(monitor, backbone),
        negatives_png=picture_negatives(
            NegativesMonitor(config, monitor.work, monitor.train, monitor.device), method
        ),
        summary={"Training time": f"{training.seconds:,.0f} s, kNN included"},
    )
