"""The bodies that the HTTP API accepts, field by field.

Invariant: a field is honoured or refused by name. Fields of OpenAI's API that this server has no use for pass only at
the value that asks for nothing (`_NEUTRAL`); every other unknown field is an error. Numbers are finite, text is UTF-8.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, StrictBool, model_validator

from truegate.types import MAX_LOGPROBS


def _utf8(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which is no text") from None
    return text


Text = Annotated[str, Strict(), AfterValidator(_utf8)]
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]  # takes whole numbers too
TokenId = Annotated[Int, Field(ge=0, le=(1 << 31) - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
TokenIdLists = Annotated[list[TokenIds], Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]

# What a client may send without asking for anything, by field; None is always such a value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # says nothing without tools
    "prediction": (),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class Body(BaseModel):
    """A request body: unknown fields are refused, the neutral ones are taken out first."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key in cls.model_fields or not _is_neutral(key, value)}


def _is_neutral(key: str, value: Any) -> bool:
    if key not in _NEUTRAL:
        return False
    return value is None or any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[key])


class StreamOptions(Body):
    include_usage: StrictBool | None = Field(default=None, description="Send token counts in a last chunk.")
    continuous_usage_stats: StrictBool | None = Field(
        default=None, description="Send token counts so far in every chunk (as vLLM does)."
    )
    include_obfuscation: Literal[False] | None = Field(default=None, description="Only false: no padding is added.")


class JsonSchema(Body):
    name: Text = Field(min_length=1, max_length=64)
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="A JSON schema.")
    strict: StrictBool | None = Field(default=None, description="The schema is enforced either way.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_named(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise ValueError("json_schema needs a schema")
        return self


class Sampling(Body):
    """The fields that both generation endpoints share."""

    model: Text | None = Field(default=None, description="A name that /v1/models lists; may be left out.")
    frequency_penalty: Float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: Float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Float] | None = Field(default=None, description="Token id to bias, -100 to 100.")
    n: Int | None = Field(default=None, ge=1, description="Answers per prompt.")
    seed: Int | None = Field(default=None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: Text | list[Text] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Float | None = Field(default=None, ge=0, le=100)
    top_p: Float | None = Field(default=None, gt=0, le=1)
    response_format: ResponseFormat | None = None
    user: Text | None = Field(default=None, description="A label for the server's log; changes no answer.")
    # extensions
    top_k: Int | None = Field(default=None, ge=-1, le=(1 << 31) - 1, description="0 and -1: all tokens.")
    min_p: Float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: Float | None = Field(default=None, ge=0.01, le=100)
    min_tokens: Int | None = Field(default=None, ge=0, le=(1 << 31) - 1)
    ignore_eos: StrictBool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    logprob_token_ids: list[TokenId] | None = Field(
        default=None, max_length=MAX_LOGPROBS, description="Report these tokens' log-probabilities at every position."
    )
    prompt_logprobs: Int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of the prompt, with so many alternatives."
    )
    return_token_ids: StrictBool | None = Field(default=None, description="Add the token ids of prompt and answer.")
    return_routed_experts: StrictBool | Literal["list", "base64"] | None = Field(
        default=None, description="Add ids and weights of the experts that ran, by token and MoE layer; true: as lists."
    )

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    def as_template_input(self) -> dict[str, str]:
        """What chat templates read; OpenAI's newer name for the system role is given its older one."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": "system" if self.role == "developer" else self.role, "content": "".join(parts)}


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_tokens: Int | None = Field(default=None, ge=1, le=(1 << 31) - 1)
    max_completion_tokens: Int | None = Field(default=None, ge=1, le=(1 << 31) - 1)
    logprobs: StrictBool | None = None
    top_logprobs: Int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: StrictBool | None = Field(default=None, description="Default true.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the chat template.")

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens say different things: give one")
        return self


class CompletionRequest(Sampling):
    prompt: (
        Text | TokenIds | Annotated[list[Text], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    )
    max_tokens: Int | None = Field(
        default=None, ge=0, le=(1 << 31) - 1, description="Default 16; 0, with echo, only scores the prompt."
    )
    echo: StrictBool | None = None
    logprobs: Int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: StrictBool | None = Field(default=None, description="Default true, as the tokenizer has it.")
    return_tokens_as_token_ids: StrictBool | None = Field(
        default=None, description="Name tokens `token_id:N` in logprobs, so that no two share a name."
    )

    @model_validator(mode="after")
    def _no_tokens_needs_echo(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 asks for nothing unless echo is true")
        return self


class TokenizeRequest(Body):
    model: Text | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: Text | None = None
    tokens: list[TokenId]
    skip_special_tokens: StrictBool | None = Field(default=None, description="Default false: every token shows.")
