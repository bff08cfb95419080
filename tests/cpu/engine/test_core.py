"""The engine on toy models: how answers end, what is asked about them, and that nothing depends on the batch."""

import itertools

import pytest
import torch
from schedules import EOS, VOCAB, Toy, expected

from truegate.config import EngineConfig
from truegate.engine import sampler
from truegate.engine.core import Engine
from truegate.engine.start import Parts
from truegate.errors import UserError
from truegate.types import Request, SamplingParams


class Soft(Toy):
    """Every token has a chance: logits_V = 3 sin((hash + 1/2) (v + 1))."""

    def logits(self, hidden_MD):
        return 3 * torch.sin((hidden_MD.float() + 0.5) * torch.arange(1, VOCAB + 1))


class Script(Toy):
    """Writes a fixed text: the token after position p is script[p]."""

    def __init__(self, script, vocab_size):
        super().__init__()
        self.script, self.vocab_size = torch.tensor(script), vocab_size

    def forward(self, batch, pool):
        return self.script[batch.positions_T][:, None]

    def logits(self, hidden_MD):
        return torch.zeros(hidden_MD.shape[0], self.vocab_size).scatter_(1, hidden_MD, 10.0)


def make_engine(model=None, tokenizer=None, *, eos=(EOS,), num_pages=200, **options):
    settings = {"page_size": 4, "max_model_len": 128, "max_running": 8, "chunked_prefill_tokens": 16, "overlap": False}
    config = EngineConfig(device="cpu", dtype="float32", **{**settings, **options})
    parts = Parts(config=config, model=model or Soft(), tokenizer=tokenizer, eos_token_ids=eos, num_pages=num_pages)
    return Engine(config, parts)


def request(name, prompt=(5, 6, 7), **params):
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))


def run(engine):
    """Everything each answer got: {(request, index): [outputs]}."""
    got = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault((output.request_id, output.index), []).append(output)
    return got


def tokens_of(outputs):
    return list(itertools.chain.from_iterable(one.token_ids for one in outputs))


SAMPLED = {"temperature": 1.0, "seed": 42, "max_tokens": 40, "ignore_eos": True, "top_p": 0.95, "presence_penalty": 0.3}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_seeded_answer_is_the_same_alone_in_a_crowd_and_under_preemption(overlap):
    prompt = range(10, 30)
    single = make_engine()
    single.add(request("x", prompt, **SAMPLED))
    alone = tokens_of(run(single)[("x", 0)])
    crowd = make_engine(overlap=overlap)
    for number in range(6):
        crowd.add(request(f"other{number}", range(1, 4 + number), temperature=0.8, max_tokens=30, n=1 + number % 2))
    crowd.add(request("x", prompt, **SAMPLED))
    assert tokens_of(run(crowd)[("x", 0)]) == alone
    tight = make_engine(overlap=overlap, num_pages=1 + 32, prefix_cache=False)
    for number in range(3):
        tight.add(request(f"other{number}", range(1, 20), max_tokens=60, ignore_eos=True))
    tight.add(request("x", prompt, **SAMPLED))
    assert tokens_of(run(tight)[("x", 0)]) == alone
    assert tight.stats().preemptions > 0


def test_n_answers_differ_by_index_and_repeat_by_seed():
    first, second = make_engine(), make_engine(overlap=True)
    for engine in (first, second):
        engine.add(request("x", n=4, temperature=1.0, seed=9, max_tokens=12, ignore_eos=True))
    one, other = run(first), run(second)
    assert {key: tokens_of(value) for key, value in one.items()} == {k: tokens_of(v) for k, v in other.items()}
    assert len({tuple(tokens_of(value)) for value in one.values()}) == 4


def test_answers_without_a_seed_differ_between_requests():
    engine = make_engine()
    for name in "ab":
        engine.add(request(name, temperature=1.0, max_tokens=12, ignore_eos=True))
    got = run(engine)
    assert tokens_of(got[("a", 0)]) != tokens_of(got[("b", 0)])


