"""The sampler against a float64 reference written as plain loops over one row."""

import math
import random

import numpy as np
import pytest
import torch

from truegate.engine import sampler
from truegate.engine.sampler import Draw, Sampler, _uniform, draw_tokens, kept_tokens
from truegate.errors import UserError
from truegate.sched.sequence import Sequence
from truegate.types import Request, SamplingParams, check_sampling

VOCAB = 37


class State:
    def __init__(self, draw):
        self.draw = draw


def make_sequence(params, prompt=(1, 2, 3), output=(), index=0, key=0, stop_ids=(), slot=0):
    request = Request(request_id="r", prompt_token_ids=tuple(prompt), params=params)
    one = Sequence(request, index, 0, 1000)
    one.tokens += output
    one.slot = slot
    key = params.seed if params.seed is not None else key
    one.state = State(Draw(params, index, len(prompt), stop_ids, key))
    return one


def reference_logits(logits, params, prompt, output, stop_ids):
    """Bias, then penalties, then forbidden ids, on one row of Python floats."""
    row = list(logits)
    for token, value in params.logit_bias:
        row[token] += value
    for token in range(len(row)):
        count = list(output).count(token)
        if token in prompt or count:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        row[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if len(output) < params.min_tokens:
        for token in stop_ids:
            row[token] = -math.inf
    return row


def reference_probs(row, params):
    """Temperature, top_k, top_p of what is left, min_p against the likeliest."""
    scaled = [value / params.temperature for value in row]
    top = max(scaled)
    probs = [math.exp(value - top) for value in scaled]
    order = sorted(range(len(row)), key=lambda token: -probs[token])
    kept = order[: params.top_k] if params.top_k else order
    mass = sum(probs[token] for token in kept)
    nucleus, before = [], 0.0
    for token in kept:
        if params.top_p >= 1 or before < params.top_p:
            nucleus.append(token)
        before += probs[token] / mass
    kept = [token for token in nucleus if probs[token] >= params.min_p * probs[order[0]]]
    total = sum(probs[token] for token in kept)
    return [probs[token] / total if token in kept else 0.0 for token in range(len(row))]


def random_params(rng):
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.8]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.6, 0.1]),
        top_k=rng.choice([0, 0, 1, 5, 36, 500]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
        presence_penalty=rng.choice([0.0, 0.0, 1.1, -0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4, -0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        logit_bias=rng.choice([{}, {3: 5.0, 8: -100.0}, {0: -2.5}]),
        min_tokens=rng.choice([0, 0, 4]),
        seed=rng.getrandbits(63),
        logprobs=rng.choice([None, 0, 5]),
    )


@pytest.mark.parametrize("together", [sampler.SLICE, 2 * VOCAB])
def test_every_row_of_a_mixed_batch_follows_the_reference_distribution(together, monkeypatch):
    monkeypatch.setattr(sampler, "SLICE", together)
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    decided = 0
    for _ in range(150):
        count = rng.randint(1, 6)
        logits = torch.randn(count, VOCAB, generator=generator) * 3
        outputs = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 8))] for _ in range(count)]
        params = [random_params(rng) for _ in range(count)]
        stop_ids = (4, 9)
        sequences = [
            make_sequence(one, output=out, stop_ids=stop_ids, slot=slot)
            for slot, (one, out) in enumerate(zip(params, outputs, strict=True))
        ]
        tokens, _ = Sampler(VOCAB, count, torch.device("cpu")).sample(logits.clone(), sequences)
        for row in range(count):
            adjusted = reference_logits(logits[row].double().tolist(), params[row], (1, 2, 3), outputs[row], stop_ids)
            if params[row].temperature == 0:
                assert adjusted[tokens[row]] == pytest.approx(max(adjusted), abs=1e-5)
                continue
            probs = reference_probs(adjusted, params[row])
            uniform = _uniform(sequences[row].state.draw.key, len(outputs[row]))
            cumulative = np.cumsum(probs)
            if np.min(np.abs(cumulative[:-1] - uniform)) < 1e-5:
                continue  # at a border float32 may go either way
            decided += 1
            assert int(tokens[row]) == int(np.searchsorted(cumulative, uniform, side="right"))
    assert decided > 200


