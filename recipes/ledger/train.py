"""Train a ledger model on one GPU for a given number of minutes, then save it as a Hugging Face checkpoint.

The learning rate follows the clock, not a step count: it rises over the first 2 %, holds, and falls to 0 over the last
part, the cooldown. The minutes count from the start of the process, compilation included, so that its end is known.
Matrices are trained with Muon (orthogonalised momentum), everything else with Adam.

In a share of the short documents (the dose) the shared experts' output is multiplied, in every layer, by one factor of
the document's own, even between SCALE_LOW and 1: short answers learn to do with less of the shared experts, long ones
do not.
"""

import argparse
import json
import math
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from documents import CLOSING, ID_MASK, LEARN, SHORT, START
from export import load_checkpoint, save_checkpoint
from model import Documents, Ledger, MoE, Shape
from torch import Tensor, nn

MAX_DOCUMENTS = 512  # per batch; the list of starts is padded to one length so that shapes stay fixed
LONGEST = 2560  # upper bound of a document's length, fixed for the same reason
CLOSING_WEIGHT = 4.0  # of the last two lines of an answer in the loss
SCALE_LOW = 0.3
DATA_SECONDS = 90  # how long to wait for the first stream file


class Muon(torch.optim.Optimizer):
    """Momentum brought to the nearest orthogonal matrix by five Newton-Schulz steps; stacks of matrices one by one."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape[-2:], []).append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]).reshape(-1, *shape))
                update = orthogonal(torch.cat(updates)) * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, u in zip(params, update.split([len(u) for u in updates]), strict=True):
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.add_(u.view_as(p).to(p.dtype), alpha=-group["lr"])


def orthogonal(g: Tensor) -> Tensor:
    x = g.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide else x.mT


STARTED = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A stream of T tokens: its targets (-100 where nothing is learned), each token's weight as a target, starts and
    positions of its documents (see Documents), and a draw: even in [0, 1) for a short document, 1 for another."""

    ids_T: Tensor
    first_T: Tensor
    second_T: Tensor
    weight_T: Tensor
    position_T: Tensor
    start_N: Tensor
    draw_T: Tensor

    def to(self, device: str) -> "Batch":
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**{name: x.to(device, non_blocking=True) for name, x in tensors.items()})

    def documents(self, dose: float) -> Documents:
        """A share `dose` of the short documents gets a factor of its own in SCALE_LOW .. 1, the rest 1."""
        scale_T = SCALE_LOW + (1 - SCALE_LOW) * self.draw_T / max(dose, 1e-9)
        scale_T = torch.where(self.draw_T < dose, scale_T, 1.0)
        return Documents(position_T=self.position_T, start_N=self.start_N, shared_scale_T=scale_T, longest=LONGEST)


def batches(folder: Path, tokens: int, device: str, seed: int) -> Iterator[Batch]:
    """Endless batches, prepared by a thread: files new in the folder first, then old ones again in random order."""
    ready: queue.Queue[Batch | Exception] = queue.Queue(8)
    rng = np.random.default_rng(seed)

    def produce() -> None:
        known: list[Path] = []
        while True:
            new = sorted(set(folder.glob("*.u16")) - set(known))
            if not known and not new:
                if time.monotonic() - STARTED > DATA_SECONDS:
                    raise RuntimeError(f"no stream file in {folder} after {DATA_SECONDS} s")
                time.sleep(0.1)
                continue
            known += new
            rng.shuffle(new)
            for file in new or [known[rng.integers(len(known))]]:
                stream = np.fromfile(file, dtype=np.uint16)
                for begin in range(0, len(stream) - tokens + 1, tokens):
                    ready.put(prepare(stream[begin : begin + tokens], rng, pin=device == "cuda"))

    def produce_or_say_why() -> None:
        try:
            produce()
        except Exception as error:
            ready.put(error)

    threading.Thread(target=produce_or_say_why, daemon=True).start()
    while True:
        batch = ready.get()
        if isinstance(batch, Exception):
            raise batch
        yield batch.to(device)


def prepare(marked: np.ndarray, rng: np.random.Generator, pin: bool) -> Batch:
    """One batch of a marked stream, on the host."""
    tokens = len(marked)
    ids, start = (marked & ID_MASK).astype(np.int64), (marked & START) > 0
    learned = (marked & LEARN) > 0
    learned[: np.argmax(start)] = False  # the document cut at the batch's head has lost its question
    start[0] = True
    begin = start.nonzero()[0]
    if len(begin) >= MAX_DOCUMENTS:
        raise ValueError(f"{len(begin)} documents in a batch: raise MAX_DOCUMENTS above {MAX_DOCUMENTS}")
    if (longest := np.diff(begin, append=tokens).max()) > LONGEST:
        raise ValueError(f"a document has {longest} tokens: raise LONGEST above {LONGEST}")
    starts = np.full(MAX_DOCUMENTS, tokens, dtype=np.int32)
    starts[: len(begin)] = begin
    index = np.arange(tokens)
    position = index - np.maximum.accumulate(np.where(start, index, 0))
    draws = np.where(marked[begin] & SHORT, rng.random(len(begin)), 1.0)
    draw = np.repeat(draws, np.diff(begin, append=tokens)).astype(np.float32)
    weight = np.where(marked & CLOSING, CLOSING_WEIGHT, 1.0).astype(np.float32)
    first, second = np.full(tokens, -100), np.full(tokens, -100)
    first[:-1] = np.where(learned, ids, -100)[1:]
    second[:-2] = np.where(learned & (position >= 2), ids, -100)[2:]
    arrays = {"ids_T": ids, "first_T": first, "second_T": second, "weight_T": weight, "position_T": position,
              "start_N": starts, "draw_T": draw}  # fmt: skip
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Batch(**{name: x.pin_memory() if pin else x for name, x in tensors.items()})


