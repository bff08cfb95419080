"""From logits to tokens, for a whole batch at once.

The distribution of a row: logits + bias, penalties, forbidden tokens at -inf, / temperature, then top_k, then top_p of
what top_k kept, then min_p relative to the likeliest token. Invariant: a row's token depends on its own logits,
parameters, seed and position only, never on its batch: one uniform number u(seed, index, position) per draw, inverted
through the row's cumulative distribution in vocabulary order. Log-probabilities are of the untouched logits.
M rows, V vocabulary, R rows that draw at random.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from truegate.layers.paged import on_device, to_device
from truegate.sched.sequence import Sequence
from truegate.types import SamplingParams, TokenLogprobs

SLICE = 1 << 22  # logits worked on together; all of a step's would need 40 bytes each: 1.5 GiB at 256 rows of 152,000
_MASK64 = (1 << 64) - 1
_COLDEST = torch.finfo(torch.float32).tiny  # a lower temperature would round to 0 and divide 0 by 0


class Draw:
    """What the sampler keeps of one sequence: its parameters, read once, and whether anything but argmax is needed."""

    __slots__ = (
        "bias_ids",
        "bias_values",
        "counted_slot",
        "grammar",
        "key",
        "listed",
        "min_length",
        "num_top",
        "params",
        "penalised",
        "plain",
        "stop_ids",
        "truncated",
        "wants_logprobs",
    )

    def __init__(self, params: SamplingParams, index: int, prompt_length: int, stop_ids: tuple[int, ...], key: int):
        self.params = params
        self.key = _mix(_mix(key) ^ index)  # of the random numbers
        self.stop_ids = list(stop_ids)
        self.min_length = prompt_length + params.min_tokens if stop_ids else 0
        self.bias_ids = [token for token, _ in params.logit_bias]
        self.bias_values = [value for _, value in params.logit_bias]
        self.penalised = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
        self.truncated = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.wants_logprobs = params.wants_logprobs
        self.num_top = params.logprobs or 0
        self.listed = list(params.logprob_token_ids)
        self.grammar = None
        self.counted_slot = -1  # slot whose penalty counts last were this sequence's; -1: none yet
        self.plain = not (
            params.temperature > 0
            or self.penalised
            or self.bias_ids
            or params.min_tokens
            or params.json_schema is not None
            or self.wants_logprobs
        )


@dataclass(slots=True)
class Described:
    """Log-probabilities of R positions, still on the device: the token, the `k` likeliest, and listed ids."""

    rows: list[int]
    num_top: list[int]
    listed: list[list[int]]
    token_R: torch.Tensor
    logprob_R: torch.Tensor
    rank_R: torch.Tensor
    top_RK: tuple[torch.Tensor, torch.Tensor] | None
    listed_RL: torch.Tensor | None

    def fetch(self) -> None:
        """Start bringing the numbers to the host."""

        def host(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to("cpu", non_blocking=True)

        self.token_R, self.logprob_R, self.rank_R = map(host, (self.token_R, self.logprob_R, self.rank_R))
        self.listed_RL = host(self.listed_RL)
        if self.top_RK is not None:
            self.top_RK = host(self.top_RK[0]), host(self.top_RK[1])

    def read(self) -> dict[int, TokenLogprobs]:
        """On the host, by row."""
        tokens, logprobs, ranks = self.token_R.tolist(), self.logprob_R.tolist(), self.rank_R.tolist()  # sync: results
        values, ids = ([t.tolist() for t in self.top_RK]) if self.top_RK is not None else ([], [])
        listed = self.listed_RL.tolist() if self.listed_RL is not None else []
        return {
            row: TokenLogprobs(
                token_id=tokens[i],
                logprob=logprobs[i],
                rank=ranks[i],
                top=tuple(zip(ids[i][:k], values[i][:k], strict=True)) if k else (),
                listed=tuple(zip(wanted, listed[i], strict=False)) if wanted else (),
            )
            for i, (row, k, wanted) in enumerate(zip(self.rows, self.num_top, self.listed, strict=True))
        }


def slices(num_rows: int, vocab_size: int) -> list[slice]:
    """The rows in runs of about SLICE logits."""
    step = max(1, SLICE // vocab_size)
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def describe(
    logits_of: Callable[[slice], torch.Tensor],
    token_R: torch.Tensor,
    vocab_size: int,
    rows: list[int],
    num_top: list[int],
    listed: list[list[int]],
) -> Described:
    """log softmax(logits) at the token, its rank (1 + how many are likelier), the top k and the listed ids.

    logits_of(some of the R positions) gives their logits_RV, a few positions at a time.
    """
    width, longest = min(max(num_top), vocab_size), max(map(len, listed))
    ids_RL = _index([ids + [0] * (longest - len(ids)) for ids in listed], token_R) if longest else None
    parts: list[list[torch.Tensor]] = []
    for run in slices(len(rows), vocab_size):
        logprobs_RV = torch.log_softmax(logits_of(run).float(), dim=-1)
        logprob_R1 = logprobs_RV.gather(1, token_R[run, None])
        found = [logprob_R1[:, 0], (logprobs_RV > logprob_R1).sum(1) + 1]
        found += logprobs_RV.topk(width, dim=1) if width else ()
        parts.append(found if ids_RL is None else [*found, logprobs_RV.gather(1, ids_RL[run])])
    logprob_R, rank_R, *more = map(torch.cat, zip(*parts, strict=True))
    top_RK = (more[0], more[1]) if width else None
    return Described(rows, num_top, listed, token_R, logprob_R, rank_R, top_RK, more[-1] if longest else None)


class Sampler:
    """Draws one token per row; keeps the token counts of penalised sequences, by slot."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device):
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.device = device
        self._output_buf: torch.Tensor | None = None  # int32 [slots, V]: times each token was generated
        self._prompt_buf: torch.Tensor | None = None  # bool [slots, V]: token occurs in the prompt
        self._counted: list[Draw | None] = [None] * num_slots  # whose counts a slot holds

    def sample(self, logits_MV: torch.Tensor, sequences: list[Sequence]) -> tuple[torch.Tensor, Described | None]:
        """tokens_M and what was asked about them. Row i belongs to sequences[i]."""
        draws: list[Draw] = [one.state.draw for one in sequences]
        if all(draw.plain for draw in draws):
            return logits_MV.argmax(dim=-1), None
        adjusted_MV = self._adjust(logits_MV, sequences, draws)
        tokens_M = adjusted_MV.argmax(dim=-1)
        random = [i for i, draw in enumerate(draws) if draw.params.temperature > 0]
        if random:
            every = len(random) == len(draws)
            rows_R = slice(None) if every else _index(random, adjusted_MV)
            uniform = [_uniform(draws[i].key, sequences[i].length - sequences[i].prompt_length) for i in random]
            tokens_M[rows_R] = draw_tokens(adjusted_MV[rows_R], [draws[i].params for i in random], uniform)
        penalised = [i for i, draw in enumerate(draws) if draw.penalised]
        if penalised:
            slots = _index([sequences[i].slot for i in penalised], tokens_M)
            picked_tokens = tokens_M[_index(penalised, tokens_M)]
            self._output_buf[slots, picked_tokens] += 1
        wanted = [i for i, draw in enumerate(draws) if draw.wants_logprobs]
        if not wanted:
            return tokens_M, None
        rows = [draws[i] for i in wanted]
        num_top, listed = [one.num_top for one in rows], [one.listed for one in rows]
        wanted_R = _index(wanted, tokens_M)
        return tokens_M, describe(
            lambda run: logits_MV[wanted_R[run]], tokens_M[wanted_R], self.vocab_size, wanted, num_top, listed
        )

    def _adjust(self, logits_MV: torch.Tensor, sequences: list[Sequence], draws: list[Draw]) -> torch.Tensor:
        """logits with bias, penalties and forbidden tokens; the argument itself if no row asks for any."""
        biased = [(i, token, value) for i, d in enumerate(draws) for token, value in d.params.logit_bias]
        penalised = [i for i, draw in enumerate(draws) if draw.penalised]
        forbidden = [
            (i, token)
            for i, (one, draw) in enumerate(zip(sequences, draws, strict=True))
            if one.length < draw.min_length
            for token in draw.stop_ids
        ]
        grammars = [i for i, draw in enumerate(draws) if draw.grammar is not None]
        if not (biased or penalised or forbidden or grammars):
            return logits_MV
        adjusted_MV = logits_MV.clone()
        if biased:
            rows, tokens, values = zip(*biased, strict=True)
            index = _index([rows, tokens], logits_MV)
            adjusted_MV.index_put_((index[0], index[1]), _column(values, logits_MV)[:, 0], accumulate=True)
        if penalised:
            self._count([sequences[i] for i in penalised])
            for some in (penalised[run] for run in slices(len(penalised), self.vocab_size)):
                slots, rows_R = _index([[sequences[i].slot for i in some], some], logits_MV)
                adjusted_MV[rows_R] = penalise(
                    adjusted_MV[rows_R],
                    self._output_buf[slots],
                    self._prompt_buf[slots],
                    [draws[i].params for i in some],
                )
        if forbidden:
            index = _index(forbidden, logits_MV).T
            adjusted_MV[index[0], index[1]] = float("-inf")
        if grammars:
            allowed = draws[grammars[0]].grammar.masks([draws[i].grammar for i in grammars], self.vocab_size)
            rows_R = _index(grammars, logits_MV)
            adjusted_MV[rows_R] = adjusted_MV[rows_R].masked_fill(~allowed.to(self.device), float("-inf"))
        return adjusted_MV

    def _count(self, sequences: list[Sequence]) -> None:
        """Make the counts of these sequences' slots theirs, where another's are still there."""
        if self._output_buf is None:
            shape = (self.num_slots, self.vocab_size)
            self._output_buf = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._prompt_buf = torch.zeros(shape, dtype=torch.bool, device=self.device)
        for one in sequences:
            draw = one.state.draw
            if draw.counted_slot == one.slot and self._counted[one.slot] is draw:
                continue
            draw.counted_slot, self._counted[one.slot] = one.slot, draw
            output = np.bincount(one.tokens[one.prompt_length :], minlength=self.vocab_size)
            self._output_buf[one.slot] = torch.from_numpy(output.astype(np.int32)).to(self.device)
            self._prompt_buf[one.slot] = False
            self._prompt_buf[one.slot, torch.tensor(one.tokens[: one.prompt_length], device=self.device)] = True


