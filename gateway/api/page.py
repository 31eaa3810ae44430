"""GET / and /page/{name}: the page for people's browsers, and the files that it is made of.

They are read and compressed once, when an application is made: a few hundred KiB. It knows neither
what they do nor which routes they call.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import web
from voltapile.gateway.api.errors import ApiError

FOLDER = Path(__file__).parents[1] / "page"
START = "index.html"
PREFIX = "/page/"
MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
# What a model writes may run nothing and load nothing, from here or from elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "Cache-Control": "no-cache",  # ask each time: names stay the same when the server is renewed
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class File:
    """tag: of what both bodies hold."""

    media: str
    tag: str
    plain: bytes
    packed: bytes


@cache
def read_files(folder: Path = FOLDER) -> dict[str, File]:
    """By the name below `folder`; what is no part of the page is left out."""
    paths = (path for path in folder.rglob("*") if path.suffix in MEDIA)
    return {path.relative_to(folder).as_posix(): _file(path) for path in paths}


def add_page(app: web.Application) -> None:
    """The routes of the page. Raises OSError if it is not where it was installed."""
    files = read_files()
    if START not in files:
        raise FileNotFoundError(f"the page is not in {FOLDER}; --no-webui serves without it")

    async def page(request: web.Request) -> web.Response:
        """One file; "/" has no name and is the first of them."""
        found = files.get(request.match_info.get("name", START))
        if found is None:
            raise ApiError(404, "unknown path", code="not_found")
        return _answer(request, found)

    app.router.add_get("/", page)
    app.router.add_get(PREFIX + "{name:.+}", page)


def _file(path: Path) -> File:
    plain = path.read_bytes()
    tag = hashlib.sha256(plain).hexdigest()[:20]
    # mtime: the same bytes from every server
    return File(MEDIA[path.suffix], tag, plain, gzip.compress(plain, mtime=0))


def _answer(request: web.Request, file: File) -> web.Response:
    is_packed = _takes_gzip(request.headers.get("Accept-Encoding", ""))
    tag = f"{file.tag}-gzip" if is_packed else file.tag  # other bytes, another tag
    headers = HEADERS | {"ETag": f'"{tag}"'}
    if any(known.value in (tag, "*") for known in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    headers["Content-Type"] = file.media
    if is_packed:
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=file.packed if is_packed else file.plain, headers=headers)


def _takes_gzip(accepted: str) -> bool:
    for part in accepted.split(","):
        name, _, quality = part.partition(";")
        if name.strip().lower() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
