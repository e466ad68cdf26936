"""Generates many sequences at once: a cache with fixed slots, one captured step, slots that are refilled as sequences end.

  slot   ids[b] at pos[b] is the next input; its keys and values go to the cache, one token is sampled, pos advances
  step   runs the same kernels for all slots regardless of their lengths, so it is captured once as a CUDA graph and
         replayed; slots whose sequence has ended do not change
  fill   every few steps the host collects ended sequences and prefills new prompts into the free slots, in one pass

Attention reads only each slot's own length, in a Triton kernel; without a GPU plain torch is used.
"""
import time

import torch
import torch.nn.functional as F

import llama

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton:
    @triton.jit
    def _attend(q_ptr, k_ptr, v_ptr, pos_ptr, o_ptr, scale, S, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
        one = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)  # (slot, key head)
        n = tl.load(pos_ptr + tl.program_id(0)).to(tl.int32) + 1
        g = tl.arange(0, 16)
        d = tl.arange(0, D)
        q = tl.load(q_ptr + (one * G + g)[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
        top = tl.full((16,), -1e30, tl.float32)
        total = tl.zeros((16,), tl.float32)
        acc = tl.zeros((16, D), tl.float32)
        for at in range(0, n, BLOCK):
            i = at + tl.arange(0, BLOCK)
            ok = i < n
            k = tl.load(k_ptr + (one * S + i)[None, :] * D + d[:, None], mask=ok[None, :], other=0.0)
            s = tl.where(ok[None, :], tl.dot(q, k) * scale, -1e30)
            new = tl.maximum(top, tl.max(s, 1))
            p = tl.exp(s - new[:, None])
            old = tl.exp(top - new)
            v = tl.load(v_ptr + (one * S + i)[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
            acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v)
            total = total * old + tl.sum(p, 1)
            top = new
        tl.store(o_ptr + (one * G + g)[:, None] * D + d[None, :], (acc / total[:, None]).to(o_ptr.dtype.element_ty),
                 mask=(g < G)[:, None])

    @triton.jit
    def _pick(z_ptr, temp_ptr, count_ptr, out_ptr, log_min_p, seed, n_vocab: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        z_ptr += row.to(tl.int64) * n_vocab
        temp = tl.load(temp_ptr + row)
        lane = tl.arange(0, BLOCK)
        best = tl.full((BLOCK,), -1e30, tl.float32)
        for at in range(0, n_vocab, BLOCK):
            best = tl.maximum(best, tl.load(z_ptr + at + lane, mask=at + lane < n_vocab, other=-60000.0).to(tl.float32))
        floor = tl.max(best, 0) + log_min_p * temp
        best = tl.full((BLOCK,), -1e30, tl.float32)
        best_id = tl.zeros((BLOCK,), tl.int32)
        key = seed + tl.load(count_ptr) * tl.num_programs(0) + row
        for at in range(0, n_vocab, BLOCK):
            i = at + lane
            z = tl.load(z_ptr + i, mask=i < n_vocab, other=-60000.0).to(tl.float32)
            noise = -tl.log(-tl.log(tl.rand(key, i) * 0.9999999 + 5e-8))
            z = tl.where(z >= floor, z + temp * noise, -1e30)
            best_id = tl.where(z > best, i, best_id)
            best = tl.maximum(best, z)
        top = tl.max(best, 0)
        tl.store(out_ptr + row, tl.min(tl.where(best == top, best_id, n_vocab), 0).to(tl.int64))


def attend(q, k, v, pos):
    """q [B][heads][D], k and v [B][key heads][S][D], pos [B]: attends to keys 0 … pos."""
    if not q.is_cuda:
        group = q.shape[1] // k.shape[1]
        mask = torch.arange(k.shape[2])[None, :] <= pos[:, None]
        return F.scaled_dot_product_attention(q[:, :, None], k.repeat_interleave(group, 1), v.repeat_interleave(group, 1),
                                              attn_mask=mask[:, None, None])[:, :, 0]
    out = torch.empty_like(q)
    B, kv, S, D = k.shape
    _attend[(B, kv)](q, k, v, pos, out, D ** -0.5, S, G=q.shape[1] // kv, D=D, BLOCK=64, num_warps=4)
    return out


def pick(logits, temp, count, log_min_p, seed):
    """Samples one id per row: argmax of logits / temp + Gumbel noise, among tokens above min-p."""
    if not logits.is_cuda:
        z = logits.float()
        noise = -torch.log(-torch.log(torch.rand_like(z).clamp(1e-9, 1 - 1e-7)))
        floor = z.amax(-1, keepdim=True) + log_min_p * temp[:, None]
        return torch.where(z >= floor, z + temp[:, None] * noise, -1e30).argmax(-1)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _pick[(len(logits),)](logits, temp, count, out, log_min_p, seed, n_vocab=logits.shape[1], BLOCK=4096, num_warps=8)
    return out


class Slots:
    def __init__(self, model, device, n_slots, n_ctx, max_new, stop, log_min_p, seed):
        s, w = model.shape, model.weights["blk.0.attn_q.weight"]
        self.model, self.n, self.n_ctx, self.max_new, self.stop = model, n_slots, n_ctx, max_new, stop
        self.log_min_p, self.seed, self.device = log_min_p, seed, torch.device(device)
        size = (s.n_layers, n_slots, s.n_kv, n_ctx, s.head_dim)
        self.k, self.v = torch.zeros(size, dtype=w.dtype, device=device), torch.zeros(size, dtype=w.dtype, device=device)
        zeros = lambda *dims, kind=torch.int64: torch.zeros(dims, dtype=kind, device=device)
        self.ids, self.pos, self.made, self.limit = zeros(n_slots), zeros(n_slots), zeros(n_slots), zeros(n_slots)
        self.alive, self.temp, self.count = zeros(n_slots, kind=torch.bool), zeros(n_slots, kind=torch.float32), zeros(1, kind=torch.int32)
        self.out, self.all = zeros(n_slots, max_new), torch.arange(n_slots, device=device)
        half = torch.float16 if self.device.type == "cuda" else torch.float32
        self.output, self.half, self.graph = model.output().to(half), half, None

    @torch.no_grad()
    def step(self):
        m, s, w = self.model, self.model.shape, self.model.weights
        x = F.embedding(self.ids, w["token_embd.weight"])
        cos, sin = m.cos[self.pos], m.sin[self.pos]
        for i in range(s.n_layers):
            q, k, v = m.qkv(x, cos, sin, *llama.layer(w, i, llama.FIRST), s)
            self.k[i][self.all, :, self.pos], self.v[i][self.all, :, self.pos] = k, v
            x = m.attn_out_ffn(x, attend(q.contiguous(), self.k[i], self.v[i], self.pos), *llama.layer(w, i, llama.SECOND), s)
        h = llama.rms_norm(x.float(), w["output_norm.weight"], s.eps).to(self.half)
        token = pick(h @ self.output.T, self.temp, self.count, self.log_min_p, self.seed)
        at = self.made.clamp(max=self.max_new - 1)
        self.out[self.all, at] = torch.where(self.alive, token, self.out[self.all, at])
        self.made.add_(self.alive)
        self.pos.add_(self.alive)
        self.ids.copy_(torch.where(self.alive, token, self.ids))
        self.alive.logical_and_((token != self.stop) & (self.made < self.limit))
        self.count.add_(1)

    def run(self, n):
        if self.device.type != "cuda":
            for _ in range(n):
                self.step()
            return
        if self.graph is None:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
        for _ in range(n):
            self.graph.replay()

    @torch.no_grad()
    def fill(self, slots, prompts, temps, limits):
        """Prefills prompts into free slots, except for the last token, which is the input of the next step."""
        lens = [len(p) - 1 for p in prompts]
        dev = self.device
        total = sum(lens)
        at = torch.tensor(slots, device=dev)
        if total:
            n = torch.tensor(lens)
            ids = torch.tensor([t for p in prompts for t in p[:-1]])
            borders = torch.cat([torch.zeros(1, dtype=torch.int64), n.cumsum(0)])
            pos = (torch.arange(total) - torch.repeat_interleave(borders[:-1], n)).to(dev)
            slot = torch.repeat_interleave(torch.tensor(slots), n).to(dev)

            def keep(i, k, v):
                self.k[i][slot, :, pos], self.v[i][slot, :, pos] = k, v
            self.model.hidden(ids.to(dev), pos, llama.Docs(borders.to(dev, torch.int32), max(lens)), keep=keep)
        self.ids[at] = torch.tensor([p[-1] for p in prompts], device=dev)
        self.pos[at] = torch.tensor(lens, device=dev)
        self.made[at], self.alive[at] = 0, True
        self.temp[at], self.limit[at] = torch.tensor(temps, device=dev, dtype=torch.float32), torch.tensor(limits, device=dev)


FILL = 131072  # most prompt tokens of one prefill pass


def portions(free, jobs, first):
    """Yields (slots, jobs): free slots with jobs from `first` on, in groups that fit one prefill pass."""
    slots, these, size = [], [], 0
    for slot, j in zip(free, range(first, len(jobs))):
        if slots and size + len(jobs[j][0]) > FILL:
            yield slots, these
            slots, these, size = [], [], 0
        slots.append(slot)
        these.append(j)
        size += len(jobs[j][0])
    if slots:
        yield slots, these


def collect(slots, owner):
    """[(slot, ids)] of the sequences that have ended."""
    alive, made = slots.alive.cpu().tolist(), slots.made.cpu().tolist()
    ended = [s for s in range(slots.n) if owner[s] is not None and not alive[s]]
    rows = slots.out[torch.tensor(ended, dtype=torch.int64, device=slots.device)].cpu().numpy()
    return [(s, row[:made[s]].copy()) for s, row in zip(ended, rows)]


def generate(slots, jobs, until, log_line, every=16):
    """jobs: list of (prompt, temp). Yields (job number, ids) of those that end before `until` (seconds, monotonic).

    No prompt is started in the last tenth of the time; otherwise mainly long answers would be missing."""
    owner, free, nxt, done, made = [None] * slots.n, list(range(slots.n)), 0, 0, 0
    start = last_log = time.monotonic()
    last_begin = start + 0.9 * (until - start)
    while time.monotonic() < until:
        if time.monotonic() < last_begin:
            for part, these in portions(free, jobs, nxt):
                slots.fill(part, [jobs[j][0] for j in these], [jobs[j][1] for j in these],
                           [min(slots.max_new, slots.n_ctx - len(jobs[j][0])) for j in these])
                for s, j in zip(part, these):
                    owner[s] = j
                nxt = these[-1] + 1
            free = [s for s in free if owner[s] is None]
        if len(free) == slots.n:
            break
        slots.run(every)
        for s, ids in collect(slots, owner):
            yield owner[s], ids
            owner[s], made, done = None, made + len(ids), done + 1
            free.append(s)
        if time.monotonic() - last_log > 10:
            last_log = time.monotonic()
            log_line(f"  {done} of {len(jobs)} finished, {made:,} tokens, {made / (last_log - start):,.0f} per second")
    log_line(f"  {done} of {len(jobs)} finished, {made:,} tokens in {time.monotonic() - start:.1f} s")
