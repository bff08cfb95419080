"""Pieces of text, joined, are the text; characters come whole; nothing passes a stop string."""

import random

import pytest

from truegate.engine.detokeniser import Detokeniser
from truegate.errors import UserError
from truegate.types import StepOutput

TEXTS = [
    "plain words",
    "naïve café",
    "你好世界, ok",
    "👩‍👩‍👧‍👦 family 🇩🇪",
    "a\ufffdb\ufffd",
    " leading and  double ",
    "\U0001d518\U0001d52b code\n\ttabs",
    "한국어 नमस्ते",
]


@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_are_the_text_and_every_piece_is_whole_characters(tokenizer, text):
    detokeniser = Detokeniser(tokenizer)
    pieces = [detokeniser.feed([token]) for token in tokenizer.encode(text)]
    assert "".join(pieces) + detokeniser.finish() == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


def test_random_token_ids_join_to_what_decoding_them_at_once_gives(tokenizer):
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(chr(rng.choice([65, 97, 0xE9, 0x4F60, 0x1F600, 0x10FFFF])) for _ in range(rng.randint(0, 20)))
        ids = tokenizer.encode(text)
        detokeniser = Detokeniser(tokenizer)
        assert detokeniser.feed(ids) + detokeniser.finish() == text


def test_bytes_that_are_no_text_come_out_as_replacements_and_never_pile_up(tokenizer):
    lone = tokenizer.encode("é")[0]  # the first byte of two, without its second
    ids = [lone] * 100
    detokeniser = Detokeniser(tokenizer)
    early = detokeniser.feed(ids)
    assert len(early) > 50
    assert len(early + detokeniser.finish()) == 100
    assert len(detokeniser._ids) < 40


def test_special_tokens_are_left_out_unless_wanted(tokenizer):
    ids = [*tokenizer.encode("ok"), *tokenizer.eos_token_ids]
    shown, hidden = Detokeniser(tokenizer, skip_special_tokens=False), Detokeniser(tokenizer)
    assert shown.feed(ids) + shown.finish() == "ok<|eos|>"
    assert hidden.feed(ids) + hidden.finish() == "ok"


def test_a_stop_string_is_found_across_token_borders_at_every_split(tokenizer):
    rng = random.Random(2)
    for _ in range(300):
        text = "".join(rng.choice(["ab", "ba", "a", "好", " "]) for _ in range(12))
        stops = tuple("".join(rng.choice("ab好") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
        single = [token for character in text for token in tokenizer.encode(character)]
        for include in (False, True):
            detokeniser = Detokeniser(tokenizer, stop=stops, include_stop=include)
            pieces = []
            for token in single:
                pieces.append(detokeniser.feed([token]))
                assert not any(stop in "".join(pieces) for stop in stops if not include)
                if detokeniser.stopped:
                    break
            got = "".join(pieces) + detokeniser.finish()
            if ends:
                end = min(ends)[0]
                assert detokeniser.stopped is not None
                assert got == (text[:end] if include else text[: end - len(detokeniser.stopped)])
            else:
                assert got == text


def test_the_first_tokens_cannot_stop_an_answer_that_must_be_longer(tokenizer):
    ids = [tokenizer.encode(character)[0] for character in "abab"]
    detokeniser = Detokeniser(tokenizer, stop=("b",), min_tokens=2)
    assert detokeniser.feed(ids) + detokeniser.finish() == "aba"
    assert detokeniser.stopped == "b"


def test_the_chat_template_is_rendered_as_transformers_does(tokenizer, tokenizer_folder):
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    for generate in (False, True):
        theirs = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        assert tokenizer.render_chat(messages, add_generation_prompt=generate) == theirs
    assert tokenizer.encode_chat(messages) == other(theirs, add_special_tokens=False)["input_ids"]
    assert tokenizer.eos_token_ids == (1,)


def test_a_template_that_refuses_is_a_clear_error(tokenizer_folder, tmp_path):
    from truegate.engine.tokenizer import Tokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "x"}])


def test_the_token_that_ended_an_answer_is_no_text_unless_asked_for(tokenizer):
    word, eos = tokenizer.encode("ok"), tokenizer.eos_token_ids[0]

    def text(ids, **end):
        output = StepOutput(request_id="r", index=0, token_ids=tuple(ids), finish_reason="stop", **end)
        both = {
            include: Detokeniser(tokenizer, include_stop=include, skip_special_tokens=False)
            for include in (False, True)
        }
        return [one.take(output) for one in both.values()]

    whole, less = tokenizer.decode(word), tokenizer.decode(word[:-1])
    assert text(word, stop_reason=word[-1]) == [less, whole]  # a stop id
    assert text([*word, eos])[0] == whole  # the end of sequence
    assert text(word) == [whole, whole]  # a schema that is complete: the last token belongs to it