def penalise(
    logits_RV: torch.Tensor, output_RV: torch.Tensor, prompt_RV: torch.Tensor, params: list[SamplingParams]
) -> torch.Tensor:
    """Repetition over prompt and output (divides positive logits, multiplies negative), then, over the output alone,
    - frequency * count - presence * (count > 0)."""

    def column(name: str) -> torch.Tensor:
        return _column([getattr(one, name) for one in params], logits_RV)

    repetition_R1 = column("repetition_penalty")
    factor_RV = torch.where(logits_RV > 0, 1 / repetition_R1, repetition_R1)
    logits_RV = torch.where(prompt_RV | (output_RV > 0), logits_RV * factor_RV, logits_RV)
    return logits_RV - column("frequency_penalty") * output_RV - column("presence_penalty") * (output_RV > 0)


def draw_tokens(logits_RV: torch.Tensor, params: list[SamplingParams], uniform: list[float]) -> torch.Tensor:
    """token_R: the first whose cumulative probability exceeds uniform * total, after temperature and truncation.

    A row with NaN, which only a broken model gives, has no such token: it draws some id, as argmax would.
    """
    runs = slices(*logits_RV.shape)
    return torch.cat([_draw_tokens(logits_RV[run], params[run], uniform[run]) for run in runs])


def _draw_tokens(logits_RV: torch.Tensor, params: list[SamplingParams], uniform: list[float]) -> torch.Tensor:
    logits_RV = logits_RV.float()
    # the maximum goes first: a tiny temperature must not overflow to inf - inf
    temperature_R1 = _column([max(one.temperature, _COLDEST) for one in params], logits_RV)
    scaled_RV = (logits_RV - logits_RV.amax(1, keepdim=True)) / temperature_R1
    weight_RV = scaled_RV.exp()
    if any(one.top_k or one.top_p < 1 or one.min_p for one in params):
        weight_RV *= kept_tokens(scaled_RV, params)
    cumulative_RV = weight_RV.cumsum(dim=-1, dtype=torch.float64)
    total_R1 = cumulative_RV[:, -1:]
    target_R1 = _column(uniform, cumulative_RV) * total_R1
    # below the total, so that the token found always has a probability above 0
    target_R1 = torch.minimum(target_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0].clamp_(max=logits_RV.shape[1] - 1)


