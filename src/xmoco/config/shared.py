"""Settings that several methods share: classes that those of methods inherit from."""

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from xmoco.config.section import Probability, Range, Section, checked_share


class MethodSettings(Section):
    """Settings of every method."""

    staying: ClassVar[tuple[str, ...]] = ()
    """Of the fields that a class declares: what a method is given beyond its own publication. Who
    asks for another method than the recipe's does not get it along."""

    name: str

    @property
    def added(self) -> tuple[str, ...]:
        """What the method has of another one."""
        return ()

    @property
    def extras(self) -> tuple[str, ...]:
        """What it is given here that its own publication has not."""
        return ()

    @property
    def subject(self) -> str:
        """What records call the method, lest it be taken for the method as published."""
        return "+".join((self.name, *self.added, *self.extras))


class ConsistencyConfig(MethodSettings):
    """XMoCo's consistency, for methods that compare both sides of an image with negatives."""

    staying: ClassVar[tuple[str, ...]] = ("consistency_weight", "consistency_warmup_epochs")

    consistency_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of XMoCo's cross-similarity consistency as an additional term; 0: "
        "none.",
    )
    consistency_warmup_epochs: float = Field(
        0.0, ge=0, description="Epochs over which that weight rises linearly from 0."
    )

    @property
    def added(self) -> tuple[str, ...]:
        return ("consistency",) if self.consistency_weight else ()


class IdeasConfig(ConsistencyConfig):
    """Both of XMoCo's ideas, for methods whose labels are one-hot otherwise."""

    staying: ClassVar[tuple[str, ...]] = ("label_weight",)

    label_weight: Probability = Field(
        0.0,
        description="Share of XMoCo's balanced soft labels, the rest being one-hot; 0: none.",
    )
    sharpness: float = Field(
        2.0, gt=0, description="λ: how closely soft labels follow similarities."
    )
    positive_mass: float = Field(
        0.9, gt=0, le=1, description="ξ: the share of a soft label given to the positive."
    )
    sinkhorn_iterations: int = Field(3, ge=1, le=1000, description="Rounds of label balancing.")

    @property
    def added(self) -> tuple[str, ...]:
        return (("labels",) if self.label_weight else ()) + super().added


class BankIdeasConfig(IdeasConfig):
    """The same where negatives are past keys."""

    history: Literal["queries", "probabilities", "none"] = Field(
        "queries",
        description="Past rows that join the label balancing: `queries` recomputes them against "
        "today's bank (O(K·d) memory), `probabilities` stores them as in the paper (O(K²)).",
    )


class MomentumEncoderConfig(MethodSettings):
    """Settings of every method with a momentum encoder."""

    key_momentum: float = Field(
        0.999, ge=0, le=1, description="m: g ← m·g + (1−m)·f after every step."
    )
    key_momentum_end: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Value of m at the end of training, approached along a half cosine; null: "
        "constant.",
    )


class BankConfig(MomentumEncoderConfig):
    """Settings of every method with a momentum encoder and key banks."""

    staying: ClassVar[tuple[str, ...]] = ("weak_keys", "predictor_hidden")

    bank_length: int = Field(4096, ge=2, description="Keys K kept in each bank.")
    weak_keys: bool = Field(
        False,
        description="Compute keys from two additional views of an image, made by `weak_views`; not "
        "in the paper.",
    )
    predictor_hidden: int = Field(
        0,
        ge=0,
        description="Width of a predictor's hidden layer between queries and keys; 0: none, as in "
        "the paper.",
    )

    @property
    def extras(self) -> tuple[str, ...]:
        usual = type(self).model_fields["weak_keys"].default
        other = (
            [] if self.weak_keys == usual else ["weak keys" if self.weak_keys else "strong keys"]
        )
        return (*other, *(["predictor"] if self.predictor_hidden else []))


class SmallViewsConfig(MethodSettings):
    """Settings of methods that take small views beside the full ones (multi-crop)."""

    local_crops: int = Field(
        0, ge=0, le=32, description="Small views of every image beside the full ones."
    )
    local_size: int | None = Field(
        None,
        ge=8,
        le=1024,
        description="Side of a small view in pixels; null: half that of a full one.",
    )
    local_scale: Range = Field(
        (0.05, 0.2), description="Share of the image's area a small view covers."
    )

    @field_validator("local_scale")
    @classmethod
    def _is_share(cls, share: Range) -> Range:
        return checked_share(share)


