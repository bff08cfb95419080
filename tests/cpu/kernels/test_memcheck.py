"""benchmarks/gpu_memcheck.py without a GPU: its groups run interpreted, and what it excuses of racecheck's findings."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import gpu_memcheck as bench

KERNEL = bench.KERNELS / "grouped_hopper.py"


@pytest.mark.parametrize("group", ["route 1", "route 4", "experts 6", "experts 7", "permute", "split", "decode"])
def test_a_group_runs(group):
    """The other parts and groups call the same on other plans and sizes; route 4 has four ranks."""
    bench.GROUPS[group]()


def line(path: Path, text: str) -> int:
    return next(number for number, one in enumerate(path.read_text().splitlines(), 1) if text in one)


def finding(path: Path, first: str, *others: str, grave: str = "Error", unread: str | None = None) -> str:
    """As racecheck prints it; an access is "Read" or "Write" and a piece of the line, or of the one below: "above"."""

    def at(access: str) -> str:
        kind, text = access.split(" ", 1)
        number = line(path, text.removeprefix("above ")) - text.startswith("above ")
        return f"{kind} access at some_kernel+0x1d0 in {path.name}:{number}"

    behind = "".join(f"=========     and {at(other)} [4 hazards]\n" for other in others)
    behind += f"=========     and {unread}\n" if unread else ""
    return f"========= {grave}: Race reported between {at(first)}\n{behind}========= \n"


def result(*found: str) -> dict:
    return {"log": "========= COMPUTE-SANITIZER\n" + "".join(found), "count": len(found)}


START = ["Read def _grouped(", "Write def _grouped(", "Write gl.warp_specialize("]
NUMBER = ["Write tile_buf.index(slot).store(", "Read start = gl.max(tile_buf"]
ELSEWHERE = ["Write above x = torch.randperm(", "Read above x = torch.randperm("]
CONTROL = result(
    finding(Path(bench.__file__), "Read def hand_over(", "Write def hand_over(", "Write         gl.warp_specialize("),
    finding(Path(bench.__file__), "Write buffer.index(i % 4).store(", "Read value = gl.max(buffer"),
    finding(Path(bench.__file__), *ELSEWHERE),
)


def test_findings_like_the_controls_are_excused():
    assert bench.excused(result(finding(KERNEL, *START), finding(KERNEL, *NUMBER)), CONTROL)
    behind_a_wait = finding(KERNEL, NUMBER[0], "Read above rows = gl.max(tile_buf.index(1)")
    assert bench.excused(result(behind_a_wait), CONTROL)


@pytest.mark.parametrize(
    "found",
    [
        finding(KERNEL, *START, grave="Warning"),
        finding(KERNEL, START[0], START[1], "Write gl.store(at, gl.convert_layout(h"),
        finding(KERNEL, "Write gl.store(at, gl.convert_layout(h", "Read gl.store(at, gl.convert_layout(h"),
        finding(KERNEL, NUMBER[0], NUMBER[0]),
        finding(KERNEL, NUMBER[0], "Read acc = warpgroup_mma(a_buf"),
        finding(bench.KERNELS / "permute.py", "Read def _permute(", "Write def _permute("),
        finding(KERNEL, "Read def _copies(", "Write def _copies("),
        finding(KERNEL, NUMBER[0], "Read     mbarrier.wait(full.index(stage), phase)"),  # that of _step
        "========= Error: of another form\n",
        # behind two accesses that are excused, one that cannot be read
        finding(KERNEL, *NUMBER, unread="Read access at some_kernel+0x9d0 [4 hazards]"),
        finding(KERNEL, *NUMBER, unread="Write access at other+0x1 in /a b/permute.py:12 [4 hazards]"),
        finding(KERNEL, *NUMBER, unread="Write access at some_kernel+0x1 in other_grouped_hopper.py:82 [4 hazards]"),
        finding(KERNEL, *NUMBER, unread="Atomic access at some_kernel+0x1 in grouped_hopper.py:82 [4 hazards]"),
        finding(KERNEL, *NUMBER) + "========= Error : Potential WAR hazard detected\n",
    ],
)
def test_any_other_finding_counts(found):
    assert not bench.excused(result(finding(KERNEL, *START), found), CONTROL)


def test_nothing_is_excused_without_a_finding_in_the_control_or_with_one_that_is_not_read():
    mine = result(finding(KERNEL, *NUMBER))
    assert not bench.excused(mine, result())
    assert not bench.excused(mine, result(finding(Path(bench.__file__), *ELSEWHERE)))
    assert not bench.excused(mine | {"count": 2}, CONTROL)
    assert not bench.excused(result(), CONTROL)
