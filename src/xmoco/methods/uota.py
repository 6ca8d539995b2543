"""SwAV with UOTA: views that are unlike their image's others count less, half way through training.

The paper prints "SwAV+UTOA"; it is unsupervised outlier arbitration.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from xmoco.config import Config
from xmoco.config.methods import UOTAConfig
from xmoco.losses.outliers import view_weights
from xmoco.methods.swav import SwAV
from xmoco.schedules import Clock, FromShare, Schedule
from xmoco.task import Values


class UOTA(SwAV):
    title = "SwAV + UOTA"
    # A matrix is inverted at every step, by a library that may ask the device how that went.
    capturable = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, UOTAConfig)
        self.outlier_temperature = config.method.outlier_temperature
        self.counting = FromShare(config.method.outliers_from, 0.0, 1.0)
        self.rate = FromShare(config.method.outliers_from, 1.0, config.method.outliers_rate)

    def schedules(self) -> Mapping[str, Schedule]:
        return {**super().schedules(), "outliers_count": self.counting}

    def rate_factor(self, clock: Clock) -> float:
        return self.rate(clock)

    def view_weights(self, features: Sequence[Tensor], at: Values) -> Sequence[Tensor] | None:
        if not at["outliers_count"]:
            return None
        return view_weights(features, self.outlier_temperature)
