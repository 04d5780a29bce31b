"""What `linear_cross_entropy` needs of torch."""

import torch
from keras import ops

from keras_qwen.ops.linear_cross_entropy_loop import token_sums


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


def add(total, index, value):
    total[index] += value
    return total


def cross_entropy(logits, labels, weights, gradients):
    labels = labels.long()[:, None]
    correct = (torch.argmax(logits, dim=1, keepdim=True) == labels)[:, 0]
    log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
    losses = log_sum - torch.gather(logits, 1, labels)
    if not gradients:
        return losses[:, 0], correct, None
    slopes = logits.sub_(log_sum).exp_()
    slopes.scatter_add_(1, labels, torch.full_like(losses, -1.0))
    return losses[:, 0], correct, slopes.mul_(weights[:, None])


def most(plan, steps):
    return steps


def differentiable_sums(plan, hidden, kernel, labels, weights):
    return _Sums.apply(plan, hidden, kernel, labels, weights)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(context, plan, hidden, kernel, labels, weights):
        _, for_hidden, for_kernel, *_ = context.needs_input_grad
        plan = plan._replace(
            gradients=plan.gradients and (for_hidden or for_kernel), kernel_gradient=plan.kernel_gradient and for_kernel
        )
        loss_sum, correct_sum, hidden_gradient, kernel_gradient = token_sums(plan, hidden, kernel, labels, weights)
        context.plan, context.gradients = plan, (hidden_gradient, kernel_gradient)
        context.mark_non_differentiable(correct_sum)
        return loss_sum, correct_sum

    @staticmethod
    def backward(context, scale, _):
        hidden_gradient, kernel_gradient = context.gradients
        if context.plan.kernel_gradient:
            kernel_gradient = kernel_gradient.mul_(scale).reshape(-1, kernel_gradient.shape[-1])
            kernel_gradient = kernel_gradient.to(getattr(torch, context.plan.kernel_dtype))
        return None, hidden_gradient * scale.to(hidden_gradient.dtype), kernel_gradient, None, None
