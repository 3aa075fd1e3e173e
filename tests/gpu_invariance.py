"""What only a GPU can show of batch-invariant calls; `gpu_serving.py` has these checks in its list.

Each raises an AssertionError that says what is wrong.
"""

import torch

import rowmax
from rowmax import PagedProblem

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


@check
def batch_invariant_calls_give_the_same_bits_in_every_company():
    """Alone, among others, over other pages, in chunks, token by token; few parts side by side or many in turn."""
    options = {"batch_invariant": True, "return_lse": True}
    for dtype, dim, window in ((torch.bfloat16, 128, None), (torch.float16, 64, (700, 0)), (torch.bfloat16, 256, None)):
        keys, values = (torch.randn(5000, 2, dim, device="cuda", dtype=dtype) for _ in "kv")
        q = torch.randn(600, 8, dim, device="cuda", dtype=dtype)  # the last queries

        def run(rows, size, company, keys=keys, values=values, q=q, dim=dim, dtype=dtype, window=window):
            """The given queries, beside `company` sequences of three tokens."""
            length = 5000 - 600 + rows.stop
            cache = rowmax.PagedKVCache(
                10_000 // size + 60, page_size=size, heads=2, dim=dim, dtype=dtype, device="cuda", max_length=5008
            )
            mine, *others = [cache.add() for _ in range(company + 1)]
            step = cache.extend([mine, *others], [length, *[3] * company])
            more = torch.randn(2, 3 * company, 2, dim, device="cuda", dtype=dtype)
            cache.append(step, torch.cat([keys[:length], more[0]]), torch.cat([values[:length], more[1]]))
            count = rows.stop - rows.start
            cu = torch.tensor([0, count, *range(count + 3, count + 3 * company + 1, 3)], device="cuda", dtype=torch.int32)
            queries = torch.cat([q[rows], torch.randn(3 * company, 8, dim, device="cuda", dtype=dtype)])
            given = (queries, cache.k_pages[0], cache.v_pages[0], step.block_table, step.seqlens_k)
            out, lse = rowmax.attention_paged(*given, cu_seqlens_q=cu, causal=window is None, window=window, **options)
            return out[:count], lse[:, :count]

        out, lse = run(slice(0, 600), 16, 0)
        for rows, size, company in (
            (slice(0, 600), 64, 3),
            (slice(0, 600), 5, 50),
            (slice(0, 37), 16, 0),
            (slice(37, 293), 16, 7),
            (slice(599, 600), 16, 0),
            (slice(599, 600), 128, 50),
            (slice(300, 301), 1, 1),
        ):
            part = run(rows, size, company)
            assert torch.equal(part[0], out[rows]), f"d{dim} queries {rows}, pages of {size}, {company} others: another output"
            assert torch.equal(part[1], lse[:, rows]), f"d{dim} queries {rows}, pages of {size}, {company} others: another LSE"


@check
def batch_invariant_bits_stay_where_parts_double():
    """At 6144 and 18432 keys, with 16 heads: a prompt in one piece, by programs side by side and by one in turn, against steps
    of one token and of three, many sequences of a call, whose parts are combined behind the kernel or in it."""
    torch.manual_seed(0)
    pages = [torch.randn(1250, 16, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    table = torch.randperm(1250, device="cuda").to(torch.int32)
    q = torch.randn(20_000, 32, 128, device="cuda", dtype=torch.bfloat16)
    options = {"batch_invariant": True, "return_lse": True}
    text = "b1 h32/16 q1 k20000 d128 bf16 causal paged16 invariant"
    assert str(rowmax.plan(PagedProblem.parse(text), rowmax.Device.of(q)).tiles[0]).endswith("c8d12")

    def prompt(begin, end, plan=None):
        lengths, cu = (torch.tensor(one, device="cuda", dtype=torch.int32) for one in ([end], [0, end - begin]))
        return rowmax.attention_paged(q[begin:end], *pages, table[None], lengths, cu_seqlens_q=cu, plan=plan, **options)

    for edge in (6144, 18432):
        begin = edge - 150
        out, lse = prompt(begin, edge + 150)
        for plan in ("split_kv[32x64 w4 s3 r8d12]", "split_kv[32x64 w4 s3 c8d12 once]", "split_kv[16x64 w4 s3 r8d12]"):
            again = prompt(begin, edge + 150, plan)
            assert torch.equal(again[0], out), f"{plan} at {edge}: another output"
            assert torch.equal(again[1], lse), f"{plan} at {edge}: another LSE"
        for chunk in (slice(begin, edge - 1), slice(edge - 1, edge + 2), slice(edge + 2, edge + 150)):
            part, part_lse = prompt(chunk.start, chunk.stop)
            rows = slice(chunk.start - begin, chunk.stop - begin)
            assert torch.equal(part, out[rows]), f"queries {chunk} in a chunk: another output"
            assert torch.equal(part_lse, lse[:, rows]), f"queries {chunk} in a chunk: another LSE"
        for queries in (1, 3):
            ends = torch.arange(edge - 20, edge + 20, device="cuda", dtype=torch.int32)
            rows = ends[:, None].long() - queries + torch.arange(queries, device="cuda")
            for plan in (None, "split_kv[16x64 w4 s4 c8d12 once]", "split_kv[16x64 w4 s4 r8d12]"):
                given = (q[rows], *pages, table.expand(len(ends), -1), ends)
                step, step_lse = rowmax.attention_paged(*given, plan=plan, **options)
                assert torch.equal(step, out[rows - begin]), f"{queries} tokens at {edge}, {plan}: another output"
                assert torch.equal(step_lse.transpose(1, 2), lse.T[rows - begin]), f"{queries} tokens at {edge}: another LSE"
