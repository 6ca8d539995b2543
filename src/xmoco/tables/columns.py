"""What can be measured of every row of a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xmoco.records import Measured, Record


@dataclass(frozen=True)
class Column:
    """Something that is measured of every trial."""

    heading: str
    measure: str
    unit: str = "%"
    k: int | None = None

    def shows(self, record: Record | Measured[Any]) -> bool:
        return record.measure == self.measure and record.protocol.get("k") == self.k

    def can_be_had_on(self, device: str) -> bool:
        return self.measure != "gpu_memory" or device == "cuda"

    @property
    def told_by_training(self) -> bool:
        """Whether it is known as soon as a trial is trained, with nothing judged."""
        return not self.measure.endswith("_top1")


COLUMNS: Mapping[str, Column] = {
    "knn20": Column("kNN (k = 20)", "knn_top1", k=20),
    "knn200": Column("kNN (k = 200)", "knn_top1", k=200),
    "logistic": Column("logistic regression", "logistic_top1"),
    "linear": Column("linear (MoCo)", "linear_top1"),
    "time": Column("training time", "train_seconds", "s"),
    "gpu_memory": Column("GPU memory", "gpu_memory", "GiB"),
    "bank_memory": Column("banks and history", "bank_memory", "MiB"),
    "parameters": Column("parameters", "backbone_parameters", "M"),
}
