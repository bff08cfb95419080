"""The routes of the server, over a `Service`.

Invariant: every route that can fail answers in OpenAI's error shape; /health tells the truth about the engine.
"""

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from truegate import __version__
from truegate.serve.chat import chat, render
from truegate.serve.completions import complete
from truegate.serve.errors import ErrorBody, install_handlers
from truegate.serve.generation import Service, check_model, check_prompt, encode
from truegate.serve.middleware import Gate
from truegate.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be honoured; the message says why."},
    "503": {"model": ErrorBody, "description": "The engine is not there."},
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A JSON body, or server-sent events with `stream: true`.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
RANDOM = "the weights are random (--load-format dummy): measure speed, the answers mean nothing"
_DESCRIPTION = """OpenAI's API for one mixture-of-experts model. A field that is not listed here is refused by name,
never ignored. Extensions: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids,
include_stop_str_in_output, skip_special_tokens, logprob_token_ids, prompt_logprobs, return_token_ids,
return_routed_experts."""


def build_app(service: Service, *, api_keys: tuple[str, ...] = ()) -> FastAPI:
    app = FastAPI(title="truegate", version=__version__, description=_DESCRIPTION, openapi_url="/openapi.json")
    app.add_middleware(
        Gate,
        keys=api_keys,
        max_body_bytes=service.limits.max_body_bytes,
        body_timeout=service.limits.body_timeout,
        count=service.metrics.count_response,
    )
    install_handlers(app)
    _add_generation(app, service)
    _add_models(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=_STREAM | _ERRORS, tags=["generation"])
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await chat(service, body, request)

    @app.post("/v1/completions", responses=_STREAM | _ERRORS, tags=["generation"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several, given as text or as token ids."""
        return await complete(service, body, request)


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "truegate",
            "root": service.names[0],
            "max_model_len": service.max_model_len,
        }

    @app.get("/v1/models", responses=_ERRORS, tags=["models"])
    async def models() -> dict[str, Any]:
        """The names this model answers to."""
        return {"object": "list", "data": [card(name) for name in service.names]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS, tags=["models"])
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        check_model(service, name)
        return card(name)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=_ERRORS, tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text, or of a conversation as the chat API would send it."""
        check_model(service, body.model)
        if body.messages is not None:
            tokens = await render(service, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        else:
            tokens = await encode(service, body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        out = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": list(tokens)}
        if body.return_token_strs:
            out["token_strs"] = [service.vocabulary.text(token) for token in tokens]
        return out

    @app.post("/detokenize", responses=_ERRORS, tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Text of token ids."""
        check_model(service, body.model)
        if body.tokens:
            check_prompt(service, body.tokens, "tokens")
        skip = bool(body.skip_special_tokens)
        return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=skip)}


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: {"description": "The engine is not there, or does not move."}}, tags=["state"])
    async def health() -> JSONResponse:
        """200 while requests can be answered, else 503; the body says what is wrong."""
        body = health_body(service)
        return JSONResponse(body, status_code=200 if body["status"] == "ok" else 503)

    @app.get("/metrics", tags=["state"], response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format."""
        content, media_type = service.metrics.render()
        return Response(content, headers={"content-type": media_type})

    @app.get("/version", tags=["state"])
    async def version() -> dict[str, str]:
        return {"version": __version__}


def health_body(service: Service) -> dict[str, Any]:
    """What /health says: the engine's state, the self-test's verdict, and a planted fault or random weights."""
    client, stats = service.client, service.client.stats
    silent = time.monotonic() - client.heard
    status, reason = "ok", None
    if client.state != "ready":
        status, reason = client.state, client.reason or client.stage
    elif silent > service.limits.stall_seconds:
        status, reason = "stalled", f"the engine process has not moved for {silent:.0f} s"
    return {
        "status": status,
        "reason": reason,
        "model": service.names[0],
        "self_test": stats.self_test if stats else None,
        "fault": _fault(service),
        "random_weights": RANDOM if client.resolved.load_format == "dummy" else None,
        "answers_in_flight": client.open_answers,
        "engine": {
            "pid": client.pid,
            "running": stats.running if stats else 0,
            "waiting": stats.waiting if stats else 0,
            "restarts": client.restarts,
        },
        "version": __version__,
    }


def _fault(service: Service) -> dict[str, Any] | None:
    stats = service.client.stats
    if stats is None or stats.fault is None:
        return None
    warning = "the answers of this server are wrong on purpose; the self-test ran before the fault was planted"
    return {"name": stats.fault, "says": service.fault, "warning": warning}
