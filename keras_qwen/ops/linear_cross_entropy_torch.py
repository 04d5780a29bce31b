"""What `linear_cross_entropy` needs of torch."""

import torch
from keras import ops


def adds_in_place():
    return False


def while_loop(condition, body, state):
    while condition(*state):
        state = body(*state)
    return state


def product(a, b, transpose_a=False, transpose_b=False):
    return torch.matmul(a.T if transpose_a else a, b.T if transpose_b else b).float()


def zeros(shape, dtype):
    return ops.zeros(shape, dtype)


def put(total, index, value):
    total[index] = value
    return total


def add(total, index, value, axis):
    total.select(axis, index).add_(value)
    return total


def top(logits, labels):
    largest, best = torch.max(logits, dim=1, keepdim=True)
    labels = labels.long()[:, None]
    return largest, torch.gather(logits, 1, labels), (best == labels)[:, 0]


def subtract_at(x, columns, values):
    return x - torch.where(torch.arange(x.shape[1], device=x.device) == columns[:, None], values, 0.0)


def materialize(x):
    return x


def most(plan, steps):
    return steps


def differentiable_sums(sums, plan, hidden, kernel, labels, weights):
    return _Sums.apply(sums, plan, hidden, kernel, labels, weights)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(context, sums, plan, hidden, kernel, labels, weights):
        _, _, for_hidden, for_kernel, *_ = context.needs_input_grad
        plan = plan._replace(
            gradients=plan.gradients and (for_hidden or for_kernel), kernel_gradient=plan.kernel_gradient and for_kernel
        )
        loss_sum, correct_sum, hidden_gradient, kernel_gradient = sums(plan, hidden, kernel, labels, weights)
        context.plan, context.gradients = plan, (hidden_gradient, kernel_gradient)
        context.kernel_shape = kernel.shape
        context.mark_non_differentiable(correct_sum)
        return loss_sum, correct_sum

    @staticmethod
    def backward(context, scale, _):
        hidden_gradient, kernel_gradient = context.gradients
        if context.plan.kernel_gradient:
            kernel_gradient = (kernel_gradient * scale).reshape(context.kernel_shape)
            kernel_gradient = kernel_gradient.to(getattr(torch, context.plan.kernel_dtype))
        return None, None, hidden_gradient * scale.to(hidden_gradient.dtype), kernel_gradient, None, None
