"""Judge one backbone by every classification protocol, or make the backbones to compare it with.

    python benchmarks/protocols.py prepare --like runs/cifar10 --data cifar10.tar --out baselines
    python benchmarks/protocols.py judge runs/cifar10 --data cifar10.tar --transfer pets.tar

``prepare`` writes two backbones of the same shape: one as it is before any training, and one
trained with the labels. ``judge`` appends the records of kNN, linear (both presets), fine-tuning at
1 %, 10 % and 100 % of the labels, and transfer, frozen and end to end with the small grid.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import torch

from xmoco.data.fingerprint import fingerprint
from xmoco.data.sources import source_name
from xmoco.errors import UserError
from xmoco.evaluate.classification import evaluate_finetune, evaluate_knn, evaluate_linear
from xmoco.evaluate.classify import CosineProtocol, train_classifier
from xmoco.evaluate.evaluation import EvalOptions, Listener, labelled_splits
from xmoco.evaluate.transfer import evaluate_transfer
from xmoco.nn.backbone_files import save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import read_card
from xmoco.records import Record, append_records

RESULTS = Path(__file__).resolve().parent / "results"
SUPERVISED_EPOCHS = 100
TRANSFER = ("frozen", "end-to-end")
PROTOCOLS = (
    *("knn", "frozen", "finetune-1", "finetune-10", "finetune-100", "end-to-end"),
    *("linear-paper", "linear-moco"),
)


class Log(Listener):
    """A line now and then: these runs go to a file, not to a terminal."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        if done == total or time.perf_counter() > self.last + 15:
            self.last = time.perf_counter()
            print(f"  {stage}: {done} of {total}  {note}", flush=True)

    def say(self, sentence: str) -> None:
        print(f"  {sentence}", flush=True)


def prepare(options: argparse.Namespace) -> None:
    card, _ = read_card(options.like)
    eval_options = EvalOptions(options.device, "bf16" if options.device != "cpu" else "fp32")
    train, _ = labelled_splits(options.data, eval_options)
    torch.manual_seed(options.seed)
    backbone = build_backbone(card.backbone, card.stem)
    untrained = dataclasses.replace(card, method="untrained", epochs=0, seed=options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    save_backbone(backbone, untrained, options.out / "untrained.safetensors")
    steps = options.epochs * max(1, len(train) // 512)
    protocol = CosineProtocol("supervised", 512, 0.2, 0.2, 5e-4, steps)
    settings = {
        **dataclasses.asdict(protocol),
        "backbone": card.backbone,
        "images": fingerprint(train),
        "seed": options.seed,
    }
    log = Log()
    train_classifier(
        backbone,
        train,
        protocol,
        options.out / "supervised",
        settings,
        input=card.input(),
        fabric=eval_options.fabric(),
        seed=options.seed,
        on_step=lambda done, total, loss: log.progress(
            "supervised", done, total, "" if loss is None else f"loss {loss:.3f}"
        ),
        say=log.say,
    )
    supervised = dataclasses.replace(untrained, method="supervised", epochs=options.epochs)
    save_backbone(backbone, supervised, options.out / "supervised.safetensors")


def judge(options: argparse.Namespace) -> None:
    card, _ = read_card(options.weights)
    path = options.out or RESULTS / f"protocols-{source_name(options.data)}-{card.backbone}.jsonl"
    precise = EvalOptions(options.device, size=options.size)
    quick = dataclasses.replace(precise, precision="bf16" if options.device != "cpu" else "fp32")
    log, weights, data = Log(), options.weights, options.data
    chosen = options.only or [p for p in PROTOCOLS if options.transfer or p not in TRANSFER]
    if options.transfer is None and not {*TRANSFER}.isdisjoint(chosen):
        raise UserError("give other labelled images by --transfer to measure transfer.")

    def transfer(mode: str) -> list[Record]:
        # The size is told by the grid: another one would not go on with it.
        shown = card.input(options.size).central_size
        grids = Path("runs", "transfer", f"{card.method}-{card.epochs}ep-{shown}px")
        record = evaluate_transfer(
            weights,
            options.transfer,
            mode=mode,
            grid="small",
            metric="mean per class",
            out=grids,
            options=precise if mode == "frozen" else quick,
            listener=log,
        )
        return [record]

    def measure(protocol: str, out: Path) -> list[Record]:
        match protocol.partition("-"):
            case "linear", _, preset:
                return evaluate_linear(
                    weights, data, preset=preset, out=out, options=quick, listener=log
                )
            case "finetune", _, percent:
                share = int(percent) / 100
                return evaluate_finetune(
                    weights, data, fraction=share, out=out, options=quick, listener=log
                )
        if protocol in TRANSFER:
            return transfer(protocol)
        return evaluate_knn(weights, data, options=precise, listener=log)

    for name in chosen:
        started = time.perf_counter()
        # In a new folder, as a classifier that is found again would tell nothing of the time.
        with tempfile.TemporaryDirectory() as folder:
            records = measure(name, Path(folder) / "run")
        seconds = round(time.perf_counter() - started, 1)
        for record in records:
            record.protocol["seconds"] = seconds
            how = record.protocol.get("name", f"kNN, k {record.protocol.get('k')}")
            print(
                f"{record.subject:12} {record.measure:20} {record.value:6.2f} %  {how}", flush=True
            )
        append_records(path, records)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, function in (("prepare", prepare), ("judge", judge)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--data", required=True, help="labelled images of pre-training")
        command.add_argument("--device", default="cuda")
        if name == "prepare":
            command.add_argument("--like", type=Path, required=True, help="a backbone")
            command.add_argument("--out", type=Path, required=True, help="a folder")
            command.add_argument("--epochs", type=int, default=SUPERVISED_EPOCHS)
            command.add_argument("--seed", type=int, default=0)
        else:
            command.add_argument("weights")
            command.add_argument("--transfer", help="other labelled images, for transfer")
            command.add_argument("--size", type=int, help="of images, where not the weights' own")
            command.add_argument("--out", type=Path, help="file of records")
            command.add_argument("--only", nargs="+", choices=PROTOCOLS)
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
