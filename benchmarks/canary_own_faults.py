"""Every fault that `truegate serve --fault` can plant, asked over HTTP by `truegate canary run`: seen, and how named.

    python benchmarks/canary_own_faults.py [--fault NAME ...] [--effort quick] [--save FILE] [--port 8321]

Each fault is served on the canary of the first family that it is a fault of, one server after another; `--save` keeps
one JSON line an outcome and does not run again what it holds. Needs the engine (torch), on a CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from truegate.canary.archs import Sizes, default_config
from truegate.canary.ask import QUICK, Effort
from truegate.canary.hypotheses import _UNSEEN
from truegate.canary.make import Recipe, make
from truegate.canary.manifest import load
from truegate.canary.run import Target, audit
from truegate.law.faults import FAULTS

FAMILIES = ("deepseek_v3", "deepseek_v2", "qwen2_moe", "qwen3_moe")
EFFORTS = {"quick": replace(QUICK, batches=(3, 7, 8, 17)), "default": Effort()}
# What a canary cannot see over HTTP, or a CPU engine without padding or replicas does not do.
BEYOND = {
    **dict.fromkeys(_UNSEEN, "the canary's margins hide it on purpose"),
    "pad-live": "no rows are padded", "pad-aliases-last": "no rows are padded",
    "weight-at-wrong-side": "no family that this engine runs weighs the experts' input",
    **dict.fromkeys(("replica-counted-twice", "stride-without-redundant"), "no expert has two replicas"),
    "pad-counted": "only the load counts are wrong", "report-physical": "only the routing report is wrong",
}  # fmt: skip
FUSED = ("shared-slot-rotates", "shared-slot-is-routed", "shared-from-routed-sum")  # need the shared expert in a slot
# Where a fault reads the same as another, or is named by what it does.
ALSO = {
    "ids-off-by-one": {"experts-rotated"}, "rows-2-to-8": {"choices-lost", "top-k-less-one"},
    "last-row-lost": {"rows-lost", "routed-dropped"}, "rows-above-256": {"rows-lost", "choices-lost", "routed-dropped"},
    "stale-routing": {"rows-shifted"},
}  # fmt: skip


def folder_of(family: str, scratch: Path) -> Path:
    folder = scratch / family
    if not folder.exists():
        dense = 1 if "first_k_dense_replace" in default_config(family) else 0
        sizes = Sizes(hidden=512, intermediate=16, layers=dense + 2, num_experts=32)
        make(default_config(family), folder, Recipe(sizes=sizes))
    return folder


@contextmanager
def served(folder: Path, fault: str, port: int, *flags: str) -> Iterator[str | None]:
    """The URL of a server with this fault; None where it refuses, since the fault is none of this model."""
    command = [sys.executable, "-m", "truegate", "serve", str(folder), "--port", str(port), "--fault", fault, *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            url, late = f"http://127.0.0.1:{port}", time.monotonic() + 240
            while process.poll() is None and not _ready(url):
                if time.monotonic() > late:
                    raise SystemExit(f"{fault}: the server did not start within 240 s")
                time.sleep(0.3)
            if process.poll() is not None:
                log.seek(0)
                text = log.read().decode(errors="replace")
                if "is no fault of this layer" not in text:
                    raise SystemExit(f"{fault}: the server ended with {process.returncode}\n{text[-2000:]}")
            yield url if process.poll() is None else None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)


def _ready(url: str) -> bool:
    try:
        return httpx.get(url + "/v1/models", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def outcome_of(fault: str, data: dict[str, Any]) -> str:
    """named, named among ties, detected, MISNAMED or MISSED; a fault that is named by what it does counts as named."""
    if not data["findings"]:
        return "MISSED" if data["exit"] == 0 else f"NOT JUDGED: {data['headline']}"
    right = {fault} | ALSO.get(fault, set())
    told = [set(f["names"]) for f in data["findings"]]
    if all(names <= right for names in told):
        return "named"
    ties = [set(a) for f in data["findings"] for a in f["alternatives"]]
    if any(names <= right for names in told + ties):
        return "named among others"
    return "detected" if all(names == {"unnamed"} for names in told) else "MISNAMED"


def ask(fault: str, scratch: Path, port: int, effort: Effort) -> dict[str, str] | None:
    for family in FAMILIES[:2] if fault in FUSED else FAMILIES:
        folder = folder_of(family, scratch)
        with served(folder, fault, port, *(["--fuse-shared"] if fault in FUSED else [])) as url:
            if url is None:
                continue
            data = audit(load(folder), Target(url=url), effort, lambda phase: None)
        said = "; ".join(dict.fromkeys(" + ".join(f["names"]) for f in data["findings"])) or data["headline"]
        return {"fault": fault, "family": family, "outcome": outcome_of(fault, data), "said": said}
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", nargs="*", default=[f.name for f in FAULTS if f.name not in BEYOND])
    parser.add_argument("--effort", choices=list(EFFORTS), default="quick")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--port", type=int, default=8321)
    args = parser.parse_args()
    rows: dict[str, dict[str, str]] = {}
    if args.save is not None and args.save.exists():
        rows = {row["fault"]: row for row in map(json.loads, args.save.read_text().splitlines())}
    with tempfile.TemporaryDirectory() as scratch:
        for fault in args.fault:
            if fault in rows:
                continue
            found = ask(fault, Path(scratch), args.port, EFFORTS[args.effort])
            rows[fault] = found or {"fault": fault, "family": "-", "outcome": "not planted", "said": "-"}
            if args.save is not None:
                with args.save.open("a") as out:
                    out.write(json.dumps(rows[fault]) + "\n")
    print("| fault | family | outcome | said |\n|---|---|---|---|")
    for fault in args.fault:
        print("| " + " | ".join(rows[fault].values()) + " |")
    outcomes = [rows[fault]["outcome"] for fault in args.fault]
    print(f"\n{len(outcomes)} faults: " + ", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes)))
    print("not asked: " + "; ".join(f"{name} ({why})" for name, why in BEYOND.items()))


if __name__ == "__main__":
    main()
