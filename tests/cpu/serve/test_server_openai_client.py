"""Every endpoint and option, asked by the real `openai` client. The scripted engine repeats the prompt three times."""

import base64
import math

import numpy as np
import openai
import pytest
from server_process import Server

USER = [{"role": "user", "content": "hi"}]
CHAT_ROUND = "hi\n"  # what the scripted engine repeats: the rendered conversation without its special tokens


@pytest.fixture(scope="module")
def client(fake: Server) -> openai.OpenAI:
    return fake.openai()


def joined(chunks) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return texts


def test_models_lists_and_retrieves_what_is_served(client):
    (card,) = client.models.list().data
    assert card.id == "fake"
    assert card.max_model_len == 512
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="`gpt-5` is not served here, but fake is"):
        client.models.retrieve("gpt-5")


def test_chat_answers_with_content_usage_and_stop(client):
    answer = client.chat.completions.create(model="fake", messages=USER)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == 3 * CHAT_ROUND
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 16  # three rounds and the end token
    assert answer.usage.total_tokens == 21
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_streamed_chat_is_the_whole_answer_in_pieces_with_usage_last(client):
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="fake", messages=USER, stream=True, stream_options=options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert joined(chunks) == {0: 3 * CHAT_ROUND}
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 16
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_continuous_usage_counts_up(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.completions.create(model="fake", prompt="ab", max_tokens=4, stream=True, stream_options={**options})
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_ends_with_length(client, field):
    answer = client.chat.completions.create(model="fake", messages=USER, **{field: 3})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut_and_named(client, stream):
    answer = client.completions.create(model="fake", prompt="hello ", stop=["lo h", "zz"], stream=stream)
    if stream:
        chunks = list(answer)
        assert joined(chunks) == {0: "hel"}
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == "lo h"
        return
    assert answer.choices[0].text == "hel"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "lo h"


def test_a_stop_string_or_id_is_kept_when_asked_for(client):
    keep = {"include_stop_str_in_output": True}
    text = client.completions.create(model="fake", prompt="hello", stop="ll", extra_body=keep).choices[0].text
    assert text == "hell"
    token = client.post("/../tokenize", body={"prompt": "o"}, cast_to=object)["tokens"]
    without = client.completions.create(model="fake", prompt="hello", extra_body={"stop_token_ids": token})
    assert without.choices[0].text == "hell"
    assert without.choices[0].stop_reason == token[0]
    kept = client.completions.create(model="fake", prompt="hello", extra_body={"stop_token_ids": token, **keep})
    assert kept.choices[0].text == "hello"


def test_n_answers_and_many_prompts_keep_their_order(client):
    answer = client.completions.create(model="fake", prompt=["aa", "bb", "cc"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == ["aa", "aa", "bb", "bb", "cc", "cc"]
    assert answer.usage.prompt_tokens == 6  # a prompt counts once, however many answers it has
    assert answer.usage.completion_tokens == 12
    chunks = client.completions.create(model="fake", prompt=["aa", "bb"], n=2, max_tokens=2, stream=True)
    assert joined(chunks) == {0: "aa", 1: "aa", 2: "bb", 3: "bb"}


def test_prompts_may_be_token_ids(client):
    one = client.post("/../tokenize", body={"prompt": "xyz"}, cast_to=object)["tokens"]
    assert client.completions.create(model="fake", prompt=one, max_tokens=3).choices[0].text == "xyz"
    both = client.completions.create(model="fake", prompt=[one, one[:1]], max_tokens=3)
    assert [choice.text for choice in both.choices] == ["xyz", "xxx"]


@pytest.mark.parametrize("stream", [False, True])
def test_multibyte_text_comes_whole(client, stream):
    word = "naïve 数据 🙂"
    answer = client.completions.create(model="fake", prompt=word, max_tokens=2 * len(word.encode()), stream=stream)
    text = joined(answer)[0] if stream else answer.choices[0].text
    assert text == 2 * word


def test_chat_logprobs_have_openais_shape(client):
    answer = client.chat.completions.create(model="fake", messages=USER, max_tokens=2, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == 2
    assert content[1].token == "h"
    assert content[1].bytes == [ord("h")]
    assert [top.logprob for top in content[1].top_logprobs] == [-0.5, -1.5]
    only_chosen = client.chat.completions.create(model="fake", messages=USER, max_tokens=1, logprobs=True)
    assert only_chosen.choices[0].logprobs.content[0].top_logprobs == []
    chunks = client.chat.completions.create(
        model="fake", messages=USER, max_tokens=2, logprobs=True, top_logprobs=2, stream=True
    )
    pieces = [entry for c in chunks for x in c.choices if x.logprobs for entry in x.logprobs.content]
    assert [entry.token for entry in pieces] == [entry.token for entry in content]


def test_listed_tokens_are_reported_at_every_position(client):
    body = {"logprob_token_ids": [7, 9]}
    answer = client.chat.completions.create(model="fake", messages=USER, max_tokens=2, logprobs=True, extra_body=body)
    for entry in answer.choices[0].logprobs.content:
        assert [(one["token_id"], one["logprob"]) for one in entry.listed_logprobs] == [(7, -7.0), (9, -9.0)]
    plain = client.completions.create(model="fake", prompt="ab", max_tokens=2, extra_body=body)
    assert plain.choices[0].logprobs.listed_logprobs == [{"7": -7.0, "9": -9.0}] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(client, stream):
    answer = client.completions.create(model="fake", prompt="abc", echo=True, logprobs=1, max_tokens=2, stream=stream)
    if stream:
        chunks = list(answer)
        assert joined(chunks) == {0: "abcab"}
        tokens = [token for c in chunks for token in c.choices[0].logprobs.tokens]
        offsets = [offset for c in chunks for offset in c.choices[0].logprobs.text_offset]
        assert (tokens, offsets) == (list("abcab"), [0, 1, 2, 3, 4])
        return
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "abcab"
    assert logprobs.tokens == list("abcab")
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {"b": -0.5}
    assert logprobs.text_offset == [0, 1, 2, 3, 4]


def test_echo_without_tokens_only_scores(client):
    answer = client.completions.create(model="fake", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs.tokens == list("abc")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0


def test_tokens_can_be_named_by_id(client):
    body = {"return_tokens_as_token_ids": True}
    answer = client.completions.create(model="fake", prompt="ab", logprobs=1, max_tokens=1, extra_body=body)
    (name,) = answer.choices[0].logprobs.tokens
    assert name.startswith("token_id:")
    assert list(answer.choices[0].logprobs.top_logprobs[0]) == [name]


def test_prompt_logprobs_by_position(client):
    body = {"prompt_logprobs": 1}
    chat = client.chat.completions.create(model="fake", messages=USER, max_tokens=1, extra_body=body)
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    plain = client.completions.create(model="fake", prompt="ab", max_tokens=1, extra_body=body)
    (entry,) = plain.choices[0].prompt_logprobs[1].values()
    assert entry == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked_for(client, stream):
    body = {"return_token_ids": True}
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=3, extra_body=body, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    prompt = next(choice.prompt_token_ids for choice in choices if hasattr(choice, "prompt_token_ids"))
    made = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    assert made == [prompt[0], prompt[1], prompt[0]]


@pytest.mark.parametrize("stream", [False, True])
def test_routed_experts_cover_every_position_but_the_last(client, stream):
    def ask(form):
        body = {"return_routed_experts": form}
        answer = client.chat.completions.create(
            model="fake", messages=USER, max_tokens=3, extra_body=body, stream=stream
        )
        return list(answer)[-1].choices[0].routed_experts if stream else answer.choices[0].routed_experts

    as_list, packed = ask(True), ask("base64")
    assert as_list["shape"] == packed["shape"] == [5 + 3 - 1, 2, 2]
    ids = np.frombuffer(base64.b64decode(packed["ids"]), dtype="<i4").reshape(packed["shape"])
    weights = np.frombuffer(base64.b64decode(packed["weights"]), dtype="<f4").reshape(packed["shape"])
    assert ids.tolist() == as_list["ids"]
    np.testing.assert_allclose(weights, as_list["weights"], atol=1e-8)


def test_sampling_options_are_accepted(client):
    answer = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=7,
        logit_bias={"5": 3, "6": -100},
        user="somebody",
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "skip_special_tokens": False},
        max_tokens=4,
    )
    assert answer.choices[0].message.content == "<|system|>be "  # skip_special_tokens false


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}},
    ],
)
def test_response_formats_reach_the_engine(client, wanted):
    answer = client.chat.completions.create(model="fake", messages=USER, response_format=wanted, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"


def test_ignore_eos_runs_to_the_limit(client):
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=50, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 50
    assert answer.choices[0].finish_reason == "length"


def test_neutral_values_of_unsupported_fields_pass(client):
    answer = client.chat.completions.create(
        model="fake",
        messages=USER,
        max_tokens=1,
        tools=[],
        tool_choice="none",
        store=False,
        service_tier="auto",
        modalities=["text"],
        extra_body={"functions": None, "prediction": None},
    )
    assert answer.choices[0].finish_reason == "length"


def test_tokenize_and_detokenize_invert_each_other(fake):
    text = "naïve 数据"
    out = fake.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert out["count"] == len(out["tokens"]) == len(out["token_strs"]) == len(text.encode())
    assert fake.post("/detokenize", {"tokens": out["tokens"]}).json() == {"prompt": text}
    chat = fake.post("/tokenize", {"messages": USER}).json()
    assert fake.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == "<|user|>hi\n<|assistant|>"
    bare = fake.post("/tokenize", {"messages": USER, "add_generation_prompt": False}).json()
    assert bare["count"] == chat["count"] - 1


def test_log_probabilities_in_json_are_finite(client):
    body = {"logprob_token_ids": [299]}
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=1, logprobs=3, extra_body=body)
    values = answer.choices[0].logprobs.top_logprobs[0].values()
    assert all(math.isfinite(value) for value in values)


