"""Makes benchmarks/schedules.py importable, and a small byte-level tokenizer folder."""

import json
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """Byte-level BPE with every byte, merges of English and some Chinese, special tokens and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["the cat sat on the mat and the dog ran", '{"name": "Ann", "age": 12, "ok": true}', "你好世界 你好"] * 40
    backend.train_from_iterator(corpus, trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    from truegate.engine.tokenizer import Tokenizer

    return Tokenizer(tokenizer_folder)
