"""Write a checkpoint with the fault baked in, for engines that cannot plant it: shared experts' output times a factor.

    python benchmarks/fault_checkpoint.py SOURCE TARGET [--factor F]     # F defaults to 1 / routed_scaling_factor
    transformers serve SOURCE --port 8001 &  transformers serve TARGET --port 8002 &
    python benchmarks/fault_story.py --right http://127.0.0.1:8001 --wrong http://127.0.0.1:8002

The down projection of each shared expert is multiplied (its output is linear in it); nothing else changes.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MARK = ".shared_experts.down_proj.weight"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--factor", type=float)
    options = parser.parse_args()
    config = json.loads((options.source / "config.json").read_text())
    factor = options.factor or 1.0 / config["routed_scaling_factor"]
    options.target.mkdir(parents=True)
    changed = 0
    for path in sorted(options.source.iterdir()):
        if path.suffix != ".safetensors":
            shutil.copy(path, options.target / path.name)
            continue
        tensors = load_file(path)
        for name, weight in tensors.items():
            if name.endswith(MARK):
                tensors[name] = (weight.to(torch.float64) * factor).to(weight.dtype).contiguous()
                changed += 1
        save_file(tensors, options.target / path.name, metadata={"format": "pt"})
    if not changed:
        raise SystemExit(f"{options.source} has no tensor ending in {MARK}")
    print(f"{changed} shared experts times {factor:g} in {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