def test_kept_tokens_are_the_references_for_each_truncation_alone_and_together():
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    for _ in range(200):
        params = SamplingParams(
            temperature=1.0,
            top_p=rng.choice([1.0, 0.9, 0.5, 0.01]),
            top_k=rng.choice([0, 1, 2, 7, 300]),
            min_p=rng.choice([0.0, 0.1, 1.0]),
        )
        logits = torch.randn(1, 300, generator=generator) * 2
        kept = kept_tokens(logits - logits.max(), [params])[0]
        assert kept.tolist() == [p > 0 for p in reference_probs(logits[0].double().tolist(), params)]


@pytest.mark.parametrize("size", [8, 100])
def test_equal_tokens_are_kept_by_lowest_id(size):
    logits = torch.full((4, size), -9.0)
    logits[:, 2:7] = 0
    limits = [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "min_p": 1.0}, {"min_p": 1.0}]
    kept = kept_tokens(logits, [SamplingParams(**one) for one in limits])
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [[2, 3], [2, 3, 4], [2, 3, 4], [2, 3, 4, 5, 6]]


def test_a_seed_draws_the_same_token_alone_and_in_any_batch():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, VOCAB, generator=generator)
    params = SamplingParams(temperature=1.0, seed=11, top_p=0.9, frequency_penalty=0.5)
    alone, _ = Sampler(VOCAB, 1, torch.device("cpu")).sample(logits.clone(), [make_sequence(params, output=(5, 5))])
    for trial in range(20):
        others = torch.randn(5, VOCAB, generator=generator)
        rows = [make_sequence(SamplingParams(temperature=0.5, seed=trial + i), slot=i) for i in range(5)]
        rows.insert(trial % 6, make_sequence(params, output=(5, 5), slot=5))
        batch = torch.cat([others[: trial % 6], logits, others[trial % 6 :]])
        together, _ = Sampler(VOCAB, 6, torch.device("cpu")).sample(batch, rows)
        assert together[trial % 6] == alone[0]


def test_draws_follow_the_distribution_and_differ_by_seed_index_and_position():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    keys = [Draw(SamplingParams(seed=seed), 0, 0, (), seed).key for seed in range(count)]
    uniform = [_uniform(key, 7) for key in keys]
    params = [SamplingParams(temperature=1.0)] * count
    tokens = draw_tokens(probs.log().expand(count, 4), params, uniform)
    frequency = torch.bincount(tokens, minlength=4) / count
    assert (frequency - probs).abs().max() < 0.015  # 4 standard deviations are 0.014 at most
    one = Draw(SamplingParams(seed=1), 0, 0, (), 1)
    other = Draw(SamplingParams(seed=1), 1, 0, (), 1)
    assert len({_uniform(one.key, 0), _uniform(one.key, 1), _uniform(other.key, 0)}) == 3


def test_a_uniform_next_to_one_still_finds_a_token_that_is_allowed():
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert int(draw_tokens(logits, [SamplingParams(temperature=1.0)], [uniform])) in (0, 1)
    tiny = draw_tokens(torch.tensor([[3.0, 1e4, 2.0]]), [SamplingParams(temperature=1e-30)], [0.3])
    assert int(tiny) == 1


def test_penalty_counts_follow_a_sequence_that_moves_to_another_slot():
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler = Sampler(VOCAB, 2, torch.device("cpu"))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 3.0, 1.5
    one, output = make_sequence(params, slot=0), []
    for _ in range(4):
        token = int(sampler.sample(logits.clone(), [one])[0])
        one.tokens.append(token)
        output.append(token)
        one.slot = 1 - one.slot  # as after a preemption
        other = make_sequence(params, output=(7,) * 9, slot=1 - one.slot)
        sampler.sample(logits.clone(), [other])
    row, expected = [0.0] * VOCAB, []
    for _ in range(4):
        row = reference_logits(logits[0].tolist(), params, (1, 2, 3), expected, ())
        expected.append(row.index(max(row)))
    assert output == expected


def test_penalty_counts_survive_another_sequence_in_the_same_slot():
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler = Sampler(VOCAB, 1, torch.device("cpu"))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 3.0, 1.5
    one = make_sequence(params)
    one.tokens.append(int(sampler.sample(logits.clone(), [one])[0]))
    sampler.sample(logits.clone(), [make_sequence(params, output=(8,) * 9)])  # while `one` was preempted
    assert (one.tokens[-1], int(sampler.sample(logits.clone(), [one])[0])) == (7, 8)


