"""How far a draft's distribution q is from the target's p, and the gradient, one vocabulary row at a time.

  KL   Σ p (log p − log q)          gradient by the draft's logits: q − p
  TV   1 − Σ min(p, q)              gradient: q (S − [q < p]), S = Σ q over those with q < p

1 − TV is the chance that a drawn guess is accepted (Leviathan et al., eq. for α), so TV is what speculation pays for; KL
has a gradient where TV has none (a token the draft has not heard of). The loss is KL + w·TV.

Draft and target logits are made in half precision, chunk by chunk, and the gradient overwrites the draft's: two matrices of
rows × vocabulary exist at once and are gone after the chunk. A draft with a smaller output vocabulary (`said`: its ids) has logits
for those alone; the target's matrix is arranged so that they come first. q is 0 elsewhere, KL counts the said ids alone and TV all.
"""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch: the plain form below serves
    triton = None

STATS = 4  # per row: KL, Σ min(p, q), the same argmax, S


def arrange(output, said):
    """The target's output matrix with the rows of the said ids first."""
    if said is None:
        return output
    rest = torch.ones(len(output), dtype=torch.bool, device=output.device)
    rest[said] = False
    return torch.cat((output[said], output[rest]))


def rows_plain(t, z, weight, tv):
    """The reference. t [n][vocab], z [n][said] logits, said ids first; gradient [n][said] float32 and stats [n][4]."""
    lp, lq, n_said = t.float().log_softmax(-1), z.float().log_softmax(-1), z.shape[1]
    kept, lk = lp[:, :n_said].exp(), lp[:, :n_said]
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
        """(log Σ exp x, first place of the largest)"""
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
    def _rows(t_ptr, z_ptr, g_ptr, w_ptr, out_ptr, tv, n_vocab: tl.constexpr, n_said: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        t_ptr += row * n_vocab
        z_ptr += row * n_said
        g_ptr += row * n_said
        lane = tl.arange(0, BLOCK)
        lse_t, best_t = _log_sum(t_ptr, n_vocab, BLOCK)
        lse_z, best_z = _log_sum(z_ptr, n_said, BLOCK)
        kl = tl.zeros((BLOCK,), tl.float32)
        both = tl.zeros((BLOCK,), tl.float32)
        low = tl.zeros((BLOCK,), tl.float32)
        kept = tl.zeros((BLOCK,), tl.float32)
        for at in range(0, n_said, BLOCK):
            i = at + lane
            ok = i < n_said
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
            for at in range(0, n_said, BLOCK):
                i = at + lane
                ok = i < n_said
                p = tl.exp(tl.load(t_ptr + i, mask=ok, other=-60000.0).to(tl.float32) - lse_t)
                q = tl.exp(tl.load(z_ptr + i, mask=ok, other=-60000.0).to(tl.float32) - lse_z)
                g = q * total - p + tv * q * (s - tl.where(q < p, 1.0, 0.0))
                tl.store(g_ptr + i, (w * g).to(g_ptr.dtype.element_ty), mask=ok)


def rows_fused(t, z, weight, tv, grad=True):
    """As rows_plain; z is float16 and its memory becomes the bfloat16 gradient."""
    n, n_said = z.shape
    g = z.view(torch.bfloat16)
    stats = torch.empty(n, STATS, device=z.device)
    _rows[(n,)](t, z, g, weight, stats, float(tv), t.shape[1], n_said, GRAD=grad, BLOCK=4096, num_warps=8)
    return g, stats


def _matmul32(a, b):
    """a @ b of half-precision matrices in float32: sums over a whole batch do not fit a half."""
    try:
        return torch.mm(a, b, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return (a @ b).float()


class Head(torch.autograd.Function):
    """(draft states [n][d], rows of its output matrix [said][d]) -> mean loss; the target's states and matrix (arrange()) are constants."""

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
    """stats [n][4] of draft states against the target's, without a gradient."""
    out, half = [], torch.float16 if h.is_cuda else torch.float32
    one = torch.ones(min(chunk, len(h)), device=h.device)
    for i in range(0, len(h), chunk):
        x = h[i:i + chunk]
        t, z = target_h[i:i + chunk].to(half) @ target_e.to(half).T, x.to(half) @ e.to(half).T
        out.append(rows_fused(t, z, one, 0.0, grad=False)[1] if h.is_cuda else rows_plain(t, z, one[:len(x)], 0.0)[1])
    return torch.cat(out)
