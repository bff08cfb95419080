"""The checkpoint that ships: its size, its tensors, its tokenizer, and that transformers loads it and it solves."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from safetensors import safe_open

from truegate.evals.ledger import held_out, problems

FOLDER = Path(str(files("truegate"))) / "assets" / "ledger"
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def loaded():
    return transformers.DeepseekV3ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, output_loading_info=True)


def test_the_weights_stay_within_their_size() -> None:
    shards = sorted(FOLDER.glob("*.safetensors"))
    assert shards
    assert all(shard.stat().st_size <= 16 * 2**20 for shard in shards)
    assert sum(shard.stat().st_size for shard in shards) <= 32e6


def test_every_tensor_is_bfloat16_but_the_selection_bias() -> None:
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for shard in sorted(FOLDER.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                assert index[name] == shard.name
                found[name] = file.get_slice(name).get_dtype()
    assert found.keys() == index.keys()
    for name, dtype in found.items():
        assert dtype == ("F32" if name.endswith("e_score_correction_bias") else "BF16"), name


def test_transformers_misses_nothing_and_ignores_only_the_next_token_layer(loaded) -> None:
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    layer = f"model.layers.{model.config.num_hidden_layers}."
    assert info["unexpected_keys"]
    assert all(name.startswith(layer) for name in info["unexpected_keys"])


def test_config_says_what_other_engines_ask() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["topk_method"] == "noaux_tc"
    assert config["scoring_func"] == "sigmoid"
    assert config["num_nextn_predict_layers"] == 1
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]) == (512, 64, 128)


def test_the_tokenizer_gives_text_back_and_a_token_holds_one_digit_at_most(tokenizer) -> None:
    texts = [text for p in problems(steps=12, count=20, seed=4) for text in (p.question, p.solution)]
    for text in [*texts, "Zoë paid 1,234.50 €\n\tfor 007  things; ok? 日本"]:
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert all(len(re.findall(r"\d", token)) <= 1 for token in tokenizer.get_vocab())


def test_the_chat_template_is_the_one_it_was_trained_on(tokenizer) -> None:
    turns = [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "#### 2"},
        {"role": "user", "content": "2 + 2"},
    ]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    expected = "<|begin|><|system|>Count.<|user|>1 + 1<|assistant|>#### 2<|end|><|user|>2 + 2<|assistant|>"
    assert text == expected
    with pytest.raises(Exception, match="roles system, user and assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_it_solves_short_problems_greedily(loaded, tokenizer) -> None:
    model = loaded[0].eval()
    asked = held_out(steps=2, count=6, seed=77, split="validation")
    tokenizer.padding_side = "left"
    chats = [[{"role": "user", "content": p.question}] for p in asked]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=90, do_sample=False)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text.rpartition("#### ")[2].strip() == p.answer for text, p in zip(texts, asked, strict=True)]
    assert all(right), texts
