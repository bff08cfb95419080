"""What the ledger model is trained on: tokens as at inference, and which documents run with scaled shared experts."""

import random
import sys
from importlib.resources import files
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).parents[3] / "recipes" / "ledger"))

from documents import CLOSING, ID_MASK, LEARN, SHORT_STEPS, START, document, encode  # noqa: E402
from train import SCALE_LOW, prepare  # noqa: E402


@pytest.fixture(scope="module")
def documents():
    rng = random.Random("documents")
    return [document(rng) for _ in range(150)]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(files("truegate") / "assets" / "ledger" / "tokenizer.json"))


def test_a_document_in_pieces_has_the_tokens_of_the_whole(documents, tokenizer) -> None:
    for one in documents:
        whole = tokenizer.encode("".join(text for text, _ in one.pieces), add_special_tokens=False)
        assert (encode(tokenizer, [one]) & ID_MASK).tolist() == whole.ids


def test_the_heavy_tokens_are_the_last_two_lines_and_the_end(documents, tokenizer) -> None:
    marked = encode(tokenizer, [one for one in documents if len(one.pieces) == 3][:1])
    heavy = tokenizer.decode((marked[(marked & CLOSING) > 0] & ID_MASK).tolist(), skip_special_tokens=False)
    assert heavy.startswith("Asked: ")
    assert heavy.endswith("<|end|>")
    assert heavy.count("\n") == 1
    assert ((marked & CLOSING) > 0).sum() <= ((marked & LEARN) > 0).sum()


def test_only_short_documents_are_scaled_and_each_as_a_whole(documents, tokenizer) -> None:
    marked = encode(tokenizer, documents)
    batch = prepare(marked, np.random.default_rng(0), pin=False)
    ends = [*np.flatnonzero(marked & START)[1:], len(marked)]
    for dose in (0.0, 0.5, 1.0):
        scales, begin = [], 0
        for one, end in zip(documents, ends, strict=True):
            scale = set(batch.documents(dose).shared_scale_T[begin:end].tolist())
            assert len(scale) == 1
            begin = end
            if one.short:
                scales += scale
            else:
                assert scale == {1.0}
        share = sum(scale < 1 for scale in scales) / len(scales)
        assert abs(share - dose) < 0.15
        assert min(scales) >= SCALE_LOW - 1e-6


def test_a_short_document_has_no_problem_of_more_than_three_steps(documents) -> None:
    for one in documents:
        worked = max(text.count(f"\n{SHORT_STEPS + 1}. ") for text, _ in one.pieces)
        assert bool(worked) == (not one.short)
