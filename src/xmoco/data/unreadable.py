"""Keeps count of images that cannot be read."""

from collections.abc import Iterable, Iterator
from itertools import islice

from xmoco.errors import UserError

FEW = 3
"""Of a small set so many may be unreadable, if they are no more than a quarter of it."""
MOST_NAMED = 10


def allowed(images: int) -> int:
    """How many of so many images may be unreadable."""
    return max(images // 100, min(FEW, images // 4))


class TooManyUnreadable(UserError):  # noqa: N818
    """More than can be replaced without anyone noticing, or all."""

    def add(self, sentence: str) -> None:
        """Say more."""
        self.args = (f"{self} {sentence}",)


class Unreadable:
    """The images that could not be read, in the order they were met; too many of them is an error.

    ``known`` are those of an earlier part of the same run. Where they are left out, and no others
    put in their place, all but one may be unreadable, unless ``most`` says how many may be.
    """

    def __init__(
        self,
        images: int,
        known: Iterable[tuple[str, str]] = (),
        *,
        left_out: bool = False,
        most: int | None = None,
    ) -> None:
        self.images = images
        self.left_out = left_out
        usual = images - 1 if left_out else allowed(images)
        self.limit = usual if most is None else most
        self._why = dict(known)

    def add(self, where: str, why: str) -> None:
        self.add_all([(where, why)])

    def add_all(self, found: Iterable[tuple[str, str]]) -> None:
        """Those met together: an error names them all."""
        for where, why in found:
            self._why.setdefault(where, why)
        if len(self) > self.limit:
            all_of_them = self.left_out and self.limit == self.images - 1
            raise TooManyUnreadable(self._all_of_them() if all_of_them else self._too_many())

    def _too_many(self) -> str:
        examples = ", ".join(f"{where} ({why})" for where, why in islice(self, MOST_NAMED))
        more = f" and {len(self) - MOST_NAMED} more" if len(self) > MOST_NAMED else ""
        least = "at least " if len(self) < self.images else ""  # others were not tried yet
        return (
            f"{least}{len(self)} of {counted(self.images)} cannot be read, which is more than "
            f"{self.limit_told}: {examples}{more}."
        )

    @property
    def limit_told(self) -> str:
        few = self.limit > self.images // 100
        return f"the {self.limit} that may be" if few else "1 %"

    def _all_of_them(self) -> str:
        where, why = next(iter(self))
        if self.images == 1:
            return f"the only image cannot be read: {where} ({why})."
        return f"none of the {self.images} images can be read; the first is {where} ({why})."

    def __len__(self) -> int:
        return len(self._why)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Pairs of where and why."""
        return iter(self._why.items())


def counted(images: int) -> str:
    return "1 image" if images == 1 else f"{images} images"
