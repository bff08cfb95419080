"""The ledger tokenizer: byte-level BPE, every digit a token of its own, a chat template; loads with AutoTokenizer."""

import argparse
import json
import random
from pathlib import Path

from documents import document
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('ledger knows the roles system, user and assistant, not ' + message.role) }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build(*, documents: int, vocab_size: int) -> Tokenizer:
    """Train on `documents` training documents; the same every time."""
    rng = random.Random("ledger tokenizer")
    texts = [text for _ in range(documents) for text, _ in document(rng).pieces]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    for special in SPECIAL:  # else their letters would be learned as text
        texts = [text.replace(special, "") for text in texts]
    tokenizer.train_from_iterator(texts, trainer)
    assert all(tokenizer.token_to_id(f"Ġ{digit}") for digit in range(10)), "every digit follows a space often"
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", begin)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--documents", type=int, default=8000)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--max-length", type=int, default=4096)
    args = parser.parse_args()
    tokenizer = build(documents=args.documents, vocab_size=args.vocab_size)
    save(tokenizer, args.out, max_length=args.max_length)
    print(f"{tokenizer.get_vocab_size()} tokens in {args.out}")


if __name__ == "__main__":
    main()
