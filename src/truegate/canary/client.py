"""One server's completion API in whichever dialect it speaks: token ids in, tokens and top log-probabilities out.

Invariant: never more than 20 log-probabilities are asked for, every request has a time limit, and a server that dies or
hangs raises `ServerLost`, which nothing here turns into a measurement.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from truegate.canary.api import MAX_TOP, Api, Completion, Refusal, ServerLost
from truegate.errors import InvalidRun

_NOT_LISTED = -9000.0  # engines write minus infinity as about -9999 or -1e30
_SGLANG_PAGES = ("/get_model_info", "/model_info")  # only SGLang has them
_BODY = 300  # characters of an odd answer that are quoted


class Client:
    """Requests to one server; `words` maps a token's text to its id."""

    def __init__(self, url: str, words: Sequence[str], *, timeout: float, headers: Mapping[str, str]) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.words = words
        self.timeout = timeout
        self._ids = {w: i for i, w in enumerate(words)}
        limits = httpx.Limits(max_connections=300, max_keepalive_connections=300)
        self._http = httpx.Client(timeout=timeout, limits=limits, headers=dict(headers), trust_env=False)
        self.num_requests = 0
        self._more: dict[str, Any] = {}  # fields of every request for now

    def close(self) -> None:
        self._http.close()

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[str]:
        """Every request inside asks for this data-parallel rank: SGLang's fields, or vLLM's header; gives its words."""
        if any((page := self.get(path)) is not None and page.status_code == 200 for path in _SGLANG_PAGES):
            self._more = {"routed_dp_rank": rank, "data_parallel_rank": rank}  # the second is its older name
            try:
                yield f"routed_dp_rank {rank} in the request"
            finally:
                self._more = {}
            return
        self._http.headers["X-data-parallel-rank"] = str(rank)
        try:
            yield f"X-data-parallel-rank: {rank}"
        finally:
            del self._http.headers["X-data-parallel-rank"]

    def get(self, path: str) -> httpx.Response | None:
        """A GET that may fail: None then."""
        try:
            return self._http.get(self.url + path, timeout=min(self.timeout, 10))
        except httpx.HTTPError:
            return None

    def complete(
        self, api: Api, prompts: Sequence[Sequence[int]], max_tokens: int, *, echo: bool = False
    ) -> list[Completion]:
        """One request with all prompts; `Refusal` when the server says no, `ServerLost` when it does not answer."""
        body = self._body(api, prompts, max_tokens, echo)
        path = {"completions": "/v1/completions", "generate": "/generate", "chat": "/v1/chat/completions"}[api.endpoint]
        data = self._post(path, body)
        try:
            if api.endpoint == "generate":
                items = data if isinstance(data, list) else [data]
            else:
                items = sorted(data["choices"], key=lambda c: c.get("index", 0))
            if len(items) != len(prompts):
                raise Refusal(200, f"{len(items)} answers to {len(prompts)} prompts")
            if api.endpoint == "generate":
                return [self._native(item) for item in items]
            return [self._choice(c, len(p) if echo else 0) for c, p in zip(items, prompts, strict=True)]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise Refusal(200, f"an answer of another form: {str(data)[:_BODY]}") from None

    def together(
        self, api: Api, jobs: Sequence[tuple[Sequence[int], int]], parallel: int
    ) -> list[Completion | Refusal]:
        """Many requests of one prompt each, `parallel` at a time; a refusal stands in its place."""

        def one(job: tuple[Sequence[int], int]) -> Completion | Refusal:
            try:
                return self.complete(api, [job[0]], job[1])[0]
            except Refusal as refusal:
                return refusal

        with ThreadPoolExecutor(max_workers=max(1, parallel)) as pool:
            futures = [pool.submit(one, job) for job in jobs]
            try:
                return [f.result() for f in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _body(self, api: Api, prompts: Sequence[Sequence[int]], max_tokens: int, echo: bool) -> dict[str, Any]:
        texts = [" ".join(self.words[t] for t in p) for p in prompts]
        if api.endpoint == "generate":
            many = len(prompts) > 1
            body: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": max_tokens,
                                                        "ignore_eos": True}}  # fmt: skip
            given = [list(p) for p in prompts] if api.ids else texts
            body["input_ids" if api.ids else "text"] = given if many else given[0]
            return body | ({"return_logprob": True, "top_logprobs_num": api.top} if api.top else {})
        body = {"model": api.model, "temperature": 0, "max_tokens": max_tokens, "stream": False}
        if api.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": texts[0]}]
            body |= {"logprobs": True, "top_logprobs": api.top} if api.top else {}
        else:
            given = [list(p) for p in prompts] if api.ids else texts
            body["prompt"] = given if len(prompts) > 1 else given[0]
            body |= {"logprobs": api.top} if api.top else {}
            body |= {"echo": True} if echo else {}
        return body | ({"return_tokens_as_token_ids": True} if api.id_names else {})

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        self.num_requests += 1
        late = time.monotonic() + self.timeout
        try:
            with self._http.stream("POST", self.url + path, json={**body, **self._more}) as response:
                text = b""
                for part in response.iter_bytes():  # httpx limits each wait, not their sum
                    text += part
                    if time.monotonic() > late:
                        raise httpx.ReadTimeout("the answer does not end")
        except httpx.TimeoutException:
            raise ServerLost(f"no answer from {self.url}{path} within {self.timeout:g} s: it hangs or is overloaded "
                             f"(--timeout raises the limit)") from None  # fmt: skip
        except httpx.HTTPError as error:
            raise ServerLost(f"{self.url}{path}: {self._what_happened(error)}") from None
        words = text.decode(errors="replace")
        if response.status_code >= 400:
            raise Refusal(response.status_code, words)
        try:
            return json.loads(words)
        except ValueError:
            raise Refusal(response.status_code, f"not JSON: {words[:_BODY]}") from None

    def _what_happened(self, error: httpx.HTTPError) -> str:
        if self.num_requests <= 1:
            return f"cannot be reached ({error or type(error).__name__}); is the server running at this --url?"
        for _ in range(3):
            time.sleep(0.5)
            if (alive := self.get("/v1/models")) is not None and alive.status_code < 500:
                broke = f"the connection broke ({error or type(error).__name__})"
                return f"{broke}, but the server is there: it hung up or restarted"
        return f"the server died ({error or type(error).__name__}) after {self.num_requests} requests"

    def _choice(self, choice: Mapping[str, Any], num_prompt: int) -> Completion:
        """OpenAI's two formats: parallel lists (completions), or a `content` list (chat; llama.cpp everywhere)."""
        found = choice.get("logprobs") or {}
        if found.get("content"):
            steps = found["content"]
            tokens = [self._id(s) for s in steps]
            return Completion(tokens, [self._top(dict(enumerate(s.get("top_logprobs") or []))) for s in steps])
        text = choice.get("text")
        if text is None:
            text = (choice.get("message") or {}).get("content") or ""
        if not found.get("tokens"):
            return Completion(self._parse(text), [])
        tokens = [self._id({"token": t}) for t in found["tokens"]]
        tops = [self._top(t) if t else {} for t in (found.get("top_logprobs") or [None] * len(tokens))]
        if not num_prompt:
            return Completion(tokens, tops)
        after = [t or None for t in tops[1:num_prompt]]
        return Completion(tokens[num_prompt:], tops[num_prompt:], [*after, *(tops[num_prompt : num_prompt + 1])])

    def _native(self, item: Mapping[str, Any]) -> Completion:
        """SGLang's own format: [log-probability, id, text] triples."""
        meta = item.get("meta_info") or {}
        steps = meta.get("output_top_logprobs") or []
        chosen = meta.get("output_token_logprobs") or []
        tokens: list[int | None] = [t[1] for t in chosen] or item.get("output_ids") or self._parse(item.get("text", ""))
        return Completion(tokens, [{t[1]: float(t[0]) for t in s or [] if t[0] > _NOT_LISTED} for s in steps])

    def _top(self, entries: Mapping[Any, Any]) -> dict[int, float]:
        """{id: log-probability} from {text: value} or {i: {token, id, logprob}}; unknown tokens are left out."""
        out: dict[int, float] = {}
        for key, value in entries.items():
            if isinstance(value, Mapping):
                token, lp = self._id(value), value.get("logprob")
            else:
                token, lp = self._id({"token": key}), value
            lp = math.nan if lp is None else float(lp)
            if token is not None and not lp <= _NOT_LISTED:
                out[token] = lp
        return out

    def _id(self, entry: Mapping[str, Any]) -> int | None:
        if isinstance(entry.get("id"), int):
            return entry["id"]
        text = str(entry.get("token", "")).strip()
        if match := re.fullmatch(r"token_id:(\d+)", text):
            return int(match[1])
        return self._ids.get(text)

    def _parse(self, text: str) -> list[int | None]:
        return [self._ids.get(word) for word in re.findall(r"[^\s<>]+|<[^<>\s]*>", text)]


