"""What all settings share: sections of them, and the kinds of values they have."""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)


def _or_else(wanted: str) -> WrapValidator:
    """Says what is wanted when a list of numbers is wrong in any way."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(wanted) from None

    return WrapValidator(check)


LARGEST_NUMBER = 2**53
"""Up to here, floating point tells whole numbers apart."""

Text = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
# Not strict: yaml has lists, not tuples.
Range = Annotated[tuple[float, float], Field(strict=False), _or_else("must be two numbers")]
Rgb = Annotated[tuple[float, float, float], Field(strict=False), _or_else("must be three numbers")]


def checked_share(share: Range) -> Range:
    if not 0 < share[0] <= share[1] <= 1:
        raise ValueError("must be 0 < low ≤ high ≤ 1")
    return share


class Section(BaseModel):
    """A group of settings: strict types, unknown keys refused, never changed after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_countable(cls, value: Any) -> Any:
        """No setting needs such numbers, and beyond them arithmetic overflows."""
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and abs(number) > LARGEST_NUMBER:
                raise ValueError(f"must not be beyond {LARGEST_NUMBER:,}")
        return value
