"""The folder of a run: which form its last checkpoint has. The only place that knows both forms.

one process   the file last.pt
torchrun      the folder last/, or last.former/ when the job was cut off between the two names
"""

from pathlib import Path

from anemoi_gt.distributed.sharded_checkpoint import find_checkpoint

ONE_PROCESS, TORCHRUN = "one process", "torchrun"
WAY_ON = {ONE_PROCESS: "resume=true without torchrun", TORCHRUN: "resume=true with torchrun"}


def sharded(path: Path) -> Path:
    """Return the folder that several ranks write in place of a file: `last` for `last.pt`."""
    return path.with_suffix("")


def find_run(last: Path) -> Path | None:
    """Return the last checkpoint of the run in a folder, of either form; None: the folder holds no run.

    Parameters
    ----------
    last : Path
        The name that one process gives it, such as folder / "last.pt".
    """
    return last if last.exists() else find_checkpoint(sharded(last))


def require_file(path: Path) -> None:
    """Raise a ValueError when a checkpoint that one process is to read is there as a folder of several ranks alone, and say the way out.

    Parameters
    ----------
    path : Path
        The file, or the folder in its place.
    """
    found = None if path.is_file() else find_checkpoint(sharded(path))
    if found is not None:
        raise ValueError(
            f"a checkpoint must be one file, {found} is that of several ranks, who leave best.pt when their run ends; "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {found} FILE.pt writes one now"
        )


def checkpoint_to_continue(last: Path, writer: str, *, resume: bool) -> Path | None:
    """Return the checkpoint that a run continues from; None: it begins.

    Parameters
    ----------
    last : Path
        As for `find_run`.
    writer : {"one process", "torchrun"}
        What is running now; it continues what it wrote.
    resume : bool
        True continues a run where there is one, False begins and wants a folder without.

    Raises
    ------
    ValueError
        If the folder holds a run that is not to be continued, or not by this writer.
    """
    if not isinstance(resume, bool):
        raise ValueError(f"resume must be true or false, got {resume!r}")
    found = find_run(last)
    if found is None:
        return None
    former_writer = ONE_PROCESS if found == last else TORCHRUN
    if resume and writer == former_writer:
        return found
    of, way_on = "", "resume=true"
    if writer != former_writer:
        of, way_on = f" of {former_writer}, in {found.name}", WAY_ON[former_writer]
    raise ValueError(f"{last.parent} holds a run{of}: {way_on} continues it, another hydra.run.dir begins a new one")