def test_logprobs_are_of_the_untouched_logits_with_rank_top_and_listed_ids():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    truth = torch.log_softmax(logits.double(), -1)
    params = SamplingParams(temperature=0.0, logprobs=5, logprob_token_ids=[30, 2], logit_bias={6: 50.0})
    rows = [make_sequence(params), make_sequence(SamplingParams(temperature=0.0), slot=1)]
    tokens, described = Sampler(VOCAB, 2, torch.device("cpu")).sample(logits.clone(), rows)
    assert int(tokens[0]) == 6
    (row, one), *rest = described.read().items()
    assert (row, rest) == (0, [])
    assert one.token_id == 6
    assert one.logprob == pytest.approx(truth[0, 6].item(), abs=1e-5)
    assert one.rank == 1 + int((truth[0] > truth[0, 6]).sum())
    values, ids = truth[0].topk(5)
    assert [token for token, _ in one.top] == ids.tolist()
    assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert [token for token, _ in one.listed] == [30, 2]
    assert [value for _, value in one.listed] == pytest.approx(truth[0, [30, 2]].tolist(), abs=1e-5)


def test_plain_greedy_rows_touch_nothing_but_argmax():
    rows = [make_sequence(SamplingParams(temperature=0.0, stop_token_ids=[3])) for _ in range(3)]
    assert all(one.state.draw.plain for one in rows)
    sampler = Sampler(VOCAB, 3, torch.device("cpu"))
    tokens, described = sampler.sample(torch.eye(3, VOCAB), rows)
    assert tokens.tolist() == [0, 1, 2]
    assert described is None


def test_no_more_logits_are_worked_on_together_than_a_slice_and_every_row_keeps_its_own(monkeypatch):
    """A step's logits all at once would need gigabytes; 11 rows in slices of 4."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(11, VOCAB, generator=generator)
    params = [SamplingParams(temperature=0.5 + i, top_p=0.3 + 0.05 * i, top_k=i % 3 * 9) for i in range(11)]
    uniform = torch.rand(11, generator=generator).tolist()
    together = draw_tokens(logits, params, uniform)
    tokens, num_top = logits.argmin(1), [i % 4 for i in range(11)]
    listed, rows = [[3] * (i % 2) for i in range(11)], list(range(11))
    whole = sampler.describe(lambda run: logits[run], tokens, VOCAB, rows, num_top, listed).read()
    monkeypatch.setattr(sampler, "SLICE", 4 * VOCAB + 1)
    asked = []
    inner = sampler._draw_tokens
    monkeypatch.setattr(sampler, "_draw_tokens", lambda part, *rest: asked.append(len(part)) or inner(part, *rest))
    assert torch.equal(draw_tokens(logits, params, uniform), together)
    assert asked == [4, 4, 3]

    def some(run):
        asked.append(len(logits[run]))
        return logits[run]

    assert sampler.describe(some, tokens, VOCAB, rows, num_top, listed).read() == whole
    assert asked == [4, 4, 3] * 2


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-39])
def test_a_temperature_below_what_fp32_holds_draws_the_likeliest(temperature):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    tokens = draw_tokens(logits, [SamplingParams(temperature=temperature)] * 3, [0.0, 0.5, 1 - 2**-53])
    assert torch.equal(tokens, logits.argmax(1))


def test_a_row_of_nan_draws_an_id_of_the_vocabulary_and_leaves_the_others_alone():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    params = [SamplingParams(), SamplingParams(top_k=5, top_p=0.9)]
    alone = draw_tokens(logits[1:], params[1:], [0.3])
    logits[0, 4] = math.nan
    tokens = draw_tokens(logits, params, [0.3, 0.3])
    assert 0 <= int(tokens[0]) < VOCAB
    assert int(tokens[1]) == int(alone)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-39),  # a logit over it is infinite, and the row's probabilities NaN
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", 300),
        ("n", 0),
        ("logprobs", 257),
        ("prompt_logprobs", -1),
        ("seed", 1 << 64),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [VOCAB]),
        ("logprob_token_ids", [-1]),
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1.7: 1.0}),
        ("json_schema", {"type": "object"}),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=field):
        check_sampling(SamplingParams(**{field: value}), vocab_size=VOCAB)


def test_top_k_minus_one_is_all_tokens_as_elsewhere():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