class MoCoConfig(BankConfig):
    """Settings of those that choose among keys."""

    temperature: float = Field(0.2, gt=0, description="τ: divides similarities before the softmax.")


class DirectedConfig(BankConfig):
    """Settings of methods whose queries meet keys in one direction, as published, or in both."""

    staying: ClassVar[tuple[str, ...]] = ("symmetric",)

    symmetric: bool = Field(
        False,
        description="Whether both views of an image make queries and keys, each compared with the "
        "other's; otherwise one view makes queries and the other keys.",
    )

    @property
    def extras(self) -> tuple[str, ...]:
        other = self.symmetric and not type(self).model_fields["symmetric"].default
        return (*(["symmetric loss"] if other else []), *super().extras)

    @field_validator("label_weight", "consistency_weight", check_fields=False)
    @classmethod
    def _has_two_sides(cls, weight: float, settings: ValidationInfo) -> float:
        if weight and not settings.data.get("symmetric"):
            raise ValueError("compares both sides of an image, so it needs symmetric=true")
        return weight


class TwoBanksConfig(SmallViewsConfig, BankIdeasConfig, MoCoConfig):
    """Settings of XMoCo, and of what it extends."""

    staying: ClassVar[tuple[str, ...]] = ("local_crops", "local_size", "local_scale", "teacher")

    local_crops: int = Field(
        0,
        ge=0,
        le=32,
        description="Small views of every image, which learn from both full ones; not in the "
        "paper.",
    )

    teacher: Literal["queries", "keys"] = Field(
        "queries",
        description="Whose similarities labels and consistency targets are made of: `queries` as "
        "in the paper, or the momentum encoder's `keys`.",
    )

    @property
    def extras(self) -> tuple[str, ...]:
        """With small views it is no baseline of two views; a teacher needs an idea to tell."""
        teaches = self.teacher == "keys" and (self.label_weight or self.consistency_weight)
        return (
            *(["keys as teacher"] if teaches else []),
            *super().extras,
            *(["small views"] if self.local_crops else []),
        )

    @property
    def last_positive_mass(self) -> float:
        """ξ at the end of training."""
        return self.positive_mass


class PrototypesConfig(SmallViewsConfig):
    """Settings of SwAV, and of what extends it."""

    temperature: float = Field(0.1, gt=0, description="τ: divides scores before the softmax.")
    epsilon: float = Field(0.05, gt=0, description="ε: smoothness of the codes.")
    sinkhorn_iterations: int = Field(3, ge=1, le=1000, description="Rounds of code balancing.")
    prototypes: int = Field(3000, ge=2, description="Prototypes; a few per class and more.")
    freeze_prototypes_epochs: float = Field(
        1.0, ge=0, description="Epochs in which prototypes do not move yet."
    )
    queue_length: int = Field(
        0, ge=0, description="Past images that join the code balancing, for small batches; 0: none."
    )
    queue_from_epoch: float = Field(15.0, ge=0, description="The queue takes part from here on.")


class NeighbourConfig(MomentumEncoderConfig):
    """Settings of methods that tell keys and their neighbours among past keys."""

    key_momentum: float = Field(
        0.99, ge=0, le=1, description="m: g ← m·g + (1−m)·f after every step."
    )
    predictor_hidden: int = Field(2048, ge=1, description="Width of the predictor's hidden layer.")
    bank_length: int = Field(4096, ge=2, description="Keys K kept in the bank.")
    neighbours: int = Field(5, ge=1, description="How many of the bank's nearest keys are targets.")
    weak_keys: bool = Field(
        True, description="The view whose keys enter the bank is made by `weak_views`."
    )

    @property
    def extras(self) -> tuple[str, ...]:
        return () if self.weak_keys else ("strong keys",)

    @field_validator("neighbours")
    @classmethod
    def _are_in_the_bank(cls, neighbours: int, settings: ValidationInfo) -> int:
        if neighbours > settings.data.get("bank_length", neighbours):
            raise ValueError("must be at most bank_length")
        return neighbours
