"""What to say of failures of the machine, and not of whence: files, disks, modules that are missing."""

import errno
import re

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISSING = (errno.ENOENT, errno.ENOTDIR)


def explain_failure(error: Exception) -> str | None:
    """Return what failed and how to fix it, in words; None if the error is of another kind."""
    if isinstance(error, ModuleNotFoundError):
        return (
            f"Python finds no module {error.name!r}. Install the package that holds it, or add the directory that it "
            f"is in: PYTHONPATH=DIRECTORY whence ..."
        )
    return _explain_os_error(error) if isinstance(error, OSError) else None


def _explain_os_error(error: OSError) -> str:
    # Libraries written in Rust leave the number in the text.
    in_text = re.search(r"\(os error (\d+)\)", str(error))
    number = int(in_text[1]) if error.errno is None and in_text else error.errno
    path = "A file" if error.filename is None else str(error.filename)
    reason = error.strerror or str(error) or type(error).__name__
    if number in _FULL:
        return f"{path} cannot be written: the disk is full. Free space there, or name a directory on another disk."
    if number in _FORBIDDEN:
        return (
            f"{path} cannot be read or written: {reason}. Change its permissions, or name a directory that you may "
            "write to."
        )
    if number in _MISSING:
        return f"{path} is not there: {reason}. Check its name."
    return f"{path} cannot be used: {reason}. Check the path and the disk that it is on."
