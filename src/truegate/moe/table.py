"""What `truegate check` prints: the checks of each layer, or the mutants and what saw them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from truegate.config import EngineConfig, free_host_bytes
from truegate.hub import model_folder, model_name
from truegate.law.faults import FAULTS, named
from truegate.moe import defaults
from truegate.moe.backends import choose
from truegate.moe.check import check_config
from truegate.moe.mutants import false_alarms, outcomes


def _console() -> Console:
    """The terminal's width, or one that holds a sentence where the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def check(config: EngineConfig, why_not_served: Callable[[Path], str | None] = lambda folder: None) -> bool:
    """Self-test every kind of MoE layer of the model as this config's engine would run it; True if all is right.

    Says at the end what `why_not_served` knows of the model.
    """
    config = defaults.claim(config)
    if config.model is not None and Path(config.model).name == "config.json":
        config = replace(config, model=str(Path(config.model).parent))
    folder, name = model_folder(config.model), model_name(config.model)
    config = defaults.fill(config, folder)
    free = free_host_bytes() if config.device == "cpu" else torch.cuda.mem_get_info()[0]
    backends = choose(experts=config.experts, dispatch=config.dispatch, router=config.router)
    planted = None if config.fault is None else named(config.fault)
    console, right = _console(), True
    reports = check_config(
        folder, backends, defaults.choices(config), dtype=getattr(torch, config.dtype), device=config.device,
        free_bytes=free, fault=planted,
    )  # fmt: skip
    for layers, plan, report in reports:
        table = Table("measured", "worst", "right", title=f"{name}, layers {layers[0]}..{layers[-1]}")
        for one in report.checks:
            table.add_row(one.name, f"{one.worst:.2g}", "yes" if one.ok else "NO", style=None if one.ok else "red")
        console.print(table)
        ran = f"{config.device}, {report.dtype}, experts {plan.experts.name}"
        console.print(f"{plan.spec.family}, {ran}, {report.seconds:.2f} s: {report.sentence}")
        right &= report.ok
    why = why_not_served(folder)
    if why is not None:
        console.print(f"measured only, `truegate serve` does not run this model: {why}", soft_wrap=True, markup=False)
    return right


def mutants(cases: int) -> bool:
    """Print each mutant, what caught it and what was said; then false alarms. True if all is as it should be."""
    console = _console()
    table = Table("mutant", "kind", "layer", "caught by", "named", "said")
    missed, named_right, total = [], 0, 0
    for one in track(outcomes(layers_each=2), description="mutants", console=console, transient=True):
        total += 1
        caught = one.caught_by
        named_right += one.named
        if not caught:
            missed.append(f"{one.fault.name} in {one.layer}")
        seen = caught[0] + (f" and {len(caught) - 1} more" if len(caught) > 1 else "") if caught else "NOT CAUGHT"
        table.add_row(
            one.fault.name, one.fault.kind, one.layer, seen, "yes" if one.named else "no", one.report.sentence
        )
    console.print(table)
    kinds = len({fault.kind for fault in FAULTS})
    print(
        f"{total - len(missed)} of {total} mutants caught ({len(FAULTS)} faults of {kinds} kinds), {named_right} named"
    )
    for line in missed:
        print(f"missed: {line}")
    alarms = 0
    for plan, report in track(
        false_alarms(cases), total=cases, description="right layers", console=console, transient=True
    ):
        if not report.ok:
            alarms += 1
            print(f"false alarm: {report.sentence} in {plan.spec}")
    if cases:
        print(f"{alarms} false alarms in {cases} right layers of random mathematics, sizes, fusion and replicas")
    return not missed and not alarms