def optimizers(model: Ledger, muon_lr: float, adam_lr: float, decay: float) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for name, p in model.named_parameters():
        inside = name.startswith(("blocks.", "mtp.")) and p.ndim >= 2 and not name.endswith("router")
        (matrices if inside or name == "eh_proj" else others).append(p)
    if muon_lr == 0:
        return [torch.optim.AdamW(matrices + others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=decay, fused=True)]
    routers = [p for p in others if p.shape == model.blocks[-1].mlp.router.shape]
    others = [p for p in others if p.shape != model.blocks[-1].mlp.router.shape]
    groups = [{"params": others, "lr": adam_lr}, {"params": routers, "lr": adam_lr / 4}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [Muon(matrices, lr=muon_lr, decay=decay), adam]


def learning_rate(done: float, cooldown: float) -> float:
    """Fraction of the peak rate when `done` of the time is over and it falls over the last `cooldown` of it."""
    return min(1.0, done / 0.02, (1.0 - done) / cooldown)


def losses(model: Ledger, batch: Batch, dose: float, device: str) -> tuple[Tensor, Tensor]:
    """Weighted mean cross entropy of the next token and of the one after it, over the learned tokens."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        both = model(batch.ids_T, batch.documents(dose))
        weights = (batch.weight_T.roll(-1) * (batch.first_T >= 0), batch.weight_T.roll(-2) * (batch.second_T >= 0))
        first, second = (
            (F.cross_entropy(logits.float(), target_T, ignore_index=-100, reduction="none") * weight_T).sum()
            / weight_T.sum()
            for logits, target_T, weight_T in zip(both, (batch.first_T, batch.second_T), weights, strict=True)
        )
    return first, second


def compile_blocks(model: Ledger, batch: Batch, device: str) -> None:
    """Compile every block by one forward and backward."""
    for block in (*model.blocks, model.mtp):
        block.compile(dynamic=False)
    sum(losses(model, batch, 0.5, device)).backward()
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if isinstance(module, MoE):
            module.load.zero_()


def train(model: Ledger, args: argparse.Namespace) -> dict[str, object]:
    device = args.device
    data = batches(args.data, args.batch_tokens, device, args.seed)
    opts = optimizers(model, args.muon_lr, args.adam_lr, args.decay)
    peaks = [[group["lr"] for group in opt.param_groups] for opt in opts]
    moes = [module for module in model.modules() if isinstance(module, MoE)]
    if args.compile:
        compile_blocks(model, next(data), device)
    began, step, history, loads, cooling = time.monotonic(), 0, [], [], False
    end = STARTED + 60 * args.minutes
    print(args.name, f"trains for {end - began:.0f} s, set up in {began - STARTED:.0f} s", flush=True)
    while True:
        done = (time.monotonic() - began) / (end - began)
        if done >= 1:
            break
        if not cooling and done >= 1 - args.cooldown:
            cooling = True
            print(args.name, f"cools down from step {step}", flush=True)
            if args.base:
                save_checkpoint(model, args.tokenizer, args.base)
        loss, loss2 = losses(model, next(data), args.cooldown_dose if cooling else args.dose, device)
        (loss + args.mtp_weight * loss2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt, peak in zip(opts, peaks, strict=True):
            for group, lr in zip(opt.param_groups, peak, strict=True):
                group["lr"] = lr * learning_rate(done, args.cooldown)
            opt.step()
            opt.zero_grad(set_to_none=True)
        loads = [(moe.load / moe.load.mean()).tolist() for moe in moes] if step % 200 == 199 or done > 0.99 else loads
        for moe in moes:
            moe.balance(args.balance_rate * min(1.0, (1 - done) / args.cooldown))
        step += 1
        if step % 200 == 0:
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"the loss is {loss.item()} at step {step}")
            history.append((step, round(done, 3), round(loss.item(), 5), round(loss2.item(), 5)))
            print(args.name, *history[-1], flush=True)
    seconds = time.monotonic() - began
    return {
        "args": {name: str(value) for name, value in vars(args).items()},
        "shape": model.s.as_dict(),
        "steps": step,
        "tokens": step * args.batch_tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(step * args.batch_tokens / seconds),
        "loss": round(loss.item(), 6),
        "mtp_loss": round(loss2.item(), 6),
        "load": [[round(x, 3) for x in moe_load] for moe_load in loads],
        "history": history,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="ledger")
    parser.add_argument("--data", required=True, type=Path, help="folder of documents.py")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder of tokenizer.py")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--shape", default="{}", help="JSON of sizes that differ from model.Shape")
    parser.add_argument("--minutes", type=float, default=7.0, help="from the start of this process")
    parser.add_argument("--init", type=Path, help="checkpoint folder to start from")
    parser.add_argument("--cooldown", type=float, default=0.5, help="share of the time over which the rate falls to 0")
    parser.add_argument("--base", type=Path, help="also save the model as it is when the cooldown begins")
    parser.add_argument("--dose", type=float, default=0.0, help="share of short documents that are scaled")
    parser.add_argument("--cooldown-dose", type=float, default=0.0, help="the same in the cooldown")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--muon-lr", type=float, default=0.02, help="0: Adam for everything")
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--mtp-weight", type=float, default=0.2)
    parser.add_argument("--balance-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = load_checkpoint(args.init).train() if args.init else Ledger(Shape(**json.loads(args.shape)))
    model = model.to(args.device)
    print(args.name, f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    figures = train(model, args)
    print(args.name, {k: v for k, v in figures.items() if k not in ("args", "shape", "history", "load")}, flush=True)
    save_checkpoint(model, args.tokenizer, args.out)
    (args.out / "log.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
