"""Where gateway and workers meet when nobody says otherwise: an ipc socket in a private folder.

The folder is /run/user/UID where the system has made it, else one below /tmp; short, because the
path of a Unix socket has at most 107 bytes.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

MAX_PATH = 107


class EndpointError(ValueError):
    """An address that cannot be used."""


def runtime_directory() -> Path:
    """Where this user's sockets lie."""
    uid = os.getuid()
    home = Path(f"/run/user/{uid}")
    return home / "voltapile" if home.is_dir() else Path(f"/tmp/voltapile-{uid}")


def default_endpoint(plan_id: str) -> str:
    """The address that two sides with the same Plan agree on."""
    return f"ipc://{runtime_directory()}/{plan_id}.sock"


def private_endpoint() -> str:
    """An address that no other server has, for a gateway that starts its own workers."""
    return default_endpoint(secrets.token_hex(8))


def prepare(endpoint: str) -> None:
    """Make the folder of an ipc address, closed to other users. Raises EndpointError."""
    if not endpoint.startswith("ipc://"):
        return
    path = endpoint.removeprefix("ipc://")
    if len(os.fsencode(path)) > MAX_PATH:
        raise EndpointError(f"{endpoint}: a socket's path has at most {MAX_PATH} bytes")
    folder = Path(path).parent
    if folder != runtime_directory():
        return  # the user's own choice, and the user's own care
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise EndpointError(f"{folder}: {error.strerror}") from None
    if fault := _fault(status):
        raise EndpointError(f"{folder}: {fault}")


def _fault(status: os.stat_result) -> str:
    """Why others could meet our workers in a folder; "" if they cannot."""
    if not stat.S_ISDIR(status.st_mode):
        return "expected a directory: remove it"
    if status.st_uid != os.getuid():
        return f"it is user {status.st_uid}'s, and not for our sockets: root can remove it"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return "other users can enter it, and sockets lie there: chmod 700 closes it"
    return ""
