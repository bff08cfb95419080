"""The scripted endpoint as a fixture."""

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest
from scripted_endpoint import Handler


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.lock, server.bodies, server.inside, server.most_inside = threading.Lock(), [], 0, 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
