"""The dashboard's files: plain ES modules, nothing fetched from elsewhere, no build step."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from pippin.server.http import Headers

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
#: Nothing but this server's own files and answers; no script or style inside the page.
HEADERS: Headers = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        b" connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    content_type: bytes


def load() -> dict[str, Page]:
    """All files, read once, by the path they are served at."""
    pages = {}
    for file in files(__name__).iterdir():
        name = file.name
        content_type = _TYPES.get(name[name.rfind(".") :])
        if content_type is not None:
            path = "/" if name == "index.html" else f"/dashboard/{name}"
            pages[path] = Page(file.read_bytes(), content_type)
    return pages
