"""The ledger model for training and scoring: DeepSeek-V3's architecture at 1/50,000 of its size.

All routed experts are one wide SwiGLU whose hidden columns are weighted by the router's coefficient matrix C_TE:
y_TD = sum_EF (silu(x_TD @ G_DEF) * (x_TD @ U_DEF) * C_TE) @ W_EFD. At this size the dense form is faster than a sparse
one. Training is on flat streams of documents; scoring has a KV cache.

T tokens, B rows, L cache length, H heads, D hidden, E experts, F expert width, V vocabulary.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Every size of the model; the names are those of a DeepSeek-V3 config.json."""

    vocab_size: int = 1024
    hidden_size: int = 256
    num_hidden_layers: int = 8
    first_k_dense_replace: int = 1
    intermediate_size: int = 512
    moe_intermediate_size: int = 64
    n_routed_experts: int = 16
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    n_shared_experts: int = 4
    routed_scaling_factor: float = 2.5
    num_attention_heads: int = 2
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """A flat stream of documents: position of each token in its document, the documents' first tokens, and what the
    shared experts' output is multiplied by at each token (1 but in training)."""

    position_T: Tensor
    start_N: Tensor  # int32, ends with T; padded at the end by repeating T
    shared_scale_T: Tensor
    longest: int


@dataclass(kw_only=True)
class Cache:
    """Keys and values of every layer for rows of equal length; pads on the left are masked."""

    keys: list[Tensor]  # each B, L, H, qk
    values: list[Tensor]  # each B, L, H, v
    pads_B: Tensor  # how many pads each row starts with
    length: int = 0

    def keep(self, rows: Tensor) -> None:
        self.keys = [key[rows] for key in self.keys]
        self.values = [value[rows] for value in self.values]
        self.pads_B = self.pads_B[rows]


def linear(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * gain / math.sqrt(columns))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of interleaved pairs (x0, x1), (x2, x3), ...; cos and sin broadcast against the pairs."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def attend_documents(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, docs: Documents) -> Tensor:
    """Causal attention within each document."""
    if q_THd.is_cuda:
        value_dim, query_dim = v_THd.shape[-1], q_THd.shape[-1]
        v_THd = F.pad(v_THd, (0, query_dim - value_dim))  # the fused kernel wants equal head sizes
        out = torch.ops.aten._flash_attention_forward(
            q_THd, k_THd, v_THd, docs.start_N, docs.start_N, docs.longest, docs.longest, 0.0, True, False
        )[0]
        return out[..., :value_dim]
    document_T = torch.bucketize(torch.arange(q_THd.shape[0]), docs.start_N.long(), right=True)
    mask = (document_T[:, None] == document_T) & torch.ones(len(document_T), len(document_T), dtype=torch.bool).tril()
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THd, k_THd, v_THd))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


