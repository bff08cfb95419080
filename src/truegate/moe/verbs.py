"""The verb `plan`: thin, everything heavy is imported inside it."""

from typing import Annotated

import typer

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
