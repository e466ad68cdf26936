"""The distance between a draft's distribution q and the target's p, and its gradient, one vocabulary row at a time.

  KL   Σ p (log p − log q)          gradient by the draft's logits: q − p
  TV   1 − Σ min(p, q)              gradient: q (S − [q < p]), S = Σ q over the ids with q < p

1 − TV is the probability that a sampled guess is accepted (Leviathan et al., equation for α), so TV determines the gain of
speculation. KL has a gradient where TV has none (a token with q near 0). The loss is KL + w·TV.

Draft and target logits are computed in half precision, chunk by chunk, and the gradient overwrites the draft's logits: two
matrices of rows × vocabulary exist at once and are freed after the chunk. A draft with a vocabulary subset has logits only
for these ids; the rows of the target's matrix are arranged so that they come first. q is 0 for the other ids. KL sums over
the subset only, TV over all ids.
"""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch: rows_plain is used
    triton = None

STATS = 4  # per row: KL, Σ min(p, q), same argmax, S


def arrange(output, subset):
    """The target's output matrix with the rows of the vocabulary subset first."""
    if subset is None:
        return output
    others = torch.ones(len(output), dtype=torch.bool, device=output.device)
    others[subset] = False
    return torch.cat((output[subset], output[others]))


def rows_plain(t, z, weight, tv):
    """Reference. t [n][vocab], z [n][subset]: logits, subset ids first. Returns gradient [n][subset] float32 and stats [n][4]."""
    lp, lq, n_subset = t.float().log_softmax(-1), z.float().log_softmax(-1), z.shape[1]
    kept, lk = lp[:, :n_subset].exp(), lp[:, :n_subset]
    q = lq.exp()
    less = (q < kept) & (q > 0)
    s = (q * less).sum(-1, keepdim=True)
    kl = torch.where(kept > 0, kept * (lk - lq), 0).sum(-1)
    grad = weight[:, None] * (q * kept.sum(-1, keepdim=True) - kept + tv * q * (s - less.float()))
    same = (t.argmax(-1) == z.argmax(-1)).float()
    return grad, torch.stack((kl, torch.minimum(kept, q).sum(-1), same, s[:, 0]), -1)


