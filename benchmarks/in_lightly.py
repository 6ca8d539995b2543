"""What XMoCo's ideas are worth in lightly's MoCo: without them, with consistency, and with both.

    python benchmarks/in_lightly.py imagenette --data imagenette.tar --seeds 0 1 2 --epochs 60

Heads, loss, memory banks and momentum update are lightly's, as in examples/lightly_plugin.py, where
the lines that add the ideas are. Images, views, the optimiser and evaluation are xmoco's, so that
runs take a minute and are measured as all others are. Batch, rate, temperature and taking the mean
of both directions' losses are as in lightly's own benchmark on these images; it has one bank for
both and shuffles keys, and the width of its head changed over time. λ and ξ are the loss's
defaults, the paper's. Nothing is tuned. Losses are computed in float32, whichever they are. Options
are those of compare.py. Needs ``pip install lightly``.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from lightly.models.modules.memory_bank import MemoryBankModule
from torch import Tensor, nn

import compare
from xmoco.config import Config
from xmoco.config.methods import MoCoV2PlusConfig
from xmoco.methods import Method
from xmoco.nn.encoder import checked_backbone
from xmoco.task import StepOutput, Values

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from lightly_plugin import MoCo

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
        for module in self.encoder.modules():
            if isinstance(module, MemoryBankModule):  # whose keys lightly keeps out of its state
                module.register_buffer("bank", module.bank)
                module.register_buffer("bank_ptr", module.bank_ptr)

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
    parser = compare.arguments(__doc__)
    parser.set_defaults(epochs=60)
    parser.add_argument("settings", nargs="*", help="changes to the recipe, key=value")
    parser.add_argument("--add", nargs="+", choices=ADDED, default=list(ADDED))
    options = parser.parse_intermixed_args()
    changes = " ".join([SETTINGS, *options.settings])
    entries = [
        compare.Entry(name, changes, partial(LightlyMoCo, add=add), subject=name)
        for add in options.add
        for name in [f"lightly's MoCo{ADDED[add]}"]
    ]
    compare.run(options, entries, f"{'trials' if options.held_out else 'compare'}-lightly.jsonl")


if __name__ == "__main__":
    main()
