"""`truegate chat` keeps a conversation, and says what went wrong."""

import pytest
from typer.testing import CliRunner

from truegate.cli import app
from truegate.errors import InvalidRun, UserError
from truegate.serve.terminal import Conversation


def conversation(url: str, **options) -> Conversation:
    return Conversation(url, model=None, api_key=None, system=options.pop("system", None), options=options)


@pytest.mark.parametrize("suffix", ["", "/v1"])
def test_turns_are_kept_and_sent_again(fake, suffix):
    chat = conversation(fake.url + suffix, max_tokens=5)
    assert chat.model == "fake"
    assert "".join(chat.ask("abcd")) == "abcd"
    assert chat.finish_reason == "length"
    assert "".join(chat.ask("x")) == "abcd"  # the scripted engine repeats the whole conversation
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"] * 2


def test_a_refused_or_broken_answer_is_not_kept(fake):
    chat = conversation(fake.url)
    with pytest.raises(InvalidRun, match=r"400.*no spies here"):
        list(chat.ask("SPY"))
    assert chat.turns == []


def test_nobody_there_is_a_clear_line():
    with pytest.raises(UserError, match="truegate serve"):
        conversation("http://127.0.0.1:9")


def test_the_loop_reads_commands_and_leaves(fake):
    typed = "hi\n/system be brief\n/reset\n/help\n\nagain\n/quit\n"
    ended = CliRunner().invoke(app, ["chat", "--url", fake.url, "--max-tokens", "30"], input=typed)
    assert ended.exit_code == 0, ended.output
    assert "hi\nhi\nhi" in ended.output
    assert "be brief" in ended.output  # the system message is part of what is repeated
    assert "/reset forgets" in ended.output
    assert "[ended by: length]" in ended.output


def test_no_threads_at_all_is_refused_not_replaced_by_the_default():
    ended = CliRunner().invoke(app, ["serve", "--threads", "0"])
    assert ended.exit_code != 0
    assert "threads" in ended.output + str(ended.exception)
