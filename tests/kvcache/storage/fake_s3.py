"""A fake S3 server for tests, in this process: the requests that the backend makes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class FakeS3(ThreadingHTTPServer):
    """Objects in a dictionary. If status is not None, the server answers every request with it."""

    daemon_threads = True
    request_queue_size = 64  # with the default of 5, simultaneous connections wait for a second

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.status: int | None = None
        self.num_requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are two writes
    server: FakeS3

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._refused():
            return
        self.server.objects[self._path()] = body
        self._answer(200, b"", ETag=_etag(body))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self._refused():
            return
        if "list-type=2" in self.path:
            self._list()
            return
        body = self.server.objects.get(self._path())
        if body is None:
            self._answer(404, b"")
            return
        headers = {"ETag": _etag(body), "Last-Modified": DATE}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, body, **headers)
            return
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        if first >= len(body):
            self._answer(416, b"")
            return
        last = min(last, len(body) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        self._answer(206, body[first : last + 1], **headers)

    def do_POST(self) -> None:
        """Delete objects, which need not exist; the only use of POST."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self._refused():
            return
        deleted = ""
        for key in re.findall("<Key>(.*?)</Key>", body):
            self.server.objects.pop(f"{self._path()}/{key}", None)
            deleted += f"<Deleted><Key>{key}</Key></Deleted>"
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _list(self) -> None:
        contents = "".join(
            f"<Contents><Key>{path.partition('/')[2]}</Key><Size>{len(body)}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for path, body in sorted(self.server.objects.items())
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        self._answer(200, text.encode())

    def _refused(self) -> bool:
        self.server.num_requests += 1
        status = self.server.status  # read once: the test may change it after the answer
        if status is not None:
            self._answer(status, b"")
        return status is not None

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(body: bytes) -> str:
    return f'"{md5(body, usedforsecurity=False).hexdigest()}"'


@contextmanager
def serving() -> Iterator[FakeS3]:
    """Run a server in the context."""
    with FakeS3() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
