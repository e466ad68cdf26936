"""Muon for matrices, Adam for embedding and norms, and rounding to Q4_0 during training.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix (five steps of a quintic Newton-Schulz iteration),
so that all directions of the matrix move equally; small models need about two thirds of the tokens that Adam needs.
Matrices of one shape are stacked, so a step is a few dozen launches for any number of layers.
"""
import torch


def orthogonal(m):
    """[n][rows][columns] -> nearly orthogonal matrices, computed in the device's fast precision."""
    x = m.bfloat16() if m.is_cuda else m.float()
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if flip else x).float()


class Optimizer:
    def __init__(self, weights, muon_lr, adam_lr, is_matrix=lambda name: name != "token_embd.weight"):
        self.weights, self.lr = weights, (muon_lr, adam_lr)
        self.groups = {}
        for name, w in weights.items():
            if w.ndim == 2 and is_matrix(name):
                self.groups.setdefault(tuple(w.shape), []).append(name)
        self.adam = [n for n in weights if not any(n in g for g in self.groups.values())]
        self.state = {n: torch.zeros_like(w) for n, w in weights.items()}
        self.second = {n: torch.zeros_like(weights[n]) for n in self.adam}
        self.steps = 0

    @torch.no_grad()
    def step(self, scale):
        """One step with the learning rates times `scale`; the gradients are cleared."""
        self.steps += 1
        for shape, names in self.groups.items():
            grad = torch.stack([self.weights[n].grad for n in names])
            momentum = torch.stack([self.state[n] for n in names]).lerp_(grad, 0.05)
            update = orthogonal(grad.lerp(momentum, 0.95)) * (self.lr[0] * scale * max(1, shape[0] / shape[1]) ** 0.5)
            for i, n in enumerate(names):
                self.state[n].copy_(momentum[i])
                self.weights[n].sub_(update[i])
        one, two = 1 - 0.9 ** self.steps, 1 - 0.98 ** self.steps
        for n in self.adam:
            g = self.weights[n].grad
            m, v = self.state[n].lerp_(g, 0.1), self.second[n].lerp_(g * g, 0.02)
            self.weights[n].addcdiv_(m, (v / two).sqrt_().add_(1e-10), value=-self.lr[1] * scale / one)
        for w in self.weights.values():
            w.grad = None

    def dump(self):
        return {"state": self.state, "second": self.second, "steps": self.steps}

    def restore(self, saved):
        for mine, theirs in ((self.state, saved["state"]), (self.second, saved["second"])):
            for n in mine:
                mine[n].copy_(theirs[n])
        self.steps = saved["steps"]


def round_q4_0(w):
    """w rounded to Q4_0: blocks of 32, step = (value of largest magnitude) / −8 in half precision, codes 0 … 15."""
    x = w.detach().unflatten(-1, (-1, 32))
    top = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    d = (top / -8).half().float()
    # codes use the step before its rounding to half precision, as in the reference quantiser
    code = torch.where(top == 0, 8.0, (x / torch.where(top == 0, 1.0, top / -8) + 8.5).clamp(0, 15).floor())
    return ((code - 8) * d).flatten(-2)


def straight_through(w):
    """Rounded weights in the forward pass, unchanged gradient in the backward pass."""
    return w + (round_q4_0(w) - w).detach()
