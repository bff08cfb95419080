"""The verbs `serve`, `check` (which measures what `serve` would run) and `chat`; registered in `truegate.cli`."""

import os
from importlib.util import find_spec
from typing import Annotated

import typer

ENGINE, LIMITS, HTTP = "Engine", "Limits", "HTTP"


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub id; default: the model that ships here.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=HTTP)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.", rich_help_panel=HTTP)] = 30000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in the API; again for more names.", rich_help_panel=HTTP)
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TRUEGATE_API_KEY", help="Refuse requests without it; again for more keys.", rich_help_panel=HTTP
        ),
    ] = None,
    log_requests: Annotated[bool, typer.Option(help="One line per request.", rich_help_panel=HTTP)] = False,
    on_engine_death: Annotated[
        str, typer.Option(help="exit (code 3) or restart the engine process.", rich_help_panel=HTTP)
    ] = "exit",
    drain_seconds: Annotated[
        int, typer.Option(min=0, help="On SIGTERM, wait so long for running answers.", rich_help_panel=HTTP)
    ] = 60,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", rich_help_panel=ENGINE)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.", rich_help_panel=ENGINE)] = None,
    load_format: Annotated[
        str, typer.Option(help="checkpoint, or dummy: random weights, to measure speed.", rich_help_panel=ENGINE)
    ] = "checkpoint",
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer together.", rich_help_panel=ENGINE)
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Answers computed in one step.", rich_help_panel=ENGINE)
    ] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="Size of the cache.", rich_help_panel=ENGINE)] = None,
    mem_fraction: Annotated[
        float | None, typer.Option(help="Of the free device memory, for the cache.", rich_help_panel=ENGINE)
    ] = None,
    chunked_prefill_tokens: Annotated[
        int | None, typer.Option(help="Rows of one step, prompts and answers together.", rich_help_panel=ENGINE)
    ] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse common prompt beginnings.", rich_help_panel=ENGINE)] = True,
    overlap: Annotated[
        bool | None, typer.Option(help="Launch a step before the last one is read.", rich_help_panel=ENGINE)
    ] = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option(help="Replay captured steps; default: on a GPU.", rich_help_panel=ENGINE)
    ] = None,
    attention_splits: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cut contexts in so many parts, a power of two up to 64 (GPU).", rich_help_panel=ENGINE
        ),
    ] = None,
    router: Annotated[str | None, typer.Option(help="A file of moe/routers.", rich_help_panel=ENGINE)] = None,
    experts: Annotated[str | None, typer.Option(help="A file of moe/experts.", rich_help_panel=ENGINE)] = None,
    dispatch: Annotated[str | None, typer.Option(help="A file of moe/dispatch.", rich_help_panel=ENGINE)] = None,
    fuse_shared: Annotated[
        bool | None, typer.Option(help="Shared experts as slots of the routed ones.", rich_help_panel=ENGINE)
    ] = None,
    scale_at: Annotated[
        str | None, typer.Option(help="weights or output: where the routed scale goes.", rich_help_panel=ENGINE)
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Of the engine on a CPU; default: all cores but one.", rich_help_panel=ENGINE),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of answers that bring none.", rich_help_panel=ENGINE)] = 0,
    fault: Annotated[
        str | None, typer.Option(help="Plant this fault, to see what it does to answers.", rich_help_panel=ENGINE)
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Answers waiting beyond those that run; more get 429.", rich_help_panel=LIMITS)
    ] = 1024,
    max_n: Annotated[int, typer.Option(min=1, help="Answers per prompt.", rich_help_panel=LIMITS)] = 16,
    max_prompts: Annotated[int, typer.Option(min=1, help="Prompts per request.", rich_help_panel=LIMITS)] = 256,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default: what --max-model-len leaves.", rich_help_panel=LIMITS)
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request; more get 413.", rich_help_panel=LIMITS)] = 4
    << 20,
    body_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a body to arrive.", rich_help_panel=LIMITS)
    ] = 30.0,
    stall_seconds: Annotated[
        float,
        typer.Option(min=1, help="Silence of the engine after which /health is 503.", rich_help_panel=LIMITS),
    ] = 60.0,
) -> None:
    """Start an OpenAI-compatible server."""
    from truegate.config import EngineConfig
    from truegate.errors import UserError

    if find_spec("torch") is None:  # which only the engine process imports
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    from truegate.serve.main import ServeOptions
    from truegate.serve.main import serve as run

    if not api_key and os.environ.get("TRUEGATE_API_KEY") is not None:
        raise UserError("TRUEGATE_API_KEY is set and empty, so it protects nothing: give it a key, or unset it")
    if on_engine_death not in ("exit", "restart"):
        raise UserError(f"--on-engine-death {on_engine_death!r}: exit or restart")
    engine = EngineConfig(
        model=model,
        device=device,
        dtype=dtype,
        load_format=load_format,
        max_model_len=max_model_len,
        max_running=max_running,
        kv_cache_gib=kv_cache_gib,
        mem_fraction=mem_fraction,
        chunked_prefill_tokens=chunked_prefill_tokens,
        prefix_cache=prefix_cache,
        overlap=overlap,
        cuda_graphs=cuda_graphs,
        attention_splits=attention_splits,
        router=router,
        experts=experts,
        dispatch=dispatch,
        fuse_shared=fuse_shared,
        scale_at=scale_at,
        threads=threads,
        seed=seed,
        fault=fault,
    )
    limits = {
        "max_queue": max_queue,
        "max_n": max_n,
        "max_prompts": max_prompts,
        "max_prompt_tokens": max_prompt_tokens,
        "max_body_bytes": max_body_bytes,
        "body_timeout": body_timeout,
        "stall_seconds": stall_seconds,
    }
    run(
        ServeOptions(
            engine=engine,
            host=host,
            port=port,
            names=tuple(served_model_name or ()),
            api_keys=tuple(api_key or ()),
            restart=on_engine_death == "restart",
            drain_seconds=drain_seconds,
            limits=limits,
            log_requests=log_requests,
        )
    )


def check(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, config.json or hub id; only the config is read. Default: the embedded model."),
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
    A model that `truegate serve` does not run is measured all the same, and the last line says why it is not served.
    """
    from truegate.config import EngineConfig
    from truegate.errors import EXIT_FAULT, UserError

    if cases < 0 or (cases and not mutants):
        raise UserError(f"--cases {cases}: give 0 or more right layers, with --mutants")
    config = EngineConfig(
        model=model, dtype=dtype, device=device, router=router, experts=experts, dispatch=dispatch,
        fuse_shared=fuse_shared, scale_at=scale_at, fault=fault,
    )  # fmt: skip
    if mutants and config != EngineConfig():
        raise UserError("--mutants plants its own faults in its own layers: drop the model and every flag but --cases")
    from truegate.models.load import refusal
    from truegate.moe import table

    right = table.mutants(cases) if mutants else table.check(config, refusal)
    if not right:
        raise typer.Exit(EXIT_FAULT)


def chat(
    url: Annotated[
        str, typer.Option(help="Of any OpenAI-compatible server, with or without /v1.")
    ] = "http://127.0.0.1:30000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="TRUEGATE_API_KEY", help="If the server wants one.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the server's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    once: Annotated[str | None, typer.Option(help="Ask this one thing and leave.")] = None,
) -> None:
    """Talk to a server in the terminal."""
    from truegate.serve.terminal import Conversation, talk

    options = {"temperature": temperature, "max_tokens": max_tokens}
    talk(Conversation(url, model=model, api_key=api_key, system=system, options=options), once=once)
