"""Servers as fixtures: `fake` runs the scripted engine of fake_engine.py and is shared by all tests."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import FAKE_COMMAND, LAUNCH, Server, free_port, write_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("fake-model"))


@pytest.fixture(scope="session")
def launch(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start servers with these ServeOptions; all are stopped at the end."""
    started: list[Server] = []

    def start(*, wait: bool = True, env: dict[str, str] | None = None, engine: dict | None = None, **options) -> Server:
        port = free_port()
        log = tmp_path_factory.mktemp("server") / "log.txt"
        options = {"worker_command": FAKE_COMMAND, "names": ["fake"], **options}
        options |= {"port": port, "engine": {"model": str(model_folder), "threads": 1, **(engine or {})}}
        with log.open("w") as sink:
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, json.dumps(options)],
                stderr=sink,
                stdout=sink,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        server = Server(process=process, port=port, log=log)
        started.append(server)
        if wait:
            server.wait_for(lambda: server.health() == 200, 60)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def fake(launch: Callable[..., Server]) -> Server:
    return launch()