class Attention(nn.Module):
    """Multi-head latent attention without a query latent."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q = linear(s.num_attention_heads * (s.qk_nope_head_dim + s.qk_rope_head_dim), s.hidden_size)
        self.kv_a = linear(s.kv_lora_rank + s.qk_rope_head_dim, s.hidden_size)
        self.kv_norm = RMSNorm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b = linear(s.num_attention_heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank)
        self.o = linear(s.hidden_size, s.num_attention_heads * s.v_head_dim, 0.5 / math.sqrt(s.num_hidden_layers))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., D) to q, k (..., H, qk) and v (..., H, v)."""
        s, heads = self.s, self.s.num_attention_heads
        q = F.linear(x, self.q).unflatten(-1, (heads, -1))
        q_nope, q_rope = q.split([s.qk_nope_head_dim, s.qk_rope_head_dim], -1)
        latent, k_rope = F.linear(x, self.kv_a).split([s.kv_lora_rank, s.qk_rope_head_dim], -1)
        kv = F.linear(self.kv_norm(latent), self.kv_b).unflatten(-1, (heads, -1))
        k_nope, v = kv.split([s.qk_nope_head_dim, s.v_head_dim], -1)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        k_rope = rotate(k_rope.unsqueeze(-2), cos, sin).expand(*k_nope.shape[:-1], -1)
        return torch.cat((q_nope, rotate(q_rope, cos, sin)), -1), torch.cat((k_nope, k_rope), -1), v

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, docs: Documents) -> Tensor:
        q, k, v = self.project(x_TD, cos, sin)
        return F.linear(attend_documents(q, k, v, docs).flatten(-2), self.o)

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, layer: int) -> Tensor:
        """Append x (B, l, D) to the cache and attend to all of it."""
        q, k, v = self.project(x, cos, sin)
        begin, end = cache.length, cache.length + x.shape[1]
        cache.keys[layer][:, begin:end], cache.values[layer][:, begin:end] = k, v
        column = torch.arange(end, device=x.device)
        mask = (column >= cache.pads_B[:, None, None]) & (column <= torch.arange(begin, end, device=x.device)[:, None])
        mask = mask | (column == torch.arange(begin, end, device=x.device)[:, None])  # a pad sees itself, not nothing
        keys, values = (c[layer][:, :end].transpose(1, 2) for c in (cache.keys, cache.values))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask[:, None])
        return F.linear(out.transpose(1, 2).flatten(-2), self.o)


class Dense(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate, self.up = (linear(s.intermediate_size, s.hidden_size) for _ in range(2))
        self.down = linear(s.hidden_size, s.intermediate_size, 0.5 / math.sqrt(s.num_hidden_layers))

    def forward(self, x: Tensor, shared_scale: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class MoE(nn.Module):
    """Sigmoid scores, biased grouped top-k, weights normalised then scaled; shared experts always on."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        experts, width = s.n_routed_experts, s.moe_intermediate_size
        shared = s.n_shared_experts * width
        self.router = linear(experts, s.hidden_size, 0.3)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.gate, self.up = (nn.Parameter(torch.randn(experts, width, s.hidden_size) / 16) for _ in range(2))
        out_gain = 0.5 / math.sqrt(s.num_hidden_layers)
        self.down = nn.Parameter(torch.randn(experts, s.hidden_size, width) * out_gain / math.sqrt(2 * width))
        self.shared_gate, self.shared_up = (linear(shared, s.hidden_size) for _ in range(2))
        self.shared_down = linear(s.hidden_size, shared, out_gain)

    def route(self, x_TD: Tensor) -> Tensor:
        """Coefficients C_TE of the routed experts, float32; counts the load as a side effect in training."""
        s = self.s
        with torch.autocast(x_TD.device.type, enabled=False):
            score_TE = F.linear(x_TD.float(), self.router.float()).sigmoid()
        with torch.no_grad():
            choice = (score_TE + self.bias).unflatten(-1, (s.n_group, -1))
            kept = choice.topk(2, -1)[0].sum(-1).topk(s.topk_group, -1)[1]
            in_kept = torch.zeros_like(choice[..., 0], dtype=torch.bool).scatter(-1, kept, True)
            choice = choice.masked_fill(~in_kept.unsqueeze(-1), float("-inf")).flatten(-2)
            ids = choice.topk(s.num_experts_per_tok, -1)[1]
            chosen_TE = torch.zeros_like(score_TE).scatter(-1, ids, 1.0)
            if self.training:
                self.load.add_(chosen_TE.sum(0))
        weight_TE = score_TE * chosen_TE
        return weight_TE / (weight_TE.sum(-1, keepdim=True) + 1e-20) * s.routed_scaling_factor

    def forward(self, x: Tensor, shared_scale: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        c_TE = self.route(x_TD)
        gate, up, down = self.gate.flatten(0, 1), self.up.flatten(0, 1), self.down.transpose(0, 1).flatten(1)
        hidden_TEF = (F.silu(F.linear(x_TD, gate)) * F.linear(x_TD, up)).unflatten(1, (c_TE.shape[1], -1))
        routed = F.linear((hidden_TEF * c_TE.to(hidden_TEF.dtype).unsqueeze(-1)).flatten(1), down).view_as(x)
        shared = F.linear(F.silu(F.linear(x, self.shared_gate)) * F.linear(x, self.shared_up), self.shared_down)
        return routed + shared * shared_scale.to(shared.dtype).unsqueeze(-1)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Auxiliary-loss-free balance: an overloaded expert's selection bias falls, an idle one's rises."""
        self.bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Block(nn.Module):
    def __init__(self, s: Shape, *, dense: bool) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = (RMSNorm(s.hidden_size, s.rms_norm_eps) for _ in range(2))
        self.attn = Attention(s)
        self.mlp = Dense(s) if dense else MoE(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, docs: Documents) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, docs)
        return x + self.mlp(self.mlp_norm(x), docs.shared_scale_T)

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, layer: int, shared_scale: Tensor) -> Tensor:
        x = x + self.attn.step(self.attn_norm(x), cos, sin, cache, layer)
        return x + self.mlp(self.mlp_norm(x), shared_scale)


