"""The step that warms a GPU up, with interpreted kernels: it leaves nothing behind but on page 0."""

import sys
from pathlib import Path

import pytest
import torch

from truegate.cache.pools import MHAPool
from truegate.engine.warm import decode_counts, warm_up
from truegate.errors import UserError
from truegate.models import load_model

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3"])
def test_the_longest_step_is_computed_and_writes_nobodys_page_alone(name, tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
    from tiny_checkpoints import reference, save

    model = load_model(save(reference(name, num_hidden_layers=2), tmp_path))
    model.uses_kernels = True
    rows, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden_MD: rows.append(hidden_MD) or logits(hidden_MD))
    pool = model.make_pool(4, 16)
    for num_rows, max_length in ((5, 5), (5, 4), (5, 2)):
        pool.data.fill_(float("nan"))
        pool.rows(0)[:16] = pool.rows(1)[:16] = 0
        warm_up(model, pool, num_rows=num_rows, max_length=max_length, max_running=3, all_valid=False)
        for layer in range(2):
            assert pool.rows(layer)[16:].isnan().all()
            assert pool.rows(layer)[0].isfinite().all()
            assert pool.rows(layer)[0].any()
    assert [len(hidden) for hidden in rows] == [1, 1, 1] * 3  # of 5 rows, of 4, of 3 sequences
    assert torch.cat(rows).isfinite().all()


def test_decodes_at_start_are_cut_and_tiled_in_every_way_that_later_ones_are():
    from truegate.engine.graphs import grid
    from truegate.kernels import attention

    q = torch.empty(1, 1, 128, dtype=torch.bfloat16)

    def ways(sizes, heads):
        programs = (size * heads for size in sizes)
        return {(attention.num_splits(n, wide=False), attention._decode_tile(128, q, n)) for n in programs}

    for most in (1, 2, 3, 5, 6, 48, 256, 700):
        alone, beside = decode_counts(most, captured=False), decode_counts(most, captured=True) + grid(most)
        assert max(alone) <= most
        for heads in (*range(1, 17), 20, 24, 32, 48, 64, 128):
            assert ways(alone, heads) == ways(beside, heads) == ways(range(1, most + 1), heads)


def test_a_layer_says_where_its_steps_turn_to_another_form(tmp_path):
    from tiny_checkpoints import reference, save

    from truegate.models.load import LoadOptions

    folder = save(reference("Qwen3-MoE", num_hidden_layers=1, hidden_size=512), tmp_path)
    assert load_model(folder).moe_layers[0].turns() == []
    pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
    layer = load_model(folder, options=LoadOptions(experts="triton")).moe_layers[0]
    spec = layer.spec
    assert layer.turns() == sorted(layer.turns())
    ways = [1, 255, *(num // spec.top_k for num in (128, 1024, 4096, 200 * 2**20 // (spec.hidden * 4)))]
    assert set(layer.turns()) == set(ways)


def test_a_step_that_does_not_fit_is_said_at_start():
    class Full:
        moe_layers, num_layers, device = (), 0, torch.device("cpu")

        def forward(self, batch, pool):
            raise torch.OutOfMemoryError("CUDA out of memory")

    pool = MHAPool(num_layers=1, num_pages=2, page_size=16, width=8, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"4096 rows.*--chunked-prefill-tokens"):
        warm_up(Full(), pool, num_rows=4096, max_length=100, max_running=256)