def find_api(client: Client, prompt: Sequence[int], check: Callable[[Completion], bool], *, model: str | None) -> Api:
    """The best way to ask: `check(Completion)` says whether log-probabilities of a fingerprint token can be read."""
    models = client.get("/v1/models")
    if models is None and client.get("/health") is None and client.get("/") is None:
        raise ServerLost(f"{client.url} cannot be reached: is the server running, and is --url right?")
    api, refusals = _best(client, model or _model_name(models), prompt, check)
    if api is None:
        raise InvalidRun(f"{client.url} answers no completion request: {'; '.join(refusals[:4])}")
    if api.endpoint != "chat":
        api = replace(api, batched=_works(client, replace(api, batched=True), [list(prompt)] * 2))
    if api.endpoint == "completions" and api.top:
        api = replace(api, echo=_echoes(client, api, prompt))
    return api


def _best(
    client: Client, model: str, prompt: Sequence[int], check: Callable[[Completion], bool]
) -> tuple[Api | None, list[str]]:
    """Ids before text, completions before native before chat, many log-probabilities before few before none."""
    refusals: list[str] = []
    for api in _candidates(model):
        try:
            answer = client.complete(api, [prompt], 1)[0]
        except Refusal as refusal:
            refusals.append(f"{api.describe()}: {refusal}")
            continue
        if api.top and answer.tops and check(answer):
            return api, refusals
        if not api.top and answer.tokens:
            return api, refusals
        refusals.append(f"{api.describe()}: no usable answer")
    return None, refusals


