"""Turns away what other web sites send through the browsers of their visitors.

A page may send requests to any address that its visitor reaches, and read the answers
if it was loaded by a name that its owner then points to that address.
"""

import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

# A name or an address, and a port; `urlsplit` would take a path for a part of it.
_HOST = re.compile(r"(\[([^\[\]]+)\]|([^\[\]:]+))(:[0-9]*)?", re.ASCII)


class Guard:
    """ASGI middleware that serves addresses and its own names, but no other site."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        names = ("localhost", host, socket.gethostname(), socket.getfqdn(host))
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or lets the application answer."""
        headers, app = Headers(scope=scope), self._app
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may believe the other one, and see two requests in one.
            error = "A request has a Content-Length or a Transfer-Encoding, not both."
            app = JSONResponse({"error": error}, 400, {"Connection": "close"})
        elif not self._is_own(headers.get("host", "localhost")):
            error = (
                "The service does not answer to this name; use its machine's address."
            )
            app = JSONResponse({"error": error}, 421)
        elif _is_of_another_site(headers, scope["method"]):
            error = "Pages of other web sites may not use the service."
            app = JSONResponse({"error": error}, 403)
        await app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        # Starlette's TrustedHostMiddleware takes only names. Nobody can point an
        # address elsewhere, and a container does not know those that lead to it.
        if not (found := _HOST.fullmatch(host.lower())):
            return False
        try:
            name = found[2] or found[3]
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _is_of_another_site(headers: Headers, method: str) -> bool:
    if method == "GET" and headers.get("sec-fetch-mode") == "navigate":
        return False  # Somebody follows a link.
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    # Browsers send only this header to addresses that are neither local nor HTTPS;
    # other programs send neither header.
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")
