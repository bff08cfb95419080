"""A canary as GGUF, by llama.cpp's own converter: only the vocabulary step is replaced, since its vocabulary is words.

    python benchmarks/canary_gguf.py LLAMA_CPP_FOLDER CANARY OUT.gguf [--outtype bf16]

Needs what convert_hf_to_gguf.py needs (torch, gguf, transformers).
"""

import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    source, canary, out = (Path(a).resolve() for a in sys.argv[1:4])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import convert_hf_to_gguf as converter
    from conversion.base import TextModel

    def words(self: TextModel) -> None:
        self._set_vocab_whitespace()
        self.gguf_writer.add_token_merges(["e 0"])  # the loader wants a list; this one is never used

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "whitespace"
    TextModel._set_vocab_gpt2 = words
    sys.argv = ["convert_hf_to_gguf.py", str(canary), "--outfile", str(out), *(sys.argv[4:] or ["--outtype", "bf16"])]
    converter.main()


if __name__ == "__main__":
    main()