if triton:
    @triton.jit
    def _log_sum(x_ptr, n: tl.constexpr, BLOCK: tl.constexpr):
        """(log Σ exp x, first index of the maximum)"""
        lane = tl.arange(0, BLOCK)
        most = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        where = tl.zeros((BLOCK,), tl.int32)
        for at in range(0, n, BLOCK):
            i = at + lane
            x = tl.load(x_ptr + i, mask=i < n, other=-60000.0).to(tl.float32)
            next = tl.maximum(most, x)
            total = total * tl.exp(most - next) + tl.exp(x - next)
            where = tl.where(x > most, i, where)
            most = next
        top = tl.max(most, 0)
        return top + tl.log(tl.sum(total * tl.exp(most - top), 0)), tl.min(tl.where(most == top, where, n), 0)

    @triton.jit
    def _rows(t_ptr, z_ptr, g_ptr, w_ptr, out_ptr, tv, n_vocab: tl.constexpr, n_subset: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        t_ptr += row * n_vocab
        z_ptr += row * n_subset
        g_ptr += row * n_subset
        lane = tl.arange(0, BLOCK)
        lse_t, best_t = _log_sum(t_ptr, n_vocab, BLOCK)
        lse_z, best_z = _log_sum(z_ptr, n_subset, BLOCK)
        kl = tl.zeros((BLOCK,), tl.float32)
        both = tl.zeros((BLOCK,), tl.float32)
        low = tl.zeros((BLOCK,), tl.float32)
        kept = tl.zeros((BLOCK,), tl.float32)
        for at in range(0, n_subset, BLOCK):
            i = at + lane
            ok = i < n_subset
            lp = tl.load(t_ptr + i, mask=ok, other=-60000.0).to(tl.float32) - lse_t
            lq = tl.load(z_ptr + i, mask=ok, other=-60000.0).to(tl.float32) - lse_z
            p = tl.exp(lp)
            q = tl.exp(lq)
            kl += tl.where(p > 0, p * (lp - lq), 0.0)
            both += tl.minimum(p, q)
            low += tl.where(q < p, q, 0.0)
            kept += p
        s = tl.sum(low, 0)
        tl.store(out_ptr + row * 4, tl.sum(kl, 0))
        tl.store(out_ptr + row * 4 + 1, tl.sum(both, 0))
        tl.store(out_ptr + row * 4 + 2, (best_t == best_z).to(tl.float32))
        tl.store(out_ptr + row * 4 + 3, s)
        if GRAD:
            total = tl.sum(kept, 0)
            w = tl.load(w_ptr + row)
            for at in range(0, n_subset, BLOCK):
                i = at + lane
                ok = i < n_subset
                p = tl.exp(tl.load(t_ptr + i, mask=ok, other=-60000.0).to(tl.float32) - lse_t)
                q = tl.exp(tl.load(z_ptr + i, mask=ok, other=-60000.0).to(tl.float32) - lse_z)
                g = q * total - p + tv * q * (s - tl.where(q < p, 1.0, 0.0))
                tl.store(g_ptr + i, (w * g).to(g_ptr.dtype.element_ty), mask=ok)


def rows_fused(t, z, weight, tv, grad=True):
    """Like rows_plain; z is float16, and the bfloat16 gradient is written to its memory."""
    n, n_subset = z.shape
    g = z.view(torch.bfloat16)
    stats = torch.empty(n, STATS, device=z.device)
    _rows[(n,)](t, z, g, weight, stats, float(tv), t.shape[1], n_subset, GRAD=grad, BLOCK=4096, num_warps=8)
    return g, stats


def _matmul32(a, b):
    """a @ b of half-precision matrices in float32: sums over a whole batch overflow half precision."""
    try:
        return torch.mm(a, b, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return (a @ b).float()


class Head(torch.autograd.Function):
    """(draft's hidden states [n][d], its output matrix [subset][d]) -> mean loss. The target's hidden states and matrix (arrange()) are constants."""

    @staticmethod
    def forward(ctx, h, e, target_h, target_e, weight, tv, chunk):
        dh, de = torch.empty_like(h, dtype=torch.float32), torch.zeros(e.shape, device=e.device)
        fused = h.is_cuda
        half = torch.float16 if fused else torch.float32
        e16, grad_e = e.detach().to(half), e.detach().to(torch.bfloat16 if fused else torch.float32)
        total, stats = weight.sum().clamp(min=1e-6), []
        for i in range(0, len(h), chunk):
            x, w = h[i:i + chunk].detach(), weight[i:i + chunk]
            t = target_h[i:i + chunk].to(half) @ target_e.to(half).T
            z = x.to(half) @ e16.T
            g, s = (rows_fused if fused else rows_plain)(t, z, w, tv)
            dh[i:i + chunk] = g @ grad_e
            de += _matmul32(g.T, x.to(g.dtype)) if fused else g.T @ x
            stats.append(s)
        stats = torch.cat(stats)
        ctx.save_for_backward(dh, de, total)
        loss = ((stats[:, 0] + tv * (1 - stats[:, 1])) * weight).sum() / total
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx, up, _):
        dh, de, total = ctx.saved_tensors
        return dh * (up / total), de * (up / total), None, None, None, None, None


@torch.no_grad()
def measure(h, e, target_h, target_e, chunk=8192):
    """stats [n][4] of the draft's hidden states and the target's, without a gradient."""
    out, half = [], torch.float16 if h.is_cuda else torch.float32
    one = torch.ones(min(chunk, len(h)), device=h.device)
    for i in range(0, len(h), chunk):
        x = h[i:i + chunk]
        t, z = target_h[i:i + chunk].to(half) @ target_e.to(half).T, x.to(half) @ e.to(half).T
        out.append(rows_fused(t, z, one, 0.0, grad=False)[1] if h.is_cuda else rows_plain(t, z, one[:len(x)], 0.0)[1])
    return torch.cat(out)
