"""Text to token ids and back, and the chat template, straight from a checkpoint's files.

Invariant: needs tokenizers and jinja2 only (no torch, no transformers), so that the HTTP process stays light; a
checkpoint without tokenizer.json is converted through transformers, if that is installed.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from truegate.errors import UserError

# what transformers can make a tokenizer.json from; without any of them it is not asked
OTHER_KINDS = ("*.model", "*.tiktoken", "vocab.*", "merges.txt", "tekken.json")


class Tokenizer:
    """The tokenizer of a checkpoint folder: `encode`, `decode`, `render_chat`, and the ids that end an answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = _read_json(folder / "tokenizer_config.json")
        self.backend = _load_backend(folder)
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self.bos_token = _token_text(self.settings.get("bos_token"))
        self.eos_token = _token_text(self.settings.get("eos_token"))
        self.eos_token_ids = _eos_ids(folder, self.backend, self.eos_token)
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.chat_template = _chat_template(folder, self.settings)
        self._compiled: Any = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int] | tuple[int, ...], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's own template; encode it without special tokens."""
        if self.chat_template is None:
            raise UserError(
                f"{self.folder.name} has no chat template: use plain completions, or add chat_template.jinja"
            )
        if self._compiled is None:
            self._compiled = _compile_template(self.chat_template)
        import jinja2

        given: dict[str, Any] = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token or "",
            "eos_token": self.eos_token or "",
        }
        template, read = self._compiled
        for name in template_kwargs or {}:
            if name in given:
                raise UserError(f"chat_template_kwargs: {name} is set by the request itself; leave it out")
            if name not in read:  # passed on, it would change nothing and nobody would know
                known = ", ".join(sorted(read - given.keys())) or "no variable"
                raise UserError(f"chat_template_kwargs: the chat template does not read {name}; it reads {known}")
        try:
            return template.render(**given, **(template_kwargs or {}))
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise UserError(f"the chat template refuses these messages: {error}") from None

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_padding()
        backend.no_truncation()
        return backend
    if not any(any(folder.glob(pattern)) for pattern in OTHER_KINDS):
        raise UserError(
            f"{folder} has no tokenizer.json: copy the model's there, with tokenizer_config.json (the chat template)"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError(
            f"{folder} has no tokenizer.json: install transformers, which can convert other kinds"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{folder} has no tokenizer.json and transformers cannot make one here ({cause}): copy one there"
        ) from None


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json, else config.json, and the tokenizer's own end token."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            ids = list(value) if isinstance(value, list) else [value]
            break
    own = backend.token_to_id(eos_token) if eos_token else None
    return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates: the default one
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _compile_template(source: str) -> tuple[Any, set[str]]:
    """The template and the variables it reads, in the environment transformers gives templates.

    Sandboxed, with loop controls, tojson, raise_exception and strftime_now.
    """
    import jinja2
    import jinja2.meta
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(source), jinja2.meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template does not parse: {error}") from None