class Ledger(nn.Module):
    """Embedding, blocks, norm, head; and one next-token module that predicts the token after the next."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed = nn.Parameter(torch.randn(s.vocab_size, s.hidden_size) * 0.1)
        self.blocks = nn.ModuleList(Block(s, dense=i < s.first_k_dense_replace) for i in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.head = linear(s.vocab_size, s.hidden_size, 0.1)
        self.enorm, self.hnorm, self.mtp_norm = (RMSNorm(s.hidden_size, s.rms_norm_eps) for _ in range(3))
        self.eh_proj = linear(s.hidden_size, 2 * s.hidden_size)
        self.mtp = Block(s, dense=False)

    def rope(self, position: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.arange(0, self.s.qk_rope_head_dim, 2, device=position.device)
        angle = position.float().unsqueeze(-1) * self.s.rope_theta ** (-pair.float() / self.s.qk_rope_head_dim)
        return angle.cos(), angle.sin()

    def forward(self, ids_T: Tensor, docs: Documents) -> tuple[Tensor, Tensor]:
        """Logits of the next token and of the one after it, both (T, V)."""
        cos, sin = self.rope(docs.position_T)
        x = embedded = F.embedding(ids_T, self.embed)
        for block in self.blocks:
            x = block(x, cos, sin, docs)
        h = self.norm(x)
        pair = torch.cat((self.enorm(embedded.roll(-1, 0)), self.hnorm(h)), -1)
        second = self.mtp_norm(self.mtp(F.linear(pair, self.eh_proj), cos, sin, docs))
        return F.linear(h, self.head), F.linear(second, self.head)

    def cache(self, pads_B: Tensor, length: int) -> Cache:
        s, device, dtype = self.s, self.embed.device, self.embed.dtype
        shape = (len(pads_B), length, s.num_attention_heads)
        keys = [torch.zeros(*shape, s.qk_nope_head_dim + s.qk_rope_head_dim, device=device, dtype=dtype)
                for _ in self.blocks]  # fmt: skip
        values = [torch.zeros(*shape, s.v_head_dim, device=device, dtype=dtype) for _ in self.blocks]
        return Cache(keys=keys, values=values, pads_B=pads_B)

    def step(self, ids: Tensor, cache: Cache, shared_scale_B: Tensor) -> Tensor:
        """Logits (B, V) after the last of ids (B, l); shared experts' output is multiplied by shared_scale_B."""
        cos, sin = self.rope(torch.arange(cache.length, cache.length + ids.shape[1], device=ids.device))
        x = F.embedding(ids, self.embed)
        for layer, block in enumerate(self.blocks):
            x = block.step(x, cos, sin, cache, layer, shared_scale_B[:, None])
        cache.length += ids.shape[1]
        return F.linear(self.norm(x[:, -1]), self.head)
