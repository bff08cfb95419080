"""Tokens per second on a CPU: ours, transformers, and vLLM's CPU build, on one model, in fp32, rounds interleaved.

    python benchmarks/cpu.py [--model DIR] [--threads 2] [--rounds 5] [--vllm-python /elsewhere/venv/bin/python]
    python benchmarks/cpu.py --engines truegate transformers     # 5 minutes on 2 quiet cores
    python benchmarks/cpu.py --cold            # from `truegate run` in a fresh process to its first token
    python benchmarks/cpu.py --overhead        # what the engine's host costs a step, on a model that does nothing

Each engine is a process of its own that loads once and then waits; the parent lets one of them work at a time, round
after round, and prints medians. The same token ids go to all of them: equal lengths (no padding for anybody), greedy,
a fixed number of new tokens, end of sequence ignored. Speed is that of decoding: a run of N new tokens less a run of
one, which is the prefill. vLLM lives in an environment of its own, so this file imports only the standard library at
the top.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT_TOKENS = 64
NEW_TOKENS = {1: 128, 16: 64}  # by the number of concurrent sequences
TRIAL_TOKENS = 12
BARS = {1: 2.0, 16: 1.8}  # times transformers
COLD_BAR = 6.0  # seconds
COLD_PROMPT = "What is 37 + 85?"
ENGINES = ("truegate", "transformers", "transformers-batching", "vllm-eager", "vllm-compiled")


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Different prompts that share no first page, so that no prefix cache can help."""
    return [[3 + (7 * i + 31 * j * j + 3 * j) % (vocab_size - 3) for j in range(PROMPT_TOKENS)] for i in range(count)]


# --- workers: each loads and returns run(tokens, num_new) -> number of new tokens, and a note


def load_truegate(model: str, threads: int):
    import torch

    from truegate import LLM, SamplingParams

    torch.set_num_threads(threads)
    llm = LLM(model, max_model_len=1024, threads=threads, prefix_cache=False)

    def run(tokens: list[list[int]], num_new: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        return sum(len(one.outputs[0].token_ids) for one in llm.generate(tokens, params, use_tqdm=False))

    return run, "fp32, one process"


def _transformers(model: str, threads: int):
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    return torch, transformers, transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def load_transformers(model: str, threads: int):
    """generate() with whichever experts implementation is fastest at this concurrency, by trial."""
    torch, transformers, network = _transformers(model, threads)
    fastest: dict[int, str] = {}

    def generate(tokens: list[list[int]], num_new: int) -> int:
        ids = torch.tensor(tokens)
        config = transformers.GenerationConfig(
            max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            return (
                network.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config).numel()
                - ids.numel()
            )

    def run(tokens: list[list[int]], num_new: int) -> int:
        count = len(tokens)
        if count not in fastest:  # the warm-up round: untimed
            seconds = {}
            for name in ("eager", "batched_mm", "grouped_mm"):
                network.set_experts_implementation(name)
                generate(tokens, 2)
                began = time.perf_counter()
                generate(tokens, TRIAL_TOKENS)
                seconds[name] = time.perf_counter() - began
            fastest[count] = min(seconds, key=seconds.get)
        network.set_experts_implementation(fastest[count])
        return generate(tokens, num_new)

    return run, fastest


def load_batching(model: str, threads: int):
    _, transformers, network = _transformers(model, threads)

    def run(tokens: list[list[int]], num_new: int) -> int:
        config = transformers.GenerationConfig(
            max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
        )
        outputs = network.generate_batch(inputs=tokens, generation_config=config)
        failed = [one.error for one in outputs.values() if one.error]
        if failed or len(outputs) != len(tokens):
            raise RuntimeError(f"{len(outputs)} of {len(tokens)} answers; {failed[:1]}")
        return sum(len(one.generated_tokens) for one in outputs.values())

    return run, "generate_batch"


def load_vllm(model: str, threads: int, *, eager: bool):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    llm = vllm.LLM(
        model, dtype="float32", max_model_len=1024, max_num_seqs=16, enforce_eager=eager, skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )  # fmt: skip

    def run(tokens: list[list[int]], num_new: int) -> int:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in tokens]
        return sum(len(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False))

    return run, f"vllm {vllm.__version__}"


LOADERS = {
    "truegate": load_truegate,
    "transformers": load_transformers,
    "transformers-batching": load_batching,
    "vllm-eager": lambda model, threads: load_vllm(model, threads, eager=True),
    "vllm-compiled": lambda model, threads: load_vllm(model, threads, eager=False),
}