def kept_tokens(scaled_RV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """kept_RV: within the top_k; the fewest likeliest of those whose mass reaches top_p; and p >= min_p * max p.

    scaled_RV are logits over temperature, the row's largest 0, so that p / max p = exp(scaled). Each condition keeps
    some first tokens of the descending order, equal ones by id: their number and the last one's value are enough.
    """
    size = scaled_RV.shape[1]
    top_k = [min(one.top_k, size) or size for one in params]
    width = max(top_k)
    sorted_RW = scaled_RV.topk(width, dim=1).values if width * 8 < size else _descending(scaled_RV)
    weight_RW = sorted_RW.exp()
    if min(top_k) < sorted_RW.shape[1]:
        rank_W = torch.arange(sorted_RW.shape[1], device=scaled_RV.device)
        weight_RW *= rank_W < _column(top_k, rank_W)
    kept_RW = weight_RW > 0
    if any(one.top_p < 1 for one in params):
        mass_RW = weight_RW.cumsum(dim=1, dtype=torch.float64)
        # a cumulative sum can reach its total early by rounding: top_p 1 keeps everything by definition
        top_p = [one.top_p if one.top_p < 1 else 2.0 for one in params]
        kept_RW &= mass_RW - weight_RW < _column(top_p, mass_RW) * mass_RW[:, -1:]
    if any(one.min_p for one in params):
        kept_RW &= weight_RW >= _column([one.min_p for one in params], weight_RW)
    number_R1 = kept_RW.sum(1, keepdim=True)
    last_R1 = sorted_RW.gather(1, (number_R1 - 1).clamp(min=0))
    above_RV, equal_RV = scaled_RV > last_R1, scaled_RV == last_R1
    return above_RV | (equal_RV & (equal_RV.cumsum(1) <= number_R1 - above_RV.sum(1, keepdim=True)))


def _descending(x_RV: torch.Tensor) -> torch.Tensor:
    """Each row's values sorted. On a CPU numpy sorts 16 rows of 1,024 in 0.1 ms, torch, with their ids, in 0.9."""
    if x_RV.is_cuda:
        return x_RV.sort(dim=1, descending=True).values
    return torch.from_numpy(np.sort((-x_RV).numpy(), axis=1)).neg_()


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    """values_R1 in the dtype and on the device of `like`."""
    return to_device(torch.tensor(values, dtype=like.dtype)[:, None], like.device)


def _index(values: list, like: torch.Tensor) -> torch.Tensor:
    """int64 on the device of `like`; the host waits for nothing."""
    return on_device(np.array(values, dtype=np.int64), like.device)


def _mix(value: int) -> int:
    """splitmix64: a bijection of 64-bit words that passes as random on counters."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _uniform(key: int, position: int) -> float:
    """In [0, 1), 53 bits."""
    return (_mix(key ^ _mix(position)) >> 11) * 2.0**-53
