"""The verbs `plan` and `check`: thin, everything heavy is imported inside them."""

from typing import Annotated

import typer

from truegate.config import EngineConfig
from truegate.errors import EXIT_FAULT, UserError

ROUTERS = "torch, triton, aiter"
EXPERTS = "torch, triton, deep_gemm, cutlass_fp8, flashinfer_cutlass, flashinfer_trtllm, aiter"
EXCHANGES = "local, allgather, alltoall, deepep_normal, deepep_low_latency, mori"


def plan(
    config: Annotated[str, typer.Argument(help="A Hugging Face config.json, or the folder it is in.")],
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each attention replica.")] = 1,
    dp: Annotated[int | None, typer.Option(help="Data-parallel attention replicas (default: ep / tp).")] = None,
    router: Annotated[str | None, typer.Option(help=f"{ROUTERS}; default: the one that goes with the experts.")] = None,
    experts: Annotated[str, typer.Option(help=f"Expert kernel: {EXPERTS}.")] = "torch",
    dispatch: Annotated[
        str | None, typer.Option(help=f"Exchange: {EXCHANGES}; default: local, or allgather if ep > 1.")
    ] = None,
    fuse_shared: Annotated[bool, typer.Option(help="Run the shared expert as extra slots of the kernel.")] = False,
    replicate_shared: Annotated[bool, typer.Option(help="Compute gathered rows' shared slot on every rank.")] = False,
    scale_at: Annotated[str, typer.Option(help="Where the routed scale multiplies: weights or output.")] = "weights",
    redundant: Annotated[int, typer.Option(help="Redundant physical experts.")] = 0,
    layer: Annotated[int | None, typer.Option(help="Which layer (default: the first MoE layer).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show who multiplies what in a MoE layer, what padding looks like on each edge, and where ids go; or why not.

    SGLang's --tp-size 8 --dp-size 8 --enable-dp-attention is --tp 1 --dp 8 here. Backends other than torch,
    triton and local are contracts: our reading of an interface, compiled and checked, not run.
    """
    from truegate.law.plan import Ranks
    from truegate.moe.show import as_json, as_text, plan_of

    ranks = Ranks(tp=tp, dp=max(1, ep // max(1, tp)) if dp is None else dp, ep=ep)
    index, compiled = plan_of(
        config, ranks=ranks, layer=layer, experts=experts, dispatch=dispatch, router=router, redundant=redundant,
        fuse_shared=fuse_shared, scale_at=scale_at, replicate_shared=replicate_shared,
    )  # fmt: skip
    if json:
        import json as library

        print(library.dumps(as_json(index, compiled), indent=2))
    else:
        print("\n".join(as_text(index, compiled)))


def check(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub id; only its config is read. Default: the embedded model.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16; default: as `truegate serve` has it.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is one.")] = None,
    router: Annotated[str | None, typer.Option(help="Default: the one that goes with the experts.")] = None,
    experts: Annotated[
        str | None, typer.Option(help="Expert kernel; default: torch on a CPU, triton on a GPU.")
    ] = None,
    dispatch: Annotated[str | None, typer.Option(help="Exchange; default: local.")] = None,
    fuse_shared: Annotated[
        bool | None,
        typer.Option(help="Shared experts as extra slots of the kernel; default: on a GPU, where the plan allows it."),
    ] = None,
    scale_at: Annotated[
        str | None, typer.Option(help="Where the routed scale multiplies: weights (default) or output.")
    ] = None,
    fault: Annotated[str | None, typer.Option(help="Plant this fault first, to see what the self-test says.")] = None,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Plant every fault of the catalogue, print what saw it.")
    ] = False,
    cases: Annotated[int, typer.Option(help="With --mutants: also this many right layers, for false alarms.")] = 0,
) -> None:
    """Measure a model's MoE layers as `truegate serve` would run them here with the same flags, before it answers.

    Exit code 0: every measured coefficient is as the model defines it. 1: it is not, and the table says what is wrong.
    A pass is about the row counts and layouts in the table, to the tolerance of the dtype.
    """
    if cases < 0 or (cases and not mutants):
        raise UserError(f"--cases {cases}: give 0 or more right layers, with --mutants")
    config = EngineConfig(
        model=model, dtype=dtype, device=device, router=router, experts=experts, dispatch=dispatch,
        fuse_shared=fuse_shared, scale_at=scale_at, fault=fault,
    )  # fmt: skip
    if mutants and config != EngineConfig():
        raise UserError("--mutants plants its own faults in its own layers: drop the model and every flag but --cases")
    from truegate.moe import table

    right = table.mutants(cases) if mutants else table.check(config)
    if not right:
        raise typer.Exit(EXIT_FAULT)
