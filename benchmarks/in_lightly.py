"""What XMoCo's ideas are worth in lightly's MoCo: without them, with consistency, and with both.

    python benchmarks/in_lightly.py imagenette --data imagenette.tar --seeds 0 1 2 --epochs 60

Heads, loss, memory banks and momentum update are lightly's, as in examples/lightly_plugin.py, where
the lines that add the ideas are. Images, views, the optimiser and evaluation are xmoco's, so that
runs take a minute and are measured as all others are. Batch, rate, temperature and taking the mean
of both directions' losses are as in lightly's own benchmark on these images; it has one bank for
both and shuffles keys, and the width of its head changed over time. λ and ξ are the loss's
defaults, the paper's. Nothing is tuned. Losses are computed in float32, whichever they are. Runs
that have their records are not trained again. Needs ``pip install lightly``.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compare import Entry, show
from options import at_least
from recipe import RESULTS
from xmoco.config import Config
from xmoco.config.methods import MoCoV2PlusConfig
from xmoco.errors import Interrupted, UserError
from xmoco.methods import Method
from xmoco.nn.encoder import checked_backbone
from xmoco.records import append_records
from xmoco.tables.bench import Bench, Images, Trial, known_records
from xmoco.tables.columns import COLUMNS
from xmoco.task import StepOutput, Values
from xmoco.train.engine import build_fabric
from xmoco.train.run_folder import RunFolder

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from lightly_plugin import MoCo

FILE = "compare-lightly.jsonl"
ADDED = {"nothing": "", "consistency": " with consistency", "both": " with both ideas"}
SETTINGS = (
    "method=mocov2plus weak_keys=false local_crops=0 temperature=0.1 bank_length=4096 "
    "batch=256 learning_rate=0.06 warmup_epochs=0 weight_decay=5e-4"
)


class LightlyMoCo(Method):
    """The example's model, as the loop wants it. Its loss asks the host where its banks stand, so
    that no CUDA graph can be made of its steps."""

    title = "lightly's MoCo"
    capturable = False

    def __init__(self, config: Config, add: str) -> None:
        super().__init__(config)
        settings = config.method
        assert isinstance(settings, MoCoV2PlusConfig)
        bank = settings.bank_length, config.model.feature_size
        backbone = checked_backbone(config.model, config.input)
        self.encoder = MoCo(backbone, add, settings.temperature, bank)

    def networks(self) -> list[nn.Module]:
        return []  # nothing of it is made faster

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        features = self.encoder.features(*views)
        with torch.autocast(features[0].device.type, enabled=False):
            loss = self.encoder.loss(*(part.float() for part in features)) / 2
        return StepOutput(loss, {"contrast": loss}, {})

    def after_update(self, at: Values) -> None:
        self.encoder.after_step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="changes to the recipe, key=value")
    parser.add_argument("--data", required=True, help="labelled images with two splits")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=at_least(1), default=60)
    parser.add_argument("--add", nargs="+", choices=ADDED, default=list(ADDED))
    parser.add_argument(
        "--beside", type=at_least(0), default=0, help="runs that other calls train meanwhile"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_intermixed_args()
    options.held_out = False
    changes = " ".join([SETTINGS, *options.settings])
    entries = {add: Entry(f"lightly's MoCo{ADDED[add]}", changes) for add in options.add}
    trials = [
        (add, entry, entry.trial(options, seed))
        for seed in options.seeds
        for add, entry in entries.items()
    ]
    path, bench, failed = options.results / FILE, None, 0
    for add, _, trial in trials:
        if trial.own(known_records(path)):
            continue
        if bench is None:
            fabric = build_fabric(trial.config.run)
            bench = Bench(fabric, Images.open(trial.config.data, None).decoded(fabric.device))
        try:
            attempt(bench, trial, add, path, options.beside)
        except UserError as error:
            failed += 1
            print(f"{trial.subject}, seed {trial.seed}: {error}", file=sys.stderr, flush=True)
        except Interrupted as stop:
            print(f"{trial.subject}, seed {trial.seed} was stopped: it is lost.", file=sys.stderr)
            sys.exit(stop.status)
    show([(entry, trial) for _, entry, trial in trials], known_records(path), options)
    if failed:
        sys.exit("not everything could be trained and judged, see above.")


def attempt(bench: Bench, trial: Trial, add: str, path: Path, beside: int) -> None:
    columns = [COLUMNS[name] for name in ("knn20", "knn200", "logistic")]
    build = partial(LightlyMoCo, add=add)
    with tempfile.TemporaryDirectory() as folder:
        found = bench.attempt(trial, columns, RunFolder(Path(folder)), build=build)
    if beside:
        for record in found:
            record.protocol["runs_at_once"] = 1 + beside
    append_records(path, found)
    values = ", ".join(f"{record.measure} {record.value:.2f}" for record in found)
    print(f"{trial.subject}, seed {trial.seed}: {values}", flush=True)


if __name__ == "__main__":
    main()
