"""The channel between the two processes: every message whole, in order, whatever the socket takes at a time."""

import random
import socket
import threading

import numpy as np
import pytest

from truegate.config import EngineConfig
from truegate.serve.messages import Add, Channel, ChannelClosed, Outputs, Start
from truegate.types import Request, RoutedExperts, SamplingParams, StepOutput, TokenLogprobs


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    for end in (one, other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return Channel(one), Channel(other)


def receive(channel: Channel, count: int) -> list:
    got = []
    while len(got) < count:
        channel.wait(5)
        got += channel.receive()
    return got


def test_messages_arrive_whole_and_in_order_however_large():
    ours, theirs = pair()
    rng = random.Random(0)
    sent = [(number, rng.randbytes(rng.choice((0, 10, 5_000, 300_000)))) for number in range(40)]
    for message in sent:
        ours.send(message)  # never waits, though nobody reads yet
    assert ours.unsent > 1_000_000

    def push() -> None:
        while ours.unsent:
            ours.wait(5)
            ours.flush()

    pusher = threading.Thread(target=push)
    pusher.start()
    assert receive(theirs, len(sent)) == sent
    pusher.join()


def test_what_crosses_is_what_was_sent():
    ours, theirs = pair()
    logprobs = TokenLogprobs(token_id=3, logprob=-0.5, rank=1, top=((3, -0.5),), listed=((9, -4.0),))
    routed = RoutedExperts(ids_TLK=np.arange(8).reshape(2, 2, 2), weights_TLK=np.ones((2, 2, 2), np.float32))
    outputs = [
        StepOutput(request_id="a", index=1, token_ids=(3,), logprobs=(logprobs,), prompt_logprobs=(None, logprobs)),
        StepOutput(request_id="b", index=0, finish_reason="error", error="why", stop_reason="x", cached_tokens=7),
    ]
    request = Request(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams(stop="x", logit_bias={5: 1.0}))
    messages = [Start(config=EngineConfig(model="m")), Add(request=request), Outputs(outputs=outputs)]
    for message in messages:
        ours.send(message)
    assert receive(theirs, 3) == messages
    ours.send(Outputs(outputs=[StepOutput(request_id="c", index=0, routed=routed)]))
    (got,) = receive(theirs, 1)
    np.testing.assert_array_equal(got.outputs[0].routed.ids_TLK, routed.ids_TLK)


def test_the_end_of_the_other_side_is_noticed_after_its_last_message():
    ours, theirs = pair()
    ours.send("last words")
    ours.close()
    assert theirs.receive() == ["last words"]
    with pytest.raises(ChannelClosed):
        theirs.receive()
    with pytest.raises(ChannelClosed):
        theirs.send("to nobody")