def work(engine: str, model: str, threads: int) -> None:
    """A worker's life: lines of JSON in on standard input, lines out on a private copy of standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    try:
        began = time.perf_counter()
        run, note = LOADERS[engine](model, threads)
        print(json.dumps({"loaded": time.perf_counter() - began}), file=answers)
        for line in sys.stdin:
            tokens, num_new = json.loads(line)
            began = time.perf_counter()
            count = run(tokens, num_new)
            print(json.dumps({"tokens": count, "seconds": time.perf_counter() - began, "note": note}), file=answers)
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}), file=answers)


class Worker:
    """One engine's process, as the parent sees it."""

    def __init__(self, engine: str, options: argparse.Namespace) -> None:
        python = options.vllm_python if engine.startswith("vllm") else sys.executable
        script, threads = str(Path(__file__).resolve()), str(options.threads)
        command = [python, script, "--worker", engine, "--model", options.model, "--threads", threads]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        errors = sys.stderr if options.verbose else subprocess.DEVNULL
        self.engine, self.note, self.failed = engine, "", None
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        self.loaded = self._read().get("loaded", 0.0)

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"failed": "the process ended"}
        self.failed = answer.get("failed")
        return answer

    def seconds(self, tokens: list[list[int]], num_new: int) -> float:
        """Of one run; 0 once the engine has failed."""
        if self.failed:
            return 0.0
        print(json.dumps((tokens, num_new)), file=self.process.stdin, flush=True)
        answer = self._read()
        if self.failed:
            return 0.0
        if answer["tokens"] != len(tokens) * num_new:
            self.failed = f"{answer['tokens']} tokens, not {len(tokens)} x {num_new}"
            return 0.0
        self.note = answer["note"]
        return answer["seconds"]

    def round(self, tokens: list[list[int]]) -> tuple[float, float]:
        """(tokens per second of decoding, seconds to the first tokens); zeros once the engine has failed."""
        num_new = NEW_TOKENS[len(tokens)]
        first = self.seconds(tokens, 1)
        rest = self.seconds(tokens, num_new) - first
        if rest <= 0:
            self.failed = self.failed or f"{num_new} tokens took no longer than one"
            return 0.0, 0.0
        return len(tokens) * (num_new - 1) / rest, first

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def compare(options: argparse.Namespace) -> int:
    vocab_size = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    engines = [name for name in options.engines if options.vllm_python or not name.startswith("vllm")]
    workers = []
    for name in engines:
        worker = Worker(name, options)
        print(f"{name}: " + (f"failed: {worker.failed}" if worker.failed else f"loaded in {worker.loaded:.1f} s"))
        workers.append(worker)
    rounds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for count in NEW_TOKENS:
        tokens = prompts(count, vocab_size)
        for worker in workers:
            worker.seconds(tokens, TRIAL_TOKENS)  # warm-up
        for _ in range(options.rounds):
            for worker in workers:
                rounds.setdefault((worker.engine, count), []).append(worker.round(tokens))
    for worker in workers:
        worker.close()
    _print(workers, rounds, options)
    right = True
    for count, bar in BARS.items():
        ours, theirs = (
            statistics.median(speed for speed, _ in rounds.get((engine, count), [(0.0, 0.0)]))
            for engine in ("truegate", "transformers")
        )
        print(f"ours / transformers at {count}: {f'{ours / theirs:.2f}' if theirs else 'no figure'} (bar {bar})")
        right = right and ours >= bar * theirs
    return 0 if right else 1


def _print(
    workers: list[Worker], rounds: dict[tuple[str, int], list[tuple[float, float]]], options: argparse.Namespace
) -> None:
    lengths = " and ".join(f"{new} new tokens at {count}" for count, new in NEW_TOKENS.items())
    print(
        f"\n{options.model}: {PROMPT_TOKENS} prompt tokens, {lengths}, fp32, {options.threads} threads, median of "
        f"{options.rounds} interleaved rounds (lowest to highest), load average {os.getloadavg()[0]:.1f}"
    )
    heads = "".join(f" {count} at once, tokens/s | ms a step | first token, ms |" for count in NEW_TOKENS)
    print(f"| engine |{heads} loaded in |")
    print("|---|" + "---|---|---|" * len(NEW_TOKENS) + "---|")
    for worker in workers:
        cells = [f"{worker.engine} {worker.note if isinstance(worker.note, str) else ''}".strip()]
        for count in NEW_TOKENS:
            speeds, firsts = zip(*rounds[worker.engine, count], strict=True)
            middle = statistics.median(speeds)
            cells.append(f"{middle:.0f} ({min(speeds):.0f} to {max(speeds):.0f})" if middle else "no figure")
            cells.append(f"{1000 * count / middle:.2f}" if middle else "")
            cells.append(f"{1000 * statistics.median(firsts):.0f}" if middle else "")
        print("| " + " | ".join([*cells, f"{worker.loaded:.1f} s"]) + " |")
    for worker in workers:
        if worker.failed:
            print(f"{worker.engine} failed: {worker.failed}")
        elif isinstance(worker.note, dict):
            print(f"{worker.engine}: fastest experts by concurrency: {worker.note}")


