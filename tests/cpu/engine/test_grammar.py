"""Answers constrained to a JSON schema are JSON of that schema, whatever the model wants to say."""

import json

import pytest
import torch
from schedules import Toy

from truegate.config import EngineConfig
from truegate.engine.core import Engine
from truegate.engine.grammar import Grammars
from truegate.engine.start import Parts
from truegate.errors import UserError
from truegate.types import Request, SamplingParams

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["a", "好"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)


class Babbler(Toy):
    """Wants anything but JSON: logits_V = 3 sin((hash + 1/2) (v + 1)) over a real vocabulary."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def logits(self, hidden_MD):
        return 3 * torch.sin((hidden_MD.float() + 0.5) * torch.arange(1, self.vocab_size + 1))


def make_engine(tokenizer, overlap=False, num_pages=400):
    config = EngineConfig(
        device="cpu", dtype="float32", page_size=4, max_model_len=400, max_running=8, chunked_prefill_tokens=64,
        overlap=overlap,
    )  # fmt: skip
    vocab_size = tokenizer.vocab_size + 13  # checkpoints pad their embeddings
    parts = Parts(
        config=config, model=Babbler(vocab_size), tokenizer=tokenizer, eos_token_ids=tokenizer.eos_token_ids,
        num_pages=num_pages,
    )  # fmt: skip
    return Engine(config, parts)


def answers(engine):
    tokens, ends = {}, {}
    while engine.has_work:
        for output in engine.step():
            key = (output.request_id, output.index)
            tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason:
                ends[key] = output.finish_reason
    return tokens, ends


@pytest.mark.parametrize("overlap", [False, True])
def test_every_constrained_answer_in_a_mixed_batch_obeys_its_schema(tokenizer, overlap):
    engine = make_engine(tokenizer, overlap)
    integer = json.dumps({"type": "integer", "minimum": 10, "maximum": 12})
    for number in range(6):
        schema = (PERSON, integer, None)[number % 3]
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=300, json_schema=schema, n=1 + number % 2)
        engine.add(Request(request_id=str(number), prompt_token_ids=(5, 6), params=params))
    tokens, ends = answers(engine)
    for (name, index), ids in tokens.items():
        if int(name) % 3 == 2:
            continue
        assert ends[(name, index)] == "stop"
        value = json.loads(tokenizer.decode(ids))
        if int(name) % 3 == 1:
            assert value in (10, 11, 12)
        else:
            assert set(value) == {"name", "age", "tags"}
            assert len(value["name"]) <= 5
            assert 0 <= value["age"] <= 99
            assert set(value["tags"]) <= {"a", "好"}


def test_a_constrained_answer_survives_preemption_unchanged(tokenizer):
    def run(num_pages, others):
        engine = make_engine(tokenizer, num_pages=num_pages)
        for number in range(others):
            params = SamplingParams(temperature=1.0, max_tokens=300, ignore_eos=True)
            engine.add(Request(request_id=f"o{number}", prompt_token_ids=(7,) * 30, params=params))
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=300, json_schema=PERSON)
        engine.add(Request(request_id="x", prompt_token_ids=(5, 6), params=params))
        tokens, _ = answers(engine)
        return tokens[("x", 0)], engine.stats().preemptions

    alone, _ = run(400, 0)
    crowded, preemptions = run(1 + 100, 3)
    assert preemptions > 0
    assert crowded == alone


def test_draft_masks_are_the_masks_of_walking_the_draft_and_leave_the_state(tokenizer):
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammar = grammars.compile(json.dumps({"type": "integer"}))
    draft = [tokenizer.encode(digit)[0] for digit in "123"]
    together = grammar.draft_masks(draft, tokenizer.vocab_size)
    walked = []
    walker = grammar.copy()
    for token in [*draft, None]:
        walked.append(walker.masks([walker], tokenizer.vocab_size)[0])
        if token is not None:
            assert walker.advance(token) is None
    assert torch.equal(together, torch.stack(walked))
    assert torch.equal(grammar.masks([grammar], tokenizer.vocab_size)[0], walked[0])


@pytest.mark.parametrize(
    "schema",
    [
        "{not json",
        '{"type": "nonsense"}',
        '{"type": "string", "not": {"const": "a"}}',
        '{"allOf": [{"type": "integer"}, {"type": "string"}]}',
        '{"type": "array", "uniqueItems": true}',
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_when_added(tokenizer, schema):
    engine = make_engine(tokenizer)
    params = SamplingParams(json_schema=schema)
    with pytest.raises(UserError, match="json_schema"):
        engine.add(Request(request_id="x", prompt_token_ids=(5,), params=params))
    assert not engine.has_work


def test_a_schema_with_min_tokens_or_ignored_end_is_refused(tokenizer):
    engine = make_engine(tokenizer)
    for extra in ({"min_tokens": 3}, {"ignore_eos": True}):
        with pytest.raises(UserError, match="json_schema"):
            engine.add(
                Request(request_id="x", prompt_token_ids=(5,), params=SamplingParams(json_schema=PERSON, **extra))
            )