def test_the_second_of_n_answers_finds_the_prompt_in_the_prefix_cache():
    engine = make_engine()
    engine.add(request("x", range(1, 42), n=3, temperature=1.0, max_tokens=3))
    got = run(engine)
    assert [got[("x", index)][0].cached_tokens for index in range(3)] == [0, 40, 40]
    assert engine.stats().prefix_hit_tokens == 80


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_are_the_models_under_chunks_cache_hits_and_batching(overlap, monkeypatch):
    monkeypatch.setattr(sampler, "SLICE", 5 * VOCAB)  # chunks of 16 rows come in four pieces
    prompt = [3 + (7 * i) % 50 for i in range(50)]
    engine = make_engine(overlap=overlap)
    engine.add(request("warm", prompt, temperature=0.0, max_tokens=2))
    run(engine)
    engine.add(request("other", range(1, 30), temperature=1.0, max_tokens=20))
    engine.add(
        request("x", prompt, temperature=0.0, max_tokens=5, prompt_logprobs=4, logprobs=2, logprob_token_ids=[7])
    )
    first, *rest = run(engine)[("x", 0)]
    assert not any(one.prompt_logprobs for one in rest)
    assert first.cached_tokens == 0  # what is asked about must be computed
    assert first.prompt_logprobs[0] is None
    from schedules import _hash

    hashes = torch.from_numpy(_hash(torch.tensor(prompt).numpy()))[:, None]
    truth = torch.log_softmax(Soft().logits(hashes).double(), -1)
    for position in range(1, len(prompt)):
        entry = first.prompt_logprobs[position]
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(truth[position - 1, prompt[position]].item(), abs=1e-5)
        assert [token for token, _ in entry.top] == truth[position - 1].topk(4).indices.tolist()
        assert entry.listed[0] == (7, pytest.approx(truth[position - 1, 7].item(), abs=1e-5))
    assert first.logprobs[0].logprob == pytest.approx(truth[-1].max().item(), abs=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it(tokenizer, overlap):
    script = [token for character in "the cat sat on the mat" for token in tokenizer.encode(character)]
    engine = make_engine(Script(script, tokenizer.vocab_size), tokenizer, eos=tokenizer.eos_token_ids, overlap=overlap)
    engine.add(request("x", [2], temperature=0.0, max_tokens=20, stop=["cat", "t s"]))
    engine.add(request("y", [2], temperature=0.0, max_tokens=20, stop=["cat", "t s"], min_tokens=8))
    engine.add(request("z", [2], temperature=0.0, max_tokens=9))
    got = run(engine)
    last = got[("x", 0)][-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "cat")
    assert tokenizer.decode(tokens_of(got[("x", 0)])) == "the cat"
    assert (got[("y", 0)][-1].finish_reason, len(tokens_of(got[("y", 0)]))) == ("length", 20)
    assert got[("z", 0)][-1].finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_end_of_sequence_stop_ids_and_min_tokens(tokenizer, overlap):
    script = [9, 9, 9, 30, 9, 1, 9, 9, 9, 9, 9, 9, 9]
    engine = make_engine(Script(script, tokenizer.vocab_size), tokenizer, eos=tokenizer.eos_token_ids, overlap=overlap)
    engine.add(request("eos", [2], temperature=0.0))
    engine.add(request("id", [2], temperature=0.0, stop_token_ids=[30]))
    engine.add(request("ignored", [2], temperature=0.0, ignore_eos=True, max_tokens=10))
    engine.add(request("minimum", [2], temperature=0.0, min_tokens=7, max_tokens=10))
    got = run(engine)
    ends = {name: (one[-1].finish_reason, one[-1].stop_reason, tokens_of(one)) for (name, _), one in got.items()}
    assert ends["eos"] == ("stop", None, script[:6])
    assert ends["id"] == ("stop", 30, script[:4])
    assert ends["ignored"] == ("length", None, script[:10])
    assert len(ends["minimum"][2]) == 10
    assert 1 not in ends["minimum"][2]


def test_a_prompt_that_leaves_no_room_an_empty_one_and_a_wrong_id_are_refused():
    engine = make_engine()
    wrong = {"empty": [], "128 tokens": [1] * 128, f"token {VOCAB} is": [VOCAB], "token 1.0 is": [1.0]}
    for message, prompt in wrong.items():
        with pytest.raises(UserError, match=message):
            engine.add(request("x", prompt))
    engine.add(request("x"))
    with pytest.raises(UserError, match="in use"):
        engine.add(request("x"))
    with pytest.raises(UserError, match="routed experts"):
        engine.add(request("y", return_routed_experts=True))
    with pytest.raises(UserError, match="tokenizer"):
        engine.add(request("y", stop=["a"]))


def test_an_answer_never_outgrows_max_model_len():
    engine = make_engine(Toy())
    prompt = [token % VOCAB for token in range(120)]
    engine.add(request("x", prompt, temperature=0.0, max_tokens=500, ignore_eos=True))
    outputs = run(engine)[("x", 0)]
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    assert outputs[-1].finish_reason == "length"
    assert (tokens_of(outputs), 8) == (expected(prompt, params, 128)[0], len(tokens_of(outputs)))


@pytest.mark.parametrize("overlap", [False, True])
def test_cancelled_answers_end_once_with_abort_and_leave_nothing(overlap):
    engine = make_engine(Toy(), overlap=overlap)
    engine.add(request("x", n=2, temperature=0.0, ignore_eos=True, max_tokens=50))
    engine.add(request("y", temperature=0.0, ignore_eos=True, max_tokens=5))
    engine.step()
    engine.step()
    engine.cancel("x")
    engine.cancel("x")
    engine.cancel("nobody")
    got = run(engine)
    assert [one.finish_reason for one in got[("x", 0)] if one.finish_reason] == ["abort"]
    assert [one.finish_reason for one in got[("x", 1)] if one.finish_reason] == ["abort"]
    assert got[("y", 0)][-1].finish_reason == "length"
    assert engine.stats().pages_used == 0


def test_shutdown_drains_or_aborts_and_then_refuses():
    for drain, reason in ((True, "length"), (False, "abort")):
        engine = make_engine(Toy(), overlap=True)
        for number in range(12):
            engine.add(request(str(number), temperature=0.0, ignore_eos=True, max_tokens=4))
        engine.step()
        ends = [one.finish_reason for one in engine.shutdown(drain=drain) if one.finish_reason]
        assert ends == [reason] * 12
        with pytest.raises(UserError, match="shutting down"):
            engine.add(request("late"))


def test_stats_count_what_happened():
    engine = make_engine(Toy())
    for name in "ab":
        engine.add(request(name, range(1, 21), temperature=0.0, ignore_eos=True, max_tokens=4))
        run(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (40, 16)
    assert (stats.prompt_tokens, stats.generated_tokens) == (20 + 4, 4 + 4)
    assert stats.pages_cached > 0
    assert engine.flush_cache() == stats.pages_cached
    assert engine.stats().pages_cached == 0
