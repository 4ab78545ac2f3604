"""A run's folder: who may use it, and what it says of the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jaxrec.checks import UserError, one_of, require
from jaxrec.training.config import Config, describe, differences

RESUME = ("auto", "must", "never")
CONFIG_FILE = "config.json"
SUMMARY_FILE = "summary.json"
FOLDER = "checkpoints"
LOCK_FILE = ".lock"


def claim(workdir: str, config: Config, resume: str) -> bool:
    """Makes the folder, or checks that this config may continue in it; `record` then makes it this run's.

    Args:
      workdir: The folder.
      config: The run's.
      resume: `auto` continues a matching run or starts one; `must` refuses an empty folder; `never` a used one.

    Returns:
      Whether the folder holds an earlier run.

    Raises:
      UserError: The folder is a file, is used by a run with another identity, or is not as `resume` asks.
    """
    one_of("--resume", resume, RESUME)
    require(bool(workdir), "--workdir is empty, but must be the folder of the run")
    folder = Path(workdir)
    require(folder.is_dir() or not folder.exists(), f"--workdir is {workdir!r}, which is a file, but must be a folder")
    recorded = (folder / CONFIG_FILE).exists()
    used = recorded or any((folder / FOLDER).glob("[0-9]*"))
    require(used or resume != "must", f"--resume=must, but --workdir={workdir} holds no run; --resume=auto starts one")
    require(
        not used or resume != "never",
        f"--resume=never, but --workdir={workdir} holds a run already; name another folder, or --resume=auto",
    )
    if recorded:
        old = read_json(folder / CONFIG_FILE)
        require(
            isinstance(old.get("identity"), dict),
            f"{workdir}/{CONFIG_FILE} has no identity, so no version of jaxrec wrote it; name another --workdir",
        )
        changed = differences(config.identity(), old["identity"])
        require(
            not changed,
            f"--workdir={workdir} holds a run of another config ({describe(changed)}); "
            "name another folder, or use that config",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _cannot_write(workdir, e.strerror) from e
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _cannot_write(workdir, "permission denied")
    return used


class Lock:
    """Keeps other runs out of a folder while this process lives. The system drops it, however the process ends."""

    def __init__(self, workdir: str):
        self._workdir, self._file = workdir, None

    def acquire(self) -> None:
        """Takes the folder; does nothing where its file system has no locks.

        Raises:
          UserError: Another run has it.
        """
        try:
            import fcntl  # Not on Windows.

            self._file = open(Path(self._workdir) / LOCK_FILE, "a")  # noqa: SIM115 - held until `close`
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(
                f"--workdir={self._workdir} is in use by a run that has not ended; stop it, or name another folder"
            ) from None
        except (ImportError, OSError):
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def record(workdir: str, config: Config) -> None:
    """Writes `config.json`. Done when the run is known to work: a wrong flag must not take the folder.

    Raises:
      UserError: It cannot be written.
    """
    write_json(Path(workdir) / CONFIG_FILE, {"identity": config.identity(), "config": config.as_dict()})


def finished(workdir: str, step: int) -> dict[str, Any] | None:
    """Returns the summary of a run that ended at `step`, or None where none was written."""
    path = Path(workdir) / SUMMARY_FILE
    summary = read_json(path) if path.exists() else {}
    return summary if summary.get("steps") == step else None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      UserError: There is no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_text())
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise UserError(f"{path} is not JSON ({e}); delete the file or its folder") from e
    require(isinstance(value, dict), f"{path} holds no JSON object; delete the file or its folder")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes atomically.

    Raises:
      UserError: It cannot be written.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror}), but must be a file that can be") from e


def _cannot_write(workdir: str, why: str | None) -> UserError:
    return UserError(f"--workdir is {workdir!r}, which cannot be written ({why}), but must be a folder that can be")
