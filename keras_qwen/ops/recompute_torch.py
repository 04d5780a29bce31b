"""What `recompute` needs of torch, whose own gradients keep about as little."""


def lean(function):
    return lambda *tensors: function(*tensors)[0]


def after(slopes, *tensors):
    return tensors


def together(*tensors):
    return tensors


def no_gradients(*tensors):
    return (None,) * len(tensors)


def add_product(y, left, right):
    return y + left @ right