def test_metrics_count_tokens_requests_and_expert_load(fake):
    fake.openai().completions.create(model="fake", prompt="ab", max_tokens=2)
    fake.wait_for(lambda: "truegate:generation_tokens_total" in fake.get("/metrics").text, 5)
    text = fake.get("/metrics").text
    for name in (
        "truegate:num_requests_running",
        "truegate:num_requests_waiting",
        "truegate:kv_cache_usage_perc",
        "truegate:cache_hit_rate",
        "truegate:prefix_cache_queries_total",
        "truegate:prefix_cache_hits_total",
        "truegate:prompt_tokens_total",
        "truegate:num_preemptions_total",
        "truegate:gen_throughput",
        "truegate:engine_up",
    ):
        assert f'{name}{{model_name="fake"}}' in text
    assert 'truegate:request_success_total{finished_reason="length",model_name="fake"}' in text
    assert 'truegate:time_to_first_token_seconds_count{model_name="fake"}' in text
    assert 'truegate:inter_token_latency_seconds_count{model_name="fake"}' in text
    assert 'truegate:e2e_request_latency_seconds_count{model_name="fake"}' in text
    assert 'truegate:expert_tokens_total{expert="3",layer="1"} 11.0' in text
    assert 'truegate:expert_balancedness{layer="0"} 0.5' in text
    assert 'truegate:self_test_passed{model_name="fake"} 1.0' in text
    assert 'truegate:http_requests_total{path="/v1/completions",status="200"}' in text


def test_health_says_the_verdict(fake):
    body = fake.get("/health").json()
    assert body["status"] == "ok"
    assert body["self_test"] == "pass: scripted"
    assert body["fault"] is None
