"""What a run logs, in Weights & Biases too: ``wandb=PROJECT``, with the extra ``xmoco[wandb]``."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmoco.config import Config
from xmoco.errors import UserError
from xmoco.train.run_folder import RunFolder

if TYPE_CHECKING:
    import wandb

HOW = "log in with `wandb login`, or set WANDB_MODE=offline to keep the log in the run folder"


def expect_wandb(project: str) -> None:
    """That it can be logged to, as far as that can be told before anything is written."""
    library = _library()
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    try:
        known = library.login(prompt=False)
    except library.Error as error:
        raise _refused(project, error) from None
    if not known:
        raise UserError(f"wandb={project} needs an account: {HOW}.")


class WandbLog:
    """A run's log there. A resumed run goes on in the same one."""

    def __init__(self, project: str, run: RunFolder, config: Config) -> None:
        library = _library()
        try:
            self._run: wandb.Run = library.init(
                project=project,
                name=run.path.name,
                id=_identity(run),
                resume="allow",
                dir=run.path,
                tags=[config.method.subject],
                config=config.model_dump(mode="json"),
                # The progress line is ours.
                settings=library.Settings(silent=True, console="off"),
            )
        except library.Error as error:
            raise _refused(project, error) from None

    @property
    def place(self) -> str:
        """Where a person finds it."""
        if self._run.offline:
            return f"nothing is sent; later, `wandb sync {Path(self._run.dir).parent}` does it"
        return str(self._run.url)

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _library() -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            "wandb= needs the package wandb: install it with `pip install xmoco[wandb]`, or leave "
            "the setting out."
        ) from None
    return wandb


def _refused(project: str, error: Exception) -> UserError:
    reason = str(error).partition("\n")[0].rstrip(".")
    return UserError(f"wandb={project} cannot be logged to ({reason}): {HOW}.")


def _identity(run: RunFolder) -> str:
    """The same whenever the run goes on, and no other run's."""
    words = f"{run.path.name} {run.environment().get('started')}"
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