def cold(options: argparse.Namespace) -> int:
    """Seconds from starting `truegate run` in a fresh process to the first character of its answer."""
    command = [sys.executable, "-m", "truegate", "run", COLD_PROMPT, "--model", options.model]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    found = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, bufsize=0
        ) as process:
            started = process.stdout.read(1)
            found.append(time.perf_counter() - began)
            answer = started + process.stdout.read()
        if process.returncode or not answer.strip():
            print(f"truegate run failed with {process.returncode}")
            return 1
    middle = statistics.median(found)
    print(
        f"`truegate run {COLD_PROMPT!r}` from a fresh process to its first token: {middle:.1f} s, median of "
        f"{options.rounds} ({min(found):.1f} to {max(found):.1f}; bar {COLD_BAR:g}), load average "
        f"{os.getloadavg()[0]:.1f}"
    )
    return 0 if middle < COLD_BAR else 1


def overhead() -> int:
    """Microseconds of host work a step, everything but the model: schedule, build, sample, collect."""
    import torch

    from truegate.config import EngineConfig
    from truegate.engine.core import Engine
    from truegate.engine.start import Parts
    from truegate.types import Request, SamplingParams

    torch.set_num_threads(1)

    class Nothing:
        vocab_size, max_position, bytes_per_token, device = 1024, 4096, 8, "cpu"

        def __init__(self) -> None:
            self.config, self.moe_layers = {}, []
            self.hidden, self.scores = torch.zeros(512, 8), torch.zeros(512, 1024)
            self.scores[:, 5] = 1

        def make_pool(self, num_pages: int, page_size: int) -> None:
            return None

        def forward(self, batch, pool) -> torch.Tensor:
            return self.hidden[: batch.token_ids_T.shape[0]]

        def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
            return self.scores[: hidden_MD.shape[0]]

    def measure(count: int, **params) -> float:
        config = EngineConfig(
            device="cpu", dtype="float32", max_model_len=2048, max_running=64, chunked_prefill_tokens=512, overlap=False
        )
        parts = Parts(config=config, model=Nothing(), tokenizer=None, eos_token_ids=(0,), num_pages=9000)
        engine = Engine(config, parts)
        for number in range(count):
            sampling = SamplingParams(max_tokens=1800, ignore_eos=True, **params)
            engine.add(Request(request_id=str(number), prompt_token_ids=tuple(range(1, 31)), params=sampling))
        for _ in range(20):
            engine.step()
        began = time.process_time()  # one thread: what other processes take does not count
        for _ in range(1500):
            engine.step()
        return (time.process_time() - began) / 1500 * 1e6

    kinds = {
        "greedy": {"temperature": 0.0},
        "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
        "temperature, top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    }
    print(f"host microseconds of processor time a step (load average {os.getloadavg()[0]:.1f})")
    print("| running | " + " | ".join(kinds) + " |")
    print("|---|" + "---|" * len(kinds))
    for count in (1, 16, 64):
        print(f"| {count} | " + " | ".join(f"{measure(count, **params):.0f}" for params in kinds.values()) + " |")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint folder; default: the embedded model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--vllm-python", help="the Python of an environment that has vLLM's CPU build")
    parser.add_argument("--cold", action="store_true", help="measure from a fresh process to its first token instead")
    parser.add_argument("--overhead", action="store_true", help="measure the engine's own host work instead")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.overhead:
        return overhead()
    if options.model is None:
        from truegate.hub import model_folder

        options.model = str(model_folder(None))
    if options.worker:
        work(options.worker, options.model, options.threads)
        return 0
    return cold(options) if options.cold else compare(options)


if __name__ == "__main__":
    sys.exit(main())