def _candidates(model: str) -> list[Api]:
    logprobs = [
        Api(endpoint="completions", ids=True, top=MAX_TOP, id_names=True, model=model),
        Api(endpoint="completions", ids=True, top=MAX_TOP, model=model),
        Api(endpoint="generate", ids=True, top=MAX_TOP, model=model),
        Api(endpoint="completions", ids=True, top=5, model=model),
        Api(endpoint="completions", ids=False, top=MAX_TOP, model=model),
        Api(endpoint="completions", ids=False, top=5, model=model),
        Api(endpoint="chat", ids=False, top=MAX_TOP, id_names=True, model=model),
        Api(endpoint="chat", ids=False, top=MAX_TOP, model=model),
        Api(endpoint="chat", ids=False, top=5, model=model),
    ]
    greedy = [
        Api(endpoint="completions", ids=True, top=0, model=model),
        Api(endpoint="completions", ids=False, top=0, model=model),
        Api(endpoint="chat", ids=False, top=0, model=model),
    ]
    return logprobs + greedy


def _model_name(models: httpx.Response | None) -> str:
    try:
        return models.json()["data"][0]["id"] if models is not None else "canary"
    except (ValueError, KeyError, IndexError, TypeError):
        return "canary"


def _works(client: Client, api: Api, prompts: Sequence[Sequence[int]]) -> bool:
    try:
        answers = client.complete(api, prompts, 1)
    except Refusal:
        return False
    return len(answers) == len(prompts) and all(a.tokens and (a.tops or not api.top) for a in answers)


def _echoes(client: Client, api: Api, prompt: Sequence[int]) -> bool:
    try:
        answer = client.complete(api, [list(prompt) * 3], 1, echo=True)[0]
    except Refusal:
        return False
    return len(answer.echo) == 3 and all(answer.echo) and len(answer.tokens) == 1
